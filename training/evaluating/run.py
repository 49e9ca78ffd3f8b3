"""Evaluation of predictors on a file of output lengths."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.preprocessing import OrdinalEncoder

from predictors.heads import Predicted
from scheduler_core.errors import InputError
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import existing_file, sha256_file, writable_target, write_json
from scheduler_core.shell.table_files import read_parquet
from scheduler_core.shell.versions import versions_of
from training.evaluating.batch_predictor import (
    BatchPredictor,
    InferenceOptions,
    distinct,
    open_batch_predictor,
)
from training.evaluating.config import EvaluateConfig
from training.evaluating.evaluation import Candidate, compare
from training.evaluating.report import report_lines, write_html, write_markdown
from training.evaluating.rows import EvaluationRows, of_split, warn_of_training_prompts
from training.fitting.baselines import Baselines, baselines_of
from training.fitting.fits import FitOptions, FittedGroups, read_fits_or_fit

log = logging.getLogger(__name__)
#: Settings of the boosted trees: word features, trees, cross-validation folds.
_NUM_WORDS, _NUM_TREES, _FOLDS = 200, 200, 3


def run(config: EvaluateConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    data = evaluate(config)["data"]
    num_samples = data["num_samples"] + data["num_failed_samples"]
    return report_left_out({"failed": data["num_failed_samples"]}, num_samples, "samples")


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Runs the evaluation, writes the configured outputs, and returns the content of the JSON file."""
    targets = {
        name: writable_target(path, name)
        for name in EvaluateConfig.OUTPUTS
        if (path := getattr(config, name)) is not None
    }
    existing_file(config.data, "data")
    options = InferenceOptions(config.batch_size, config.threads, config.progress, access=config)
    predictor = open_batch_predictor(config.predictor, options)
    others = {
        name: open_batch_predictor(folder, options, "compare") for name, folder in config.others.items()
    }
    for name, other in others.items():
        if other.form != predictor.form and _has_conversations(config.data):
            allowed = (
                "predictors with the same input: the same parts of conversations, or the last user message"
            )
            raise InputError("compare", name, allowed)
    fits = _read(config.data, config, predictor)
    rows = _select(fits, predictor, config)
    warn_of_training_prompts(predictor.data, rows.prompts, config.split)
    candidates = [_candidate(name, other, rows) for name, other in others.items()]
    training_fits = None
    if (path := config.baselines_from) is not None:
        existing_file(path, "baselines_from")
        training_fits = _read(path, config, predictor, "baselines_from")
        trees = boosted_trees(EvaluationRows.of(training_fits), rows, seed=config.seed)
        candidates.append(Candidate("boosted trees", {"kind": "baseline"}, trees))
    content, scored = compare(
        rows,
        _candidate("predictor", predictor, rows),
        _baselines(training_fits, predictor),
        candidates,
        ceiling_seed=config.seed if config.ceiling else None,
    )
    content |= {
        "predictor": predictor.description,
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": config.split,
            "max_tokens": config.max_tokens,
            "num_samples": len(fits.groups.flat_lengths),
            "num_failed_samples": fits.groups.num_errors,
        },
        "config": asdict(config),
        "versions": versions_of(("numpy", "scipy", "pyarrow")),
    }
    if "markdown" in targets:
        write_markdown(content, targets["markdown"])
    if "html" in targets:
        write_html(scored, content, targets["html"])
    if "json" in targets:
        write_json(targets["json"], content)
    for line in report_lines(content):
        log.info("%s", line)
    return content


def _has_conversations(path: str) -> bool:
    """Whether a file has rows with `messages`, of which predictors may read different parts."""
    table = read_parquet(path, "data")
    return "messages" in table.column_names and table.column("messages").null_count < len(table)


