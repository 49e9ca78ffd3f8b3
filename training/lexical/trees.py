"""The two ensembles: mu by trees, then sigma by trees, in one of two ways that validation chooses between.

- "fitted": trees learn ln of the fitted sigma: how much answers to one prompt scatter.
- "residuals": trees learn the mean of ln |ln x - mu|, mu predicted for prompts the trees have not seen (by folds), less
  E ln |T|: how far answers are from the prediction, which includes how badly mu is known.

Either is stretched by one factor, of largest likelihood on the validation rows. The smaller CRPS (of log tokens) wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from scheduler_core.lengths import LogT
from training.evaluating.scoring import score_answers
from training.lexical.config import TrainLexicalConfig
from training.lexical.table import LexicalTable, ModelEffects

FloatArray = NDArray[np.float64]
#: Distances below this are taken for this: answers of equal length say nothing finer.
_SMALLEST = 1e-2


@dataclass(frozen=True, slots=True)
class LexicalTrees:
    """A trained predictor.

    Attributes:
        effects: Of served models.
        mu, log_sigma: Fitted HistGradientBoostingRegressors.
        log_scale: Added to the trees' ln sigma.
        way: How sigma was made, "fitted" or "residuals".
        trials: Way -> validation CRPS (log tokens), nll, factor, number of trees.
    """

    effects: ModelEffects
    mu: Any
    log_sigma: Any
    log_scale: float
    way: str
    trials: dict[str, dict[str, float]]

    def predict(self, table: LexicalTable) -> tuple[FloatArray, FloatArray]:
        """mu [G] and sigma [G] in log tokens."""
        inputs = table.inputs(self.effects)
        mu = np.asarray(self.mu.predict(inputs))
        return mu, np.exp(np.asarray(self.log_sigma.predict(inputs)) + self.log_scale)


def train_trees(train: LexicalTable, validation: LexicalTable, config: TrainLexicalConfig) -> LexicalTrees:
    """Trains both ensembles and chooses how sigma is made.

    Args:
        train: Rows that are learnt from.
        validation: Rows of other prompts.
        config: Of the trees.
    """
    effects = ModelEffects.of(train)
    inputs, held = train.inputs(effects), validation.inputs(effects)
    mu = _fit(inputs, train.mu, held, validation.mu, config)
    held_mu = np.asarray(mu.predict(held))
    targets = {
        "fitted": (train.log_sigma, validation.log_sigma),
        "residuals": (
            _log_distance(train, _out_of_fold(train, inputs, int(mu.n_iter_), config), config.nu),
            _log_distance(validation, held_mu, config.nu),
        ),
    }
    models: dict[str, tuple[Any, float]] = {}
    trials: dict[str, dict[str, float]] = {}
    for way, (target, held_target) in targets.items():
        model = _fit(inputs, target, held, held_target, config)
        log_sigma = np.asarray(model.predict(held))
        log_scale = _best_log_scale(validation, held_mu, log_sigma, config.nu)
        scores = score_answers(held_mu, np.exp(log_sigma + log_scale), config.nu, validation.rows.answers)
        models[way] = (model, log_scale)
        trials[way] = {
            "crps_log_tokens": float(scores.crps_log.mean()),
            "nll": float(scores.nll.mean()),
            "factor": float(np.exp(log_scale)),
            "num_trees": int(model.n_iter_),
        }
    way = min(trials, key=lambda name: trials[name]["crps_log_tokens"])
    return LexicalTrees(effects, mu, models[way][0], models[way][1], way, trials)


def _fit(
    inputs: NDArray[np.float32],
    target: FloatArray,
    held_inputs: NDArray[np.float32],
    held_target: FloatArray,
    config: TrainLexicalConfig,
    num_trees: int | None = None,
) -> Any:
    """Trees on the rows with a target; as many of them as do best on the held-back rows, or `num_trees`."""
    known, held = np.isfinite(target), np.isfinite(held_target)
    model = _regressor(config, num_trees or config.num_trees)
    model.fit(inputs[known], target[known])
    if num_trees is None and held.any():
        losses = [
            float(((stage - held_target[held]) ** 2).mean())
            for stage in model.staged_predict(held_inputs[held])
        ]
        best = int(np.argmin(losses)) + 1
        if best < model.n_iter_:
            model = _regressor(config, best)
            model.fit(inputs[known], target[known])
    return model


def _regressor(config: TrainLexicalConfig, num_trees: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(
        max_iter=num_trees,
        learning_rate=config.learning_rate,
        max_leaf_nodes=config.max_leaf_nodes,
        min_samples_leaf=config.min_samples_leaf,
        l2_regularization=config.l2,
        early_stopping=False,
        random_state=config.seed,
    )


def _out_of_fold(
    train: LexicalTable, inputs: NDArray[np.float32], num_trees: int, config: TrainLexicalConfig
) -> FloatArray:
    """mu of each row by trees that have not seen its prompt [G]."""
    numbers = np.unique(train.prompt)
    order = np.random.default_rng(config.seed).permutation(len(numbers))
    fold_of = np.empty(int(numbers.max()) + 1, dtype=np.intp)
    fold_of[numbers[order]] = np.arange(len(numbers)) % config.folds
    fold = fold_of[train.prompt]
    found = np.empty(len(train))
    for number in range(config.folds):
        out = fold == number
        if not out.any():
            continue
        rest = ~out if (~out).any() else out
        nothing = np.empty(0)
        model = _fit(inputs[rest], train.mu[rest], inputs[:0], nothing, config, num_trees)
        found[out] = model.predict(inputs[out])
    return found


def _log_distance(table: LexicalTable, mu: FloatArray, nu: float) -> FloatArray:
    """Mean of ln |ln x - mu| of each row's finished answers, less E ln |T| [G]; NaN without a finished answer."""
    answers = table.rows.answers
    owner, finished = answers.owner, answers.finished
    distance = np.log(np.maximum(np.abs(np.log(answers.lengths) - mu[owner]), _SMALLEST))
    counts = np.bincount(owner[finished], minlength=len(table))
    sums = np.bincount(owner[finished], weights=distance[finished], minlength=len(table))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / counts - _mean_log_of_t(nu))


def _mean_log_of_t(nu: float) -> float:
    """E ln |T| for Student's t, by its quantiles."""
    levels = 0.5 + (np.arange(2000) + 0.5) / 4000
    return float(np.log(stats.t.ppf(levels, nu)).mean())


def _best_log_scale(table: LexicalTable, mu: FloatArray, log_sigma: FloatArray, nu: float) -> float:
    """ln of the factor on sigma of largest likelihood, within 1/20 and 20."""
    answers = table.rows.answers
    owner, logs = answers.owner, np.log(answers.lengths)
    z = (logs - mu[owner]) * np.exp(-log_sigma[owner])
    unit = LogT(0.0, 1.0, nu)

    def loss(log_scale: float) -> float:
        scaled = np.clip(z * np.exp(-log_scale), -500.0, 500.0)
        density = stats.t.logpdf(scaled, nu) - log_scale
        return -float(
            np.where(
                answers.finished, density, unit.logsf(np.exp(scaled)) if not answers.finished.all() else 0.0
            ).mean()
        )

    found = optimize.minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded", options={"xatol": 1e-4})
    return float(found.x)
