"""The command `evaluate`: any predictor, exported or not, against any file of answer lengths."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, existing_file, sha256_file, writable_target, write_json
from training.evaluating.baselines import Baselines
from training.evaluating.config import EvaluateConfig
from training.evaluating.conformal_coverage import conformal_coverage
from training.evaluating.predictors import OpenedPredictor, Prediction, RunOptions, open_predictor
from training.evaluating.report import Contender, Report, compare, report_lines
from training.evaluating.rows import EvaluationRows, known_cap, of_split, prompts_of
from training.fitting.fits import FittedGroups
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.versions import versions_of

log = logging.getLogger(__name__)
_OUTPUTS = ("html", "markdown", "figure", "predictions")


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Runs the command; returns the content of the JSON file.

    Raises:
        InputError: Folder, data or options cannot be used together.
    """
    out = writable_target(config.json, "json")
    targets = {
        name: writable_target(path, name) for name in _OUTPUTS if (path := getattr(config, name)) is not None
    }
    existing_file(config.data, "data")
    options = RunOptions(config.batch_size, config.threads, config.progress)
    predictor = open_predictor(config.predictor, options)
    others = {name: open_predictor(folder, options, "beside") for name, folder in config.others.items()}
    for name, other in others.items():
        if other.conversations != predictor.conversations:
            allowed = "predictors that all read whole conversations, or all the last user message"
            raise InputError("beside", name, allowed)
    cap = config.max_tokens or known_cap(config.data)
    rows = _select(_read(config.data, config, predictor, cap), predictor, config)
    baselines = _baselines(config, predictor, cap)
    report = compare(
        rows,
        _contender("predictor", predictor, rows),
        baselines,
        [_contender(name, other, rows) for name, other in others.items()],
        ceiling_seed=config.seed if config.ceiling else None,
    )
    content = report.content | {
        "predictor": _described(predictor),
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": config.split,
            "max_tokens": cap,
        },
        "conformal": conformal_coverage(predictor, rows, report.judged.prediction),
        "config": asdict(config),
        "versions": versions_of(("numpy", "scipy", "pyarrow")),
    }
    if "predictions" in targets:
        _write_predictions(targets["predictions"], rows, report.judged.prediction)
    _draw_and_write(report, content, targets)
    write_json(out, content)
    for line in report_lines(content):
        log.info("%s", line)
    return content


def _draw_and_write(report: Report, content: dict[str, Any], targets: dict[str, Path]) -> None:
    if "figure" in targets:
        from training.evaluating.figures import draw_overview

        draw_overview(report, targets["figure"])
    if "markdown" in targets:
        from training.evaluating.markdown import markdown_of

        with atomic_file(targets["markdown"]) as temporary:
            temporary.write_text(markdown_of(content), encoding="utf-8")
    if "html" in targets:
        from training.evaluating.html import html_of

        with tempfile.TemporaryDirectory() as folder, atomic_file(targets["html"]) as temporary:
            temporary.write_text(html_of(report, content, Path(folder)), encoding="utf-8")


def _described(predictor: OpenedPredictor) -> dict[str, Any]:
    return {"kind": predictor.kind, "nu": predictor.nu, **predictor.name}


def _contender(label: str, predictor: OpenedPredictor, rows: EvaluationRows) -> Contender:
    _say_unknown(label, predictor, rows)
    prediction = predictor.predict(rows.prompts, rows.served_models, rows.temperatures)
    return Contender(label, _described(predictor), prediction, predictor.bucket_edges)


def _say_unknown(label: str, predictor: OpenedPredictor, rows: EvaluationRows) -> None:
    if not predictor.served_models:
        return
    known = set(predictor.served_models)
    unknown = sorted({str(name) for name in rows.served_models if name not in known})
    if unknown:
        log.warning(
            "%s was not trained on %s: predicted as an unknown served model", label, ", ".join(unknown)
        )


def _read(
    path: str, config: EvaluateConfig, predictor: OpenedPredictor, cap: int | None, field: str = "data"
) -> FittedGroups:
    options = FitOptions(nu=predictor.fit_nu, censoring=config.censoring, keys=config.keys, max_tokens=cap)
    where = {} if config.served_model is None else {"model": config.served_model}
    fits = read_fits_or_fit(
        path,
        options,
        field=field,
        where=where,
        min_samples=1,
        conversations=predictor.conversations,
    )
    if fits.nu != predictor.fit_nu:
        raise InputError(
            f"{Path(path).name}, column nu", fits.nu, f"{predictor.fit_nu:g}, as the predictor has"
        )
    prompts_of(fits)
    return fits


def _select(fits: FittedGroups, predictor: OpenedPredictor, config: EvaluateConfig) -> EvaluationRows:
    if config.split != "all":
        split = predictor.data.get("split")
        if not isinstance(split, dict) or not {"seed", "fractions"} <= set(split):
            raise InputError(
                "split", config.split, "all: the predictor's folder does not say how it split its data"
            )
        fits = fits.take(of_split(fits, int(split["seed"]), split["fractions"], config.split))
    if config.max_groups is not None and len(fits) > config.max_groups:
        rng = np.random.default_rng(config.seed)
        fits = fits.take(np.sort(rng.choice(len(fits), config.max_groups, replace=False)))
    return EvaluationRows.of(fits)


def _baselines(config: EvaluateConfig, predictor: OpenedPredictor, cap: int | None) -> Baselines | None:
    if config.baselines_from is not None:
        existing_file(config.baselines_from, "baselines_from")
        own_cap = config.max_tokens or known_cap(config.baselines_from) or cap
        fits = _read(config.baselines_from, config, predictor, own_cap, "baselines_from")
        return Baselines.of(fits, prompts_of(fits))
    kept = predictor.data.get("baselines")
    if not isinstance(kept, dict) or not kept:
        log.warning("the predictor's folder keeps no baselines; --baselines-from FILE makes them")
        return None
    return Baselines.from_json(kept)


def _write_predictions(path: Path, rows: EvaluationRows, prediction: Prediction) -> None:
    """Key columns, prompt, and predicted mu, sigma, nu beside the fitted ones, as Parquet."""
    if prediction.mu is None or prediction.sigma is None:
        raise InputError("predictions", str(path), "unset: this predictor has no distribution")
    table = rows.fits.groups.rows
    columns = {
        "mu": prediction.mu,
        "sigma": prediction.sigma,
        "nu": np.broadcast_to(prediction.nu, len(rows)),
        "fitted_mu": rows.fits.mu,
        "fitted_sigma": rows.fits.sigma,
    }
    for name, column in columns.items():
        table = table.append_column(name, pa.array(column))
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
