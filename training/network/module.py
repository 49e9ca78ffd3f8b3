"""One stage of training as a Lightning module: loss, metrics, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from predictors.modules.heads import level_probabilities
from predictors.modules.predictor import PromptPredictor
from training.network.config import StageConfig, TrainConfig
from training.network.data import SplitData, TrainingBatch
from training.network.failures import DivergedError
from training.network.losses import HeadLoss, LossInputs

# Number of urgency levels, from the most urgent, whose under-triage counts in the validation score.
CRITICAL_LEVELS = 2
# Metric for checkpoint selection and early stopping; smaller is better.
MONITOR = "validation_score"


def rate_factor(step: int, num_steps: int, num_warmup_steps: int, schedule: str = "linear") -> float:
    """Factor of the learning rate in a step: linear warm-up, then the schedule."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant":
        return 1.0
    return max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)


class StageModule(L.LightningModule):
    """Trains `network` to minimize the weighted sum of its heads' losses.

    Logged metrics: train_HEAD, the unweighted mean losses; validation_HEAD, the same, but for output lengths the mean over
    the validation files of each file's mean; validation_loss, the sum of the latter; validation_r2_log, validation_accuracy,
    validation_under_triage; validation_score, which selects the best epoch.

    Args:
        network, config: The predictor and the training options.
        number: Stage: 1 trains all parameters on tokens, 2 trains the heads on features of the frozen encoder.
        splits: "train" and "validation" data, used to describe a batch in errors.
        first_new_model: Train only the embeddings of served models from this number on; None: determined by `number`.
    """

    def __init__(
        self,
        network: PromptPredictor,
        config: TrainConfig,
        number: int,
        splits: Mapping[str, SplitData],
        first_new_model: int | None = None,
    ) -> None:
        super().__init__()
        # Checkpoints of stage 2 do not contain the frozen encoder.
        self.strict_loading = False
        self.network = network
        self.current: tuple[TrainingBatch, SplitData] | None = None
        self._config = config
        self._number = number
        self._splits = splits
        self._first_new_model = first_new_model
        self._sums: dict[str, Tensor] = {}

    def set_modes(self) -> None:
        """Sets trained parts to training mode and everything else, including a frozen encoder, to eval mode."""
        self.train()
        self.network.requires_grad_(True)
        if self._first_new_model is not None:
            self.network.requires_grad_(False).eval()
            self._embedding.requires_grad_(True)
        elif self._number != 1:
            self.network.encoder.requires_grad_(False).eval()
        elif self._config.lora is not None:
            for name, parameter in self.network.encoder.named_parameters():
                parameter.requires_grad_(".lora_" in name)

    @property
    def _embedding(self) -> nn.Parameter:
        assert self.network.conditions is not None
        weight = self.network.conditions.served_model.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def sigma_weight(self) -> float:
        """Weight of sigma in the objective mse in the current epoch; linear over the epochs of both stages."""
        config, length = self._config, self._config.length
        if length is None or length.objective != "mse":
            return 1.0
        stages = [config.stage(number).epochs for number in (1, 2)]
        epoch = self.current_epoch + (0 if self._number == 1 else stages[0])
        start, end = length.sigma_weight_start, length.sigma_weight_end
        return start + (end - start) * epoch / max(sum(stages) - 1, 1)

    def on_train_batch_start(self, batch: TrainingBatch, batch_idx: int) -> None:
        """At the first batch of an epoch, resets the sums and seeds torch, because checkpoints store no random state."""
        if batch_idx == 0:
            self._sums = {}
            entropy = np.random.SeedSequence([self._config.seed, self._number, self.current_epoch])
            torch.manual_seed(int(entropy.generate_state(1)[0]) + self.global_rank)

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        """Loss of one batch.

        Raises:
            DivergedError: It is not finite.
        """
        self.current = batch, self._splits["train"]
        conditioning = self._config.conditioning
        if conditioning is not None and self._first_new_model is None:
            no_model, no_temperature = torch.rand(2, len(batch.temperature), device=batch.temperature.device)
            batch = batch._replace(
                served_model=batch.served_model.masked_fill(no_model < conditioning.served_model_dropout, 0),
                temperature=batch.temperature.masked_fill(
                    no_temperature < conditioning.temperature_dropout, torch.nan
                ),
            )
        _, losses = self._losses(batch, self.sigma_weight)
        self._add({name: loss.sums().detach() for name, loss in losses.items()})
        weights = {name: float(getattr(self._config, name).weight) for name in losses}
        loss = torch.stack([weights[name] * head.mean() for name, head in losses.items()]).sum()
        self._check(loss, losses)
        self.log("loss", loss.detach())
        return loss

    def on_validation_epoch_start(self) -> None:
        """Logs the mean training losses of the finished epoch, if any."""
        if self._sums:
            self._log_losses("train")
        self._sums = {}

    def validation_step(self, batch: TrainingBatch, batch_idx: int) -> None:
        """Accumulates the losses and the metrics of a batch."""
        self.current = batch, self._splits["validation"]
        scores, losses = self._losses(batch, 1.0, auxiliary=False)
        sums = {name: loss.sums(weighted=name != "urgency") for name, loss in losses.items()}
        self._check(torch.stack([pair[0] for pair in sums.values()]).sum(), losses)
        if "urgency" in losses:
            sums |= _triage(scores["urgency"], batch)
        if "length" in losses:
            sums["squares"] = self._squares(scores["length"], batch)
        self._add(sums)

    def on_validation_epoch_end(self) -> None:
        """Logs losses, metrics and score of the validation split."""
        loss = self._log_losses("validation")
        metrics = self._metrics()
        # Under-triage by itself would select an epoch that predicts everything as urgent, so it is added to the loss.
        is_urgency = self._config.tasks == ("urgency",)
        score = loss + (metrics.get("under_triage", 0.0) if is_urgency else 0.0)
        self.log_dict({f"validation_{name}": value for name, value in metrics.items()}, sync_dist=True)
        self.log_dict({"validation_loss": loss, MONITOR: score}, sync_dist=True)

    def _log_losses(self, split: str) -> float:
        means = {}
        for name in self._config.tasks:
            total, count = self._sums[name].tolist()
            means[name] = total / count if count > 0 else 0.0
        self.log_dict({f"{split}_{name}": value for name, value in means.items()}, sync_dist=True)
        return float(sum(means.values()))

    def _losses(
        self, batch: TrainingBatch, sigma_weight: float, *, auxiliary: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, HeadLoss]]:
        features = self.network.features(*batch.inputs) if self._number == 1 else batch.inputs[0]
        scores = self.network.scores(features, batch.served_model, batch.temperature, batch.row_prompt)
        inputs = LossInputs(self.network, batch, sigma_weight, auxiliary)
        losses = {
            name: HeadLoss(*getattr(self._config, name).loss(scores[name].float(), inputs))
            for name in self._config.tasks
        }
        return scores, losses

    def _squares(self, score: Tensor, batch: TrainingBatch) -> Tensor:
        """Sums for R2 of mu [4]: count, squared errors, and sum and sum of squares of the rows' mean log lengths.

        mu is clipped to ln max_tokens, because no length exceeds it.
        """
        samples = batch.samples
        mu = torch.minimum(self.network.length_parameters(score)["mu"], torch.log(samples.max_tokens))
        target = samples.mean(torch.log(samples.tokens)).double()
        parts = (torch.ones_like(target), (target - mu.double()) ** 2, target, target**2)
        return torch.stack([part.sum() for part in parts])

    def _metrics(self) -> dict[str, float]:
        """R2 of mu as a prediction of each row's mean log length; accuracy of urgency levels; fraction of prompts with a
        critical level that are predicted as less urgent."""
        sums = {name: value.tolist() for name, value in self._sums.items()}
        metrics: dict[str, float] = {}
        if "squares" in sums:
            count, errors, total, squares = sums["squares"]
            variation = squares - total**2 / max(count, 1.0)
            if variation > 0:
                metrics["r2_log"] = 1 - errors / variation
        for name in ("accuracy", "under_triage"):
            if name in sums and sums[name][1] > 0:
                metrics[name] = sums[name][0] / sums[name][1]
        return metrics

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            total = self._sums.get(name)
            self._sums[name] = value.double() if total is None else total + value.double()

    def _check(self, loss: Tensor, losses: Mapping[str, HeadLoss]) -> None:
        if not torch.isfinite(loss):
            raise self._diverged(
                "loss", {name: float(value.mean().detach()) for name, value in losses.items()}
            )

    def _diverged(self, what: str, losses: Mapping[str, float]) -> DivergedError:
        assert self.current is not None
        return DivergedError(what, self.current_epoch, *self.current, losses)

    def configure_optimizers(self) -> Any:
        """Adam or AdamW with parameter groups for heads and encoder; the schedule is stepped after each batch."""
        config, options = self._config, self._config.stage(self._number)
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        # Embeddings of existing served models get no gradient, so they must not decay either.
        decay = 0.0 if self._first_new_model is not None else config.weight_decay
        groups = parameter_groups(self.network, options)
        optimizer = kind(groups, eps=config.adam_epsilon, weight_decay=decay, fused=True)
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = math.ceil(options.warmup_fraction * num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, num_steps, num_warmup, options.schedule)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the global norm of the gradient.

        Raises:
            DivergedError: The norm is not finite.
        """
        if self._first_new_model is not None and self._embedding.grad is not None:
            self._embedding.grad[: self._first_new_model] = 0.0
        trained = [value for value in self.network.parameters() if value.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self._config.clip_norm)
        if not torch.isfinite(norm):
            raise self._diverged("gradient", {})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Removes frozen encoder weights from the checkpoint."""
        frozen = {
            name
            for name, value in self.named_parameters()
            if name.startswith("network.encoder.") and not value.requires_grad
        }
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if name not in frozen}


def parameter_groups(network: PromptPredictor, stage: StageConfig) -> list[dict[str, Any]]:
    """Parameter groups with learning rates: heads and conditioning, then the encoder; without frozen parameters."""
    parts: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            parts[name.startswith("encoder.")].append(parameter)
    rates = {True: stage.learning_rate, False: stage.heads_learning_rate or stage.learning_rate}
    return [{"params": parts[part], "lr": rates[part]} for part in parts if parts[part]]


def _triage(logits: Tensor, batch: TrainingBatch) -> dict[str, Tensor]:
    """Number of correct levels, and of critical ones predicted as less urgent, each with its number of cases [2]."""
    has_label = batch.level_weight > 0
    level = level_probabilities(logits.float()).argmax(dim=-1)
    critical = has_label & (batch.level < CRITICAL_LEVELS)
    pairs = {
        "accuracy": ((level == batch.level) & has_label, has_label),
        "under_triage": ((level > batch.level) & critical, critical),
    }
    return {name: torch.stack([hits.sum(), total.sum()]) for name, (hits, total) in pairs.items()}
