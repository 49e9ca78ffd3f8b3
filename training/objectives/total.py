"""The loss of a batch: every head's objective, and their weighted sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from predictors.modules import PromptPredictor
from training.config import TrainConfig
from training.data import Batch
from training.objectives.classes import bucket_cross_entropy, ordinal_cross_entropy
from training.objectives.crps import log_t_crps, standard_quantiles
from training.objectives.listmle import list_mle
from training.objectives.mse import fitted_parameters_mse, within_mse
from training.objectives.nll import log_t_nll
from training.objectives.regression import length_regression

NUM_QUANTILES = 64


class HeadLoss(NamedTuple):
    """Losses of one head: of each of its examples, rows or prompts, and their weights [N]; weight 0: no example."""

    values: Tensor
    weights: Tensor

    def mean(self) -> Tensor:
        """Weighted sum over the number of examples; 0 without any.

        Not over the sum of the weights: a batch of light examples would then count as much as one of heavy ones.
        """
        return (self.values * self.weights).sum() / (self.weights > 0).sum().clamp_min(1)

    def sums(self) -> Tensor:
        """Sum over the examples, each counted once, and their number [2]."""
        counted = self.weights > 0
        return torch.stack([torch.where(counted, self.values, 0.0).sum(), counted.sum().to(self.values)])


class Objectives:
    """The objectives of a run.

    Args:
        config: Heads that are trained, with objective and weight.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.weights = {name: float(getattr(config, name).weight) for name in config.tasks}
        length = config.length
        if length is not None and length.objective == "crps":
            self._quantiles = standard_quantiles(length.nu, NUM_QUANTILES)

    def scores(self, model: PromptPredictor, features: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Scores of the batch by head: urgency of its prompts, the others of its rows; features [P, F]."""
        rows = features[batch.row_prompt]
        conditions = None
        if model.conditions is not None:
            conditions = model.conditions(rows, batch.served_model, batch.temperature)
        return model.heads(model.text_features(features), rows, conditions)  # type: ignore[no-any-return]

    def losses(
        self, model: PromptPredictor, scores: dict[str, Tensor], batch: Batch, sigma_weight: float
    ) -> dict[str, HeadLoss]:
        """Losses by head; `sigma_weight` is that of the objective mse."""
        found: dict[str, HeadLoss] = {}
        for name in self.weights:
            score = scores[name].float()
            if name == "urgency":
                values = ordinal_cross_entropy(score, batch.level)
                found[name] = HeadLoss(values, batch.level_weight)
            else:
                found[name] = HeadLoss(self._of_rows(name, model, score, batch, sigma_weight), batch.weight)
        return found

    def total(self, losses: dict[str, HeadLoss]) -> Tensor:
        """Weighted sum of the heads' mean losses."""
        return torch.stack([self.weights[name] * loss.mean() for name, loss in losses.items()]).sum()

    def _of_rows(
        self, name: str, model: PromptPredictor, score: Tensor, batch: Batch, sigma_weight: float
    ) -> Tensor:
        config, answers = self._config, batch.answers
        if name == "length":
            return self._length(model, score, batch, sigma_weight)
        if name == "bucket":
            assert model.config.heads.bucket is not None
            return bucket_cross_entropy(score, torch.tensor(model.config.heads.bucket.edges), answers)
        if name == "regression":
            assert config.regression is not None
            statistics = model.normalization
            return length_regression(
                score,
                answers,
                mean=statistics.regression_mean,
                std=statistics.regression_std,
                error=config.regression.objective,
            )
        assert config.rank is not None
        return list_mle(score, answers.mean(answers.lengths), group_tokens=config.rank.group_tokens)

    def _length(self, model: PromptPredictor, score: Tensor, batch: Batch, sigma_weight: float) -> Tensor:
        assert self._config.length is not None
        task = self._config.length
        if task.objective == "mse":
            mu, sigma = fitted_parameters_mse(score, batch.fits)
            return mu + sigma_weight * sigma
        parameters = model.length_parameters(score)
        loss = self._of_answers(model, parameters, batch)
        if task.within:
            loss = loss + task.within_weight * within_mse(score[:, -1], batch.fits[:, 2])
        return loss

    def _of_answers(self, model: PromptPredictor, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        assert self._config.length is not None
        task, mu = self._config.length, parameters["mu"]
        if task.objective == "crps":
            levels, standard = (values.to(mu.device) for values in self._quantiles)
            return log_t_crps(mu, parameters["sigma"], levels, standard, batch.answers)
        assert model.config.heads.length is not None
        nu = parameters.get("nu", mu.new_tensor(model.config.heads.length.nu))
        return log_t_nll(mu, parameters["sigma"], nu, batch.answers, integers=task.integers)