def _candidate(name: str, predictor: BatchPredictor, rows: EvaluationRows) -> Candidate:
    unknown = {str(model) for model in rows.served_models} - set(predictor.served_models)
    if predictor.served_models and unknown:
        names = ", ".join(sorted(unknown))
        log.warning("%s was not trained on %s: predicted as an unknown served model", name, names)
    prediction = predictor.predict(rows.prompts, rows.served_models, rows.temperatures)
    return Candidate(name, predictor.description, prediction, predictor.bucket_edges)


def _read(path: str, config: EvaluateConfig, predictor: BatchPredictor, field: str = "data") -> FittedGroups:
    options = FitOptions(nu=predictor.fit_nu, keys=config.keys, max_tokens=config.max_tokens)
    where = {} if config.served_model is None else {"model": config.served_model}
    fits = read_fits_or_fit(path, options, field=field, where=where, min_samples=1, form=predictor.form)
    if fits.nu != predictor.fit_nu:
        column = f"{Path(path).name}, column nu"
        raise InputError(column, fits.nu, f"{predictor.fit_nu:g}, the predictor's nu")
    return fits


def _select(fits: FittedGroups, predictor: BatchPredictor, config: EvaluateConfig) -> EvaluationRows:
    fits = of_split(fits, predictor.data, config.split)
    if config.max_groups is not None and len(fits) > config.max_groups:
        rng = np.random.default_rng(config.seed)
        fits = fits.take(np.sort(rng.choice(len(fits), config.max_groups, replace=False)))
    return EvaluationRows.of(fits)


def _baselines(training_fits: FittedGroups | None, predictor: BatchPredictor) -> Baselines | None:
    if training_fits is not None:
        return baselines_of(training_fits)
    stored = predictor.data.get("baselines")
    if not isinstance(stored, dict) or not stored:
        log.warning("the predictor's folder has no baselines; --baselines_from FILE computes them")
        return None
    try:
        return Baselines(**stored)
    except TypeError as error:
        raise InputError("baselines", str(error), "the numbers that train stores") from error


def boosted_trees(train: EvaluationRows, rows: EvaluationRows, *, seed: int = 0) -> Predicted:
    """Predicts mu of `rows` with gradient-boosted trees, trained on at least three distinct prompts. The constant sigma
    is the scale of the training outputs around the cross-validated mu."""
    words = CountVectorizer(binary=True, max_features=_NUM_WORDS, token_pattern=r"(?u)\w+").fit(train.prompts)
    models = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
    models.fit(_as_column(train.served_models))
    inputs = _inputs(train, words, models)
    trees = HistGradientBoostingRegressor(
        max_iter=_NUM_TREES, min_samples_leaf=20, categorical_features=[0], random_state=seed
    )
    _, prompt = distinct(train.prompts)
    unseen = cross_val_predict(trees, inputs, train.fits.mu, groups=prompt, cv=GroupKFold(_FOLDS))
    distance = np.abs(np.log(train.outputs.lengths) - unseen[train.outputs.owner])
    nu = float(train.fits.nu)
    sigma = float(np.median(distance) / stdtrit(nu, 0.75))
    mu = trees.fit(inputs, train.fits.mu).predict(_inputs(rows, words, models))
    return Predicted(mu=np.asarray(mu), sigma=np.full(len(rows), max(sigma, 1e-6)), nu=nu)


def _as_column(values: Any) -> NDArray[np.object_]:
    return np.array([[value or ""] for value in values], dtype=object)


def _inputs(rows: EvaluationRows, words: Any, models: Any) -> NDArray[np.float64]:
    """Features [G, 4 + words]: served model, temperature, ln of the number of characters and of lines, and words."""
    numbers = [
        [np.nan if temperature is None else temperature, np.log1p(len(prompt)), np.log1p(prompt.count("\n"))]
        for prompt, temperature in zip(rows.prompts, rows.temperatures, strict=True)
    ]
    present = words.transform(rows.prompts).toarray()
    return np.hstack([models.transform(_as_column(rows.served_models)), np.array(numbers), present])
