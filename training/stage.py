"""One stage of training as a Lightning module: loss, optimiser, schedule, checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from predictors.modules import NormalizedParameters
from scheduler_core.errors import TailcastError
from training.config import StageConfig
from training.data import Batch


class DivergedError(TailcastError):
    """Loss or gradient is no finite number.

    Attributes:
        prompt_ids: Prompts of the batch.
        epoch: Epoch of the stage.
        what: "loss" or "gradient".
    """

    def __init__(self, what: str, epoch: int, prompt_ids: Sequence[str]) -> None:
        shown = ", ".join(prompt_ids[:3]) + (", ..." if len(prompt_ids) > 3 else "")
        super().__init__(
            f"training stopped: the {what} of a batch in epoch {epoch} is not finite (prompts {shown}); "
            "a lower learning rate, or other targets for these prompts, may help"
        )
        self.what = what
        self.epoch = epoch
        self.prompt_ids = list(prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What a stage needs to know beside the network.

    Attributes:
        stage: Epochs and learning rates.
        steps_per_epoch: Batches of the training split.
        sigma_weights: Weight of sigma in the loss in each epoch of the stage.
        weight_decay, adam_epsilon, clip_norm: Of the optimiser.
        prompt_ids: Of the training split, to name a batch.
    """

    stage: StageConfig
    steps_per_epoch: int
    sigma_weights: tuple[float, ...]
    weight_decay: float
    adam_epsilon: float
    clip_norm: float
    prompt_ids: Sequence[str]


def rate_factor(step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Share of the learning rate in a step: linear rise over the warm-up, then linear fall to 0 after the last step."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    return max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)


class StageModule(L.LightningModule):
    """Trains `network` to minimise MSE(mu) + w MSE(sigma), both in z-scores.

    Args:
        network: Holds the parameters that are trained; all of them are.
        forward: Batch inputs -> z-scores; a method of `network`.
        settings: Loss weights, optimiser, schedule.
    """

    def __init__(
        self, network: nn.Module, forward: Callable[..., NormalizedParameters], settings: StageSettings
    ) -> None:
        super().__init__()
        self.network = network
        self._forward = forward
        self._settings = settings
        self._sums = {"train": torch.zeros(3), "validation": torch.zeros(3)}
        self._batch: Batch | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch.

        Raises:
            DivergedError: It is not finite.
        """
        self._batch = batch
        mu, sigma = self._errors(batch, "train")
        loss = mu + self.sigma_weight * sigma
        if not torch.isfinite(loss):
            raise DivergedError("loss", self.current_epoch, self._batch_prompts())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up squared errors; the unweighted loss of the whole split is `losses("validation")`."""
        self._errors(batch, "validation")

    def on_train_epoch_start(self) -> None:
        """Starts the sums of the epoch's errors."""
        self._sums["train"] = torch.zeros(3)

    def on_validation_epoch_start(self) -> None:
        """Starts the sums of the split's errors."""
        self._sums["validation"] = torch.zeros(3)

    @property
    def sigma_weight(self) -> float:
        """Weight of sigma in the loss in the current epoch."""
        return self._settings.sigma_weights[self.current_epoch]

    def losses(self, split: str) -> tuple[float, float]:
        """MSE of mu and of sigma in the epoch so far, over all examples of "train" or "validation"."""
        mu, sigma, count = self._sums[split].tolist()
        return mu / count, sigma / count

    def _errors(self, batch: Batch, split: str) -> tuple[Tensor, Tensor]:
        scores = self._forward(*batch.inputs)
        mu = nn.functional.mse_loss(scores.mu.float(), batch.mu)
        sigma = nn.functional.mse_loss(scores.sigma.float(), batch.sigma)
        count = len(batch.mu)
        sums = torch.stack([mu.detach() * count, sigma.detach() * count, mu.new_tensor(count)])
        self._sums[split] = self._sums[split].to(sums.device) + sums
        return mu, sigma

    def _batch_prompts(self) -> list[str]:
        assert self._batch is not None
        return [self._settings.prompt_ids[number] for number in self._batch.position.tolist()]

    def configure_optimizers(self) -> Any:
        """AdamW in two groups, encoder and towers; a linear schedule that is stepped after each batch."""
        stage = self._settings.stage
        towers = [value for name, value in self.network.named_parameters() if not name.startswith("encoder.")]
        encoder = [value for name, value in self.network.named_parameters() if name.startswith("encoder.")]
        groups = [{"params": towers, "lr": stage.towers_learning_rate or stage.learning_rate}]
        if encoder:
            groups.append({"params": encoder, "lr": stage.learning_rate})
        optimizer = torch.optim.AdamW(
            groups, eps=self._settings.adam_epsilon, weight_decay=self._settings.weight_decay, fused=True
        )
        num_steps = stage.epochs * self._settings.steps_per_epoch
        num_warmup = math.ceil(stage.warmup_fraction * num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, num_steps, num_warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the norm of the whole gradient.

        Raises:
            DivergedError: It is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._settings.clip_norm)
        if not torch.isfinite(norm):
            raise DivergedError("gradient", self.current_epoch, self._batch_prompts())
