"""The command `train-lexical` from data to artifact folder."""

from __future__ import annotations

import logging
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import (
    KIND,
    MODEL,
    Conditions,
    LexicalInput,
    Manifest,
    write_manifest,
)
from predictors.lexical import FEATURE_NAMES, FEATURE_VERSION
from scheduler_core.errors import TailcastError
from scheduler_core.files import atomic_directory, folder_target, sha256_file
from training.evaluating.baselines import Baselines
from training.evaluating.judging import Judged
from training.evaluating.predictors import Prediction
from training.lexical.config import TrainLexicalConfig
from training.lexical.graph import build_graph, largest_difference
from training.lexical.table import LexicalTable, read_table, split_by_prompt, split_fractions
from training.lexical.trees import LexicalTrees, train_trees
from training.versions import versions_of

log = logging.getLogger(__name__)
PACKAGES = ("numpy", "scikit-learn", "onnx", "onnxruntime")
#: Largest difference between the graph and the trees that is let through, in mu and ln sigma.
PARITY = 1e-5
_PARITY_ROWS = 4096


def train_lexical(config: TrainLexicalConfig) -> Manifest:
    """Trains, checks and writes the artifact; returns its manifest.

    Raises:
        InputError: Options or data cannot be used.
        TailcastError: The exported graph does not say what the trees say.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    table = read_table(config.data, config, "data")
    if config.validation is None:
        train, validation = split_by_prompt(table, config.validation_share, config.seed)
    else:
        train, validation = table, read_table([config.validation], config, "validation")
    trees = train_trees(train, validation, config)
    metrics = _metrics(trees, validation, config)
    for way, trial in trees.trials.items():
        log.info("sigma by %s: %s", way, ", ".join(f"{name} {value:.4g}" for name, value in trial.items()))
    model = build_graph(trees, len(FEATURE_NAMES))
    parity = _checked_parity(model, trees, validation)
    with atomic_directory(out, KIND, overwrite=config.overwrite) as folder:
        (folder / MODEL).write_bytes(model.SerializeToString())
        manifest = Manifest(
            artifact_id=config.artifact_id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            kind="lexical",
            heads=("length",),
            nu=config.nu,
            lexical=LexicalInput(
                feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION, max_chars=config.max_chars
            ),
            served_models=trees.effects.names,
            conditioning=Conditions(unknown_models=True, temperature=True),
            training_data=_training_data(train, config),
            metrics={"validation": metrics, "sigma": {"way": trees.way, "trials": trees.trials}},
            parity={"max_abs_diff": parity, "tolerance": PARITY},
            versions=versions_of(PACKAGES),
            license=config.license,
        )
        return write_manifest(folder, manifest)


def _metrics(trees: LexicalTrees, validation: LexicalTable, config: TrainLexicalConfig) -> dict[str, Any]:
    mu, sigma = trees.predict(validation)
    metrics = Judged.of(validation.rows, Prediction(mu, sigma, config.nu)).metrics()
    log.info(
        "validation, %d rows: R2 mu %s, tau %s, CRPS %s tokens",
        len(validation),
        *(
            "-" if value is None else f"{value:.3f}"
            for value in (
                metrics["mu"]["r2"],
                metrics["kendall_tau"]["median_vs_fitted_mu"],
                metrics["crps_tokens"],
            )
        ),
    )
    return metrics


def _checked_parity(model: Any, trees: LexicalTrees, table: LexicalTable) -> dict[str, float]:
    """Compares graph and trees on validation rows, unknown models and temperatures among them."""
    at = slice(0, _PARITY_ROWS)
    numbers = trees.effects.numbers(table.rows.served_models)[at].copy()
    known: NDArray[np.float32] = np.array(
        [np.nan if value is None else value for value in table.rows.temperatures[at]], dtype=np.float32
    )
    numbers[::7] = 0
    known[::11] = np.nan
    found = largest_difference(model, trees, table.features[at], numbers, known)
    if max(found.values()) > PARITY:
        raise TailcastError(f"the exported graph differs from the trees by {found}, more than {PARITY:g}")
    return found


def _training_data(train: LexicalTable, config: TrainLexicalConfig) -> dict[str, Any]:
    split = (
        None
        if config.validation is not None
        else {"seed": config.seed, "fractions": list(split_fractions(config.validation_share))}
    )
    files = [*config.data, *([config.validation] if config.validation else [])]
    return {
        "name": ", ".join(Path(path).name for path in config.data),
        "sha256": sha256_file(config.data[0]),
        "files": {Path(path).name: sha256_file(path) for path in files},
        "split": split,
        "num_rows": len(train),
        "baselines": Baselines.of(train.rows.fits, train.rows.prompts).to_json(),
        "config": {name: value for name, value in asdict(config).items() if name != "out"},
    }
