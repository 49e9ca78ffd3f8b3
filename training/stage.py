"""One stage of training as a Lightning module: loss, optimiser, schedule, checks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from predictors.modules import PromptPredictor
from predictors.modules.heads import level_probabilities
from training.config import StageConfig
from training.data import Batch, SplitData
from training.failures import DivergedError, describe
from training.objectives.total import HeadLoss, Objectives

# Urgency levels whose under-triage decides which epoch is best.
CRITICAL_LEVELS = 2
_LAYER = re.compile(r"\.(?:layers?|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What a stage needs to know beside the network.

    Attributes:
        stage: Epochs, learning rates, schedule.
        trains_encoder: Batches hold tokens, and the encoder is trained.
        sigma_weights: Weight of sigma in the objective mse in each epoch of the stage.
        served_model_dropout: Probability that a row hides its served model.
        optimizer: adamw or adam.
        weight_decay, adam_epsilon, clip_norm: Of the optimiser.
        lexical_dropout: Probability that a prompt hides its lexical features.
        first_new_model: Train the embeddings of served models from this number on and nothing else; None: see above.
    """

    stage: StageConfig
    trains_encoder: bool
    sigma_weights: tuple[float, ...]
    served_model_dropout: float
    optimizer: str
    weight_decay: float
    adam_epsilon: float
    clip_norm: float
    lexical_dropout: float = 0.0
    first_new_model: int | None = None


