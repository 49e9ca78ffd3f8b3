"""The command `evaluate`: any predictor, exported or not, against any file of answer lengths."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from predictors.artifact import MANIFEST, NORMALIZATION
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target, write_json
from training.baselines import Baselines
from training.data import splits_of
from training.evaluate_config import EvaluateConfig
from training.evaluation import full_report, prompts_of, report_lines
from training.fitting.fits import FittedGroups
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.progress import tracked
from training.versions import versions_of

log = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]


class _Predicts(Protocol):
    def __call__(self, prompts: list[str]) -> tuple[FloatArray, FloatArray]:
        """mu [N] and sigma [N] of N prompts."""
        ...


@dataclass(frozen=True, slots=True)
class Predictor:
    """A predictor out of either kind of folder.

    Attributes:
        kind: "artifact" or "checkpoint".
        name: What identifies it.
        nu: Degrees of freedom of its distributions.
        data: What it was trained on: name, SHA-256, split, baselines.
        predict: Prompts to parameters.
    """

    kind: str
    name: dict[str, str]
    nu: float
    data: Mapping[str, Any]
    predict: _Predicts


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Runs the command; returns the content of the JSON file.

    Raises:
        InputError: Folder, data or options cannot be used together.
    """
    out = writable_target(config.json, "json")
    others = {
        name: writable_target(path, name)
        for name, path in (("figure", config.figure), ("predictions", config.predictions))
        if path is not None
    }
    existing_file(config.data, "data")
    predictor = open_predictor(config)
    fits = _select(_read(config, predictor), predictor, config)
    mu, sigma = predictor.predict(prompts_of(fits))
    baselines = predictor.data.get("baselines")
    report = full_report(fits, mu, sigma, Baselines.from_json(baselines) if baselines else None)
    result = report | {
        "predictor": {"kind": predictor.kind, "nu": predictor.nu, **predictor.name},
        "data": {"name": Path(config.data).name, "sha256": sha256_file(config.data), "split": config.split},
        "config": asdict(config),
        "versions": versions_of(("numpy", "scipy", "pyarrow")),
    }
    if "predictions" in others:
        _write_predictions(others["predictions"], fits, mu, sigma)
    if "figure" in others:
        from training.calibration_figure import draw_calibration

        draw_calibration(fits, mu, sigma, report, others["figure"])
    write_json(out, result)
    for line in report_lines(report):
        log.info("%s", line)
    return result


def open_predictor(config: EvaluateConfig) -> Predictor:
    """Opens the folder as what it is: an artifact has a manifest, a checkpoint has none.

    Raises:
        InputError: It is neither, or it is broken.
    """
    folder = Path(config.predictor)
    if (folder / MANIFEST).is_file():
        return _artifact(folder, config)
    if (folder / NORMALIZATION).is_file() or (folder / "config.json").is_file():
        return _checkpoint(folder, config)
    raise InputError(
        "predictor", str(folder), "an artifact folder of export-onnx or a checkpoint folder of train"
    )


def _artifact(folder: Path, config: EvaluateConfig) -> Predictor:
    from predictors.runtime import open_runtime

    runtime = open_runtime(folder, threads_per_run=config.threads or 1)
    manifest = runtime.artifact.manifest
    return Predictor(
        kind="artifact",
        name={"artifact_id": manifest.artifact_id, "artifact_version": manifest.artifact_version},
        nu=manifest.nu,
        data=manifest.training_data,
        predict=lambda prompts: runtime.predict(prompts, batch_size=config.batch_size),
    )


def _checkpoint(folder: Path, config: EvaluateConfig) -> Predictor:
    import torch

    from predictors.modules import load_checkpoint
    from training.prediction import pick_device, predict_prompts

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = load_checkpoint(folder)
    model = checkpoint.model.to(pick_device("auto"))
    data = checkpoint.training_info.get("data", {})
    return Predictor(
        kind="checkpoint",
        name={"folder": folder.resolve().name, "encoder": checkpoint.config.encoder},
        nu=checkpoint.config.nu,
        data=data if isinstance(data, dict) else {},
        predict=lambda prompts: predict_prompts(
            model,
            checkpoint.tokenizer,
            prompts,
            batch_size=config.batch_size,
            track=lambda batches: tracked(batches, "predict", config.progress),
        ),
    )


def _read(config: EvaluateConfig, predictor: Predictor) -> FittedGroups:
    options = FitOptions(
        nu=predictor.nu, censoring=config.censoring, keys=config.keys, max_tokens=config.max_tokens
    )
    fits = read_fits_or_fit(
        config.data,
        options,
        where={} if config.served_model is None else {"model": config.served_model},
    )
    if fits.nu != predictor.nu:
        raise InputError(
            f"{Path(config.data).name}, column nu", fits.nu, f"{predictor.nu:g}, as the predictor has"
        )
    prompts_of(fits)
    return fits


def _select(fits: FittedGroups, predictor: Predictor, config: EvaluateConfig) -> FittedGroups:
    if config.split == "all":
        return fits
    split = predictor.data.get("split")
    if not isinstance(split, dict) or not {"seed", "fractions"} <= set(split):
        raise InputError(
            "split", config.split, "all: the predictor's folder does not say how it split its data"
        )
    chosen = np.flatnonzero(splits_of(fits, int(split["seed"]), split["fractions"]) == config.split)
    if len(chosen) == 0:
        raise InputError("split", config.split, f"a split with prompts; none of {len(fits)} groups is in it")
    return fits.take(chosen)


def _write_predictions(path: Path, fits: FittedGroups, mu: FloatArray, sigma: FloatArray) -> None:
    """Key columns, prompt, and predicted mu, sigma, nu beside the fitted ones, as Parquet."""
    rows = fits.groups.rows
    columns = {
        "mu": pa.array(mu),
        "sigma": pa.array(sigma),
        "nu": pa.array(np.full(len(fits), fits.nu)),
        "fitted_mu": pa.array(fits.mu),
        "fitted_sigma": pa.array(fits.sigma),
    }
    for name, column in columns.items():
        rows = rows.append_column(name, column)
    with atomic_file(path) as temporary:
        pq.write_table(rows, temporary, compression="zstd")