def rate_factor(step: int, num_steps: int, num_warmup_steps: int, schedule: str = "linear") -> float:
    """Share of the learning rate in a step: linear rise over the warm-up, then as the schedule says."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant":
        return 1.0
    left = max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)
    return left if schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * min(left, 1.0))


class StageModule(L.LightningModule):
    """Trains `network` to minimise the weighted sum of its heads' objectives.

    Args:
        network: The predictor.
        objectives: Heads that are trained.
        settings: Optimiser, schedule, what is trained.
        train, validation: The splits, to name what is in a batch.
    """

    def __init__(
        self,
        network: PromptPredictor,
        objectives: Objectives,
        settings: StageSettings,
        train: SplitData,
        validation: SplitData,
    ) -> None:
        super().__init__()
        self.network = network
        self.batch: Batch | None = None
        self.split = "train"
        self._objectives = objectives
        self._settings = settings
        self._data = {"train": train, "validation": validation}
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "validation": {}}

    def set_modes(self) -> None:
        """Training mode for what is trained, eval mode for all else, dropout of a frozen encoder included."""
        settings = self._settings
        self.train()
        self.network.requires_grad_(True)
        if settings.first_new_model is not None:
            self.network.requires_grad_(False).eval()
            self._embedding.requires_grad_(True)
        elif not settings.trains_encoder:
            self.network.encoder.requires_grad_(False).eval()

    def trained_weights(self) -> dict[str, Tensor]:
        """Weights by name that this stage may change."""
        weights: dict[str, Tensor] = self.network.state_dict()
        if self._settings.trains_encoder:
            return weights
        return {name: value for name, value in weights.items() if not name.startswith("encoder.")}

    @property
    def _embedding(self) -> nn.Parameter:
        assert self.network.conditions is not None
        weight = self.network.conditions.served_model.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch.

        Raises:
            DivergedError: It is not finite.
        """
        self._look_at(batch, "train")
        rate = self._settings.served_model_dropout
        if rate > 0:
            hidden = torch.rand(batch.served_model.shape, device=batch.served_model.device) < rate
            batch = batch._replace(served_model=batch.served_model.masked_fill(hidden, 0))
        _, losses = self._losses(batch, self.sigma_weight)
        self._add("train", {name: loss.sums().detach() for name, loss in losses.items()})
        loss = self._objectives.total(losses)
        self._check(loss, losses)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up the unweighted losses; those of the whole split are `losses("validation")`."""
        self._look_at(batch, "validation")
        scores, losses = self._losses(batch, 1.0)
        sums = {name: loss.sums() for name, loss in losses.items()}
        self._check(sum((pair[0] for pair in sums.values()), torch.zeros(())), losses)
        if "urgency" in losses:
            sums |= _triage(scores["urgency"], batch)
        if "length" in losses:
            sums["squares"] = self._squares(scores["length"], batch)
        self._add("validation", sums)

    def _losses(self, batch: Batch, sigma_weight: float) -> tuple[dict[str, Tensor], dict[str, HeadLoss]]:
        features = self.network.features(*batch.inputs) if self._settings.trains_encoder else batch.inputs[0]
        rate = self._settings.lexical_dropout
        if self.network.training and rate > 0:
            hidden = torch.rand(len(features), device=features.device) < rate
            features = self.network.without_lexical(features, hidden)
        scores = self._objectives.scores(self.network, features, batch)
        return scores, self._objectives.losses(self.network, scores, batch, sigma_weight)

    def _squares(self, score: Tensor, batch: Batch) -> Tensor:
        """For R2 of mu: count, squared errors, sum and squares of the mean log lengths of the rows [4].

        No answer is longer than the cap, so for this no mu is either.
        """
        mu = torch.minimum(self.network.length_parameters(score)["mu"], torch.log(batch.answers.cap)).double()
        target = batch.answers.mean(torch.log(batch.answers.lengths)).double()
        parts = (torch.ones_like(mu), (target - mu) ** 2, target, target**2)
        return torch.stack([part.sum() for part in parts])

    def _add(self, split: str, sums: dict[str, Tensor]) -> None:
        held = self._sums[split]
        for name, value in sums.items():
            held[name] = held[name] + value.double() if name in held else value.double()

    def on_train_epoch_start(self) -> None:
        """Starts the sums of the epoch's losses."""
        self._sums["train"] = {}

    def on_validation_epoch_start(self) -> None:
        """Starts the sums of the split's losses."""
        self._sums["validation"] = {}

    @property
    def sigma_weight(self) -> float:
        """Weight of sigma in the objective mse in the current epoch."""
        return self._settings.sigma_weights[self.current_epoch]

    def losses(self, split: str) -> dict[str, float]:
        """Mean loss of each head in the epoch so far, over all examples of "train" or "validation", unweighted."""
        sums = {name: self._sums[split][name].tolist() for name in self._objectives.weights}
        return {name: total / max(count, 1.0) for name, (total, count) in sums.items()}

    def metrics(self) -> dict[str, float]:
        """What the validation split shows beside the losses.

        Returns:
            r2_log: R2 of mu, at most ln of the cap, as a prediction of each row's mean log length; accuracy of urgency levels; under_triage:
            share of prompts of the critical levels that are taken for less urgent.
        """
        found: dict[str, float] = {}
        sums = {name: value.tolist() for name, value in self._sums["validation"].items()}
        if "squares" in sums:
            count, errors, total, squares = sums["squares"]
            spread = squares - total**2 / max(count, 1.0)
            if spread > 0:
                found["r2_log"] = 1 - errors / spread
        for name in ("accuracy", "under_triage"):
            if name in sums and sums[name][1] > 0:
                found[name] = sums[name][0] / sums[name][1]
        return found

    def rank(self) -> tuple[float, float]:
        """What makes an epoch better, smaller first: the unweighted validation loss of all heads; then that loss itself.

        Where urgency is the only head, the share of the critical levels' prompts that are under-triaged is added to the
        first: alone it would prefer an epoch that takes everything for urgent.
        """
        loss = sum(self.losses("validation").values())
        if set(self._objectives.weights) == {"urgency"}:
            return loss + self.metrics().get("under_triage", 0.0), loss
        return loss, loss

    def _look_at(self, batch: Batch, split: str) -> None:
        self.batch, self.split = batch, split

    def _check(self, loss: Tensor, losses: dict[str, HeadLoss]) -> None:
        if not torch.isfinite(loss):
            heads = {name: float(value.mean().detach()) for name, value in losses.items()}
            raise self._diverged("loss", heads)

    def _diverged(self, what: str, heads: dict[str, float]) -> DivergedError:
        assert self.batch is not None
        content = describe(self.batch, self._data[self.split])
        return DivergedError(what, self.split, self.current_epoch, content | {"losses": heads})

    def configure_optimizers(self) -> Any:
        """Adam or AdamW in groups, heads and layers of the encoder; the schedule is stepped after each batch."""
        settings, stage = self._settings, self._settings.stage
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        # Embeddings of known served models get no gradient, and must not decay either.
        decay = 0.0 if settings.first_new_model is not None else settings.weight_decay
        groups = parameter_groups(self.network, stage)
        # A fused optimiser undoes the scaling of half-precision gradients itself, after they were clipped.
        fused = self.trainer.precision != "16-mixed"
        optimizer = kind(groups, eps=settings.adam_epsilon, weight_decay=decay, fused=fused)
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = math.ceil(stage.warmup_fraction * num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, num_steps, num_warmup, stage.schedule)
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
            DivergedError: It is not finite, and no scaling of the loss can be to blame.
        """
        if self._settings.first_new_model is not None and self._embedding.grad is not None:
            self._embedding.grad[: self._settings.first_new_model] = 0.0
        trained = [value for value in self.network.parameters() if value.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self._settings.clip_norm)
        if not torch.isfinite(norm) and self.trainer.precision != "16-mixed":
            raise self._diverged("gradient", {})


def parameter_groups(network: PromptPredictor, stage: StageConfig) -> list[dict[str, Any]]:
    """Trained parameters with their learning rates: heads and conditions, then the encoder by layer."""
    heads = [
        value
        for name, value in network.named_parameters()
        if value.requires_grad and not name.startswith("encoder.")
    ]
    groups: list[dict[str, Any]] = [{"params": heads, "lr": stage.heads_learning_rate or stage.learning_rate}]
    encoder = [
        (name, value)
        for name, value in network.named_parameters()
        if value.requires_grad and name.startswith("encoder.")
    ]
    if not encoder:
        return groups
    depth = {name: _layer(name) for name, _ in encoder}
    deepest = max(depth.values())
    for level in sorted(set(depth.values()), reverse=True):
        rate = stage.learning_rate * stage.layer_decay ** (deepest - level)
        if stage.layer_decay == 1 and len(groups) == 2:
            groups[1]["params"] += [value for name, value in encoder if depth[name] == level]
        else:
            groups.append({"params": [value for name, value in encoder if depth[name] == level], "lr": rate})
    return groups


def _layer(name: str) -> int:
    """0 for embeddings and what else belongs to no layer, layer i as i + 1."""
    found = _LAYER.search(name)
    return int(found.group(1)) + 1 if found else 0


def _triage(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Right levels, and critical ones taken for less urgent; each with the number they are out of [2]."""
    labelled = batch.level_weight > 0
    level = level_probabilities(logits.float()).argmax(dim=-1)
    critical = labelled & (batch.level < CRITICAL_LEVELS)
    pairs = {
        "accuracy": ((level == batch.level) & labelled, labelled),
        "under_triage": ((level > batch.level) & critical, critical),
    }
    return {name: torch.stack([hit.sum(), out_of.sum()]) for name, (hit, out_of) in pairs.items()}
