"""`adapt`: correct an artifact for each served model from logged output lengths, and write it if it scores better."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from data_gen.splits import family_of, unit_hash
from predictors.artifact import KIND, Artifact, write_manifest
from predictors.manifest import MODEL, Manifest
from predictors.pretrained import artifact_folder
from predictors.runtime import ArtifactRuntime, open_runtime
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import is_model_name
from scheduler_core.prediction.linear_correction import fit, fit_each
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.prompt_text import PromptForm
from scheduler_core.shell.command import CHECK_FAILED, report_left_out
from scheduler_core.shell.files import atomic_directory, folder_target, writable_target, write_json
from scheduler_core.shell.options import check_outputs
from scheduler_core.shell.progress import tracked
from scheduler_core.shell.versions import versions_of
from training.correcting.comparison import SIDES, Comparison, corrected
from training.correcting.config import AdaptConfig
from training.correcting.corrected_graph import Adaptation, with_corrections
from training.correcting.encoder_shift import FeatureRuntime, fit_shift
from training.evaluating.scores import score_outcomes
from training.evaluating.split_runtime import SplitRuntime

log = logging.getLogger(__name__)
#: Minimum number of distinct prompts to fit a correction; served models with fewer keep their predictions.
MIN_PROMPTS = 20
#: Number of requests that select the base of a new served model; the artifact predicts them once per known model.
_BASE_REQUESTS = 100
_BATCH = 8
_COLUMNS = ("prompt_id", "prompt", "messages", "model", "temperature", "max_tokens", "output_tokens", "finish_reason", "error")  # fmt: skip
#: Lower bound of the scale of residuals for a shift by features.
_MIN_SIGMA = 0.05
#: Largest allowed difference between the graph's predictions and the fitted ones, in log tokens.
_TOLERANCE = 1e-3
#: Files of the old artifact that are not copied: written again, or of the old predictions only.
_REPLACED = frozenset({MODEL, "conformal.json", "run.json"})
#: Exit code of a command whose check did not pass.
NOT_BETTER = CHECK_FAILED


def adapt(config: AdaptConfig) -> int:
    """Runs the command; returns 3, and writes nothing, if the new artifact is not better on the held-back requests, else 0,
    or 3 if more than half of the rows of the log were left out."""

    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    assert config.report is not None
    report = writable_target(config.report, "report")
    check_outputs({"artifact": [config.artifact]}, {"report": report})  # only `out` may replace it
    old = open_runtime(artifact_folder(config.artifact), provider="cpu", threads_per_run=config.threads)
    manifest = old.artifact.manifest
    if "length" not in manifest.heads or MODEL not in manifest.files:
        raise InputError("artifact", config.artifact, f"an artifact with a length head and {MODEL}")
    outcomes, prompt_ids, left_out, num_rows = _read_log(config, manifest.form)
    bases = [default_base(manifest, outcome.served_model) for outcome in outcomes]
    outcomes = predicted(old, outcomes, bases, progress=config.progress)
    is_held_back = _held_back(outcomes, prompt_ids, config)
    fitting = [outcome for outcome, is_out in zip(outcomes, is_held_back, strict=True) if not is_out]
    before = [outcome for outcome, is_out in zip(outcomes, is_held_back, strict=True) if is_out]
    features = FeatureRuntime(old, config.threads)
    adaptations = _fit(old, features, fitting, config)
    with tempfile.TemporaryDirectory() as temporary:
        new = _write(Path(temporary), old.artifact, adaptations, features.tensor, config)
        after = predicted(new, before, [outcome.served_model for outcome in before], progress=False)
        _check_graph(before, after, adaptations, old, features)
        prompts = np.array([outcome.prompt for outcome in before], dtype=str)
        comparison = Comparison(before, after, np.unique(prompts, return_inverse=True)[1], config.seed)
        for name, *sides in (("metric", *SIDES), *comparison.table()):
            log.info("%-18s%28s%28s%28s", name, *sides)
        if not comparison.is_better:
            log.error("not better than the old artifact on %d requests held back: not written", len(before))
            report_left_out(left_out, num_rows)
            return NOT_BETTER
        with atomic_directory(out, KIND, overwrite=config.overwrite) as folder:
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
    lead = (
        f"{Path(config.artifact).name} corrected from {len(fitting)} requests of {Path(config.log).name}. Old and new "
        f"artifact are compared on {len(before)} requests whose prompts were held back from fitting."
    )
    corrections = {name: each.coefficients for name, each in adaptations.items()}
    comparison.page("Adapted artifact", lead, corrections).write(report)
    log.info("wrote %s and %s", out, report)
    return report_left_out(left_out, num_rows)


def _read_log(config: AdaptConfig, form: PromptForm) -> tuple[list[Outcome], list[str], Counter[str], int]:
    """Reads the last requests of the log that have the text of a prompt and an output, without predictions.

    Also returns the ids of their prompts, the numbers of rows of the log that were left out, by reason, and of all its rows.
    """
    from data_gen.importers.config import ImportLengthsConfig
    from data_gen.importers.import_lengths import import_lengths
    from data_gen.samples import read_samples
    from training.fitting.samples import with_conversations

    path = Path(config.log)
    left_out = Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        if config.kind != "samples" and not (config.kind == "auto" and _is_samples(path)):
            path = Path(temporary) / "samples.parquet"
            same = {
                name: getattr(config, name) for name in ("kind", "columns", "model", "max_tokens", "on_error")
            }
            options = ImportLengthsConfig(
                file=config.log, out=str(path), schema="samples", unknown="stop", **same
            )
            left_out.update(import_lengths(options)["skipped"])
        table = read_samples(path, _COLUMNS)
    num_rows = len(table) + left_out.total()
    if form.conversations:
        table = with_conversations(table, path, form)
    outcomes, prompt_ids = [], []
    for row in table.select([name for name in _COLUMNS if name in table.column_names]).to_pylist():
        is_complete = row["finish_reason"] != "length"
        if row["finish_reason"] == "error":
            left_out[f"failed ({(row['error'] or 'unknown').partition(':')[0]})"] += 1
        elif row["prompt"] is None:
            left_out["no text of the prompt"] += 1
        elif not is_model_name(row["model"] or ""):
            left_out["name of the served model is empty, too long or not printable"] += 1
        else:
            prompt_ids.append(row["prompt_id"])
            outcomes.append(
                Outcome(
                    prompt=row["prompt"],
                    served_model=row["model"],
                    temperature=row["temperature"],
                    output_tokens=row["output_tokens"],
                    finished=is_complete,
                    max_tokens=row["max_tokens"] if is_complete else row["output_tokens"],
                )
            )
    if not outcomes:
        allowed = (
            "requests with outputs and the text of their prompts (tailcast-proxy: --feedback_prompts stored)"
        )
        raise InputError("log", config.log, f"{allowed}; left out: {dict(left_out)}")
    return outcomes[-config.max_requests :], prompt_ids[-config.max_requests :], left_out, num_rows


def _is_samples(path: Path) -> bool:
    """Whether a file has the columns of `samples/2`."""
    from scheduler_core.shell.table_files import file_rows

    if path.suffix != ".parquet":
        return False
    _, first = next(file_rows(path, "log"), (0, {}))
    return {"prompt_id", "sample_index", "finish_reason", "run_id"} <= first.keys()


def default_base(manifest: Manifest, served_model: str | None) -> str:
    """Served model of the artifact for a name; for a new name the unknown model, or else the artifact's first one."""
    if served_model in manifest.served_models:
        return served_model or ""
    return "" if manifest.accepts_unknown_models else manifest.served_models[0]


def predicted(
    runtime: ArtifactRuntime,
    outcomes: Sequence[Outcome],
    served_models: Sequence[str | None],
    *,
    progress: bool,
) -> list[Outcome]:
    """The outcomes with the artifact's predictions for these served models, and the encoded tokens of their prompts."""
    prompts = [outcome.prompt or "" for outcome in outcomes]
    temperatures = [outcome.temperature for outcome in outcomes]
    rows = runtime.predict(
        prompts,
        served_models,
        temperatures,
        batch_size=_BATCH,
        track=lambda batches: tracked(batches, "predict", progress),
    ).rows()
    return [
        replace(outcome, prediction=runtime.prediction(row).length, prompt_tokens=text.num_tokens)
        for outcome, row, text in zip(outcomes, rows, runtime.tokenizer(prompts), strict=True)
    ]


def _held_back(
    outcomes: Sequence[Outcome], prompt_ids: Sequence[str], config: AdaptConfig
) -> NDArray[np.bool_]:
    """Mask of the requests held back from fitting, by a hash of the prompt; equal texts and turns of a conversation stay together."""
    hashes = [unit_hash(f"held back\x00{config.seed}\x00{family_of(name)}") for name in prompt_ids]
    prompts = [outcome.prompt for outcome in outcomes]
    texts = {text for text, value in zip(prompts, hashes, strict=True) if value < config.held_back}
    is_held_back = np.array([text in texts for text in prompts])
    counts = [len(set(prompts) - texts), len(texts)]
    if min(counts) < MIN_PROMPTS:
        allowed = f"at least {MIN_PROMPTS} to fit to, and {MIN_PROMPTS} others to compare on"
        raise InputError("log, prompts with outputs", f"{counts[0]} and {counts[1]}", allowed)
    return is_held_back


def _fit(
    runtime: ArtifactRuntime, features: FeatureRuntime, outcomes: Sequence[Outcome], config: AdaptConfig
) -> dict[str, Adaptation]:
    """Fits a correction for each served model with enough prompts; with a shift by the encoder's features where the CRPS of
    prompts that it was not fitted to is smaller."""
    manifest = runtime.artifact.manifest
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.served_model or "", []).append(outcome)
    base_of: dict[str, str] = {}
    for name, part in sorted(parts.items()):
        if (count := len({outcome.prompt for outcome in part})) < MIN_PROMPTS:
            log.warning("%s: only %d prompts to fit to; it keeps its predictions", name, count)
            del parts[name]
            continue
        base_of[name] = base = default_base(manifest, name)
        if name not in manifest.served_models and manifest.conditioning is not None:
            base_of[name] = _best_base(runtime, part[-_BASE_REQUESTS:], base, config)
            if base_of[name] != base:
                bases = [base_of[name]] * len(part)
                parts[name] = predicted(runtime, part, bases, progress=config.progress)
    if not parts:
        raise InputError(f"log: no served model has {MIN_PROMPTS} prompts to fit to")
    linear = fit_each(outcome for part in parts.values() for outcome in part)
    adaptations = {}
    for name, part in parts.items():
        coefficients, shift = linear[name], None
        if features.tensor is not None:
            h = features.features([outcome.prompt or "" for outcome in part])
            without = corrected(part, linear)
            sigma = np.array([each.sigma for outcome in without if (each := outcome.prediction)])
            shift, held_out = fit_shift(part, np.maximum(sigma, _MIN_SIGMA), h)
            of_shifted = fit(held_out)
            if _crps(corrected(held_out, {name: of_shifted})) < _crps(without):
                coefficients = of_shifted
            else:
                shift = None
        adaptations[name] = Adaptation(base_of[name], coefficients, shift)
    return adaptations


def _crps(outcomes: Sequence[Outcome]) -> float:
    """Mean CRPS of ln tokens."""
    pairs = [(outcome, outcome.prediction) for outcome in outcomes if outcome.prediction is not None]
    return float(score_outcomes(pairs).crps_log.mean())


def _best_base(runtime: ArtifactRuntime, outcomes: Sequence[Outcome], base: str, config: AdaptConfig) -> str:
    """The served model, `base` or one that the artifact knows, whose corrected predictions have the smallest CRPS."""
    prompts = [outcome.prompt or "" for outcome in outcomes]
    temperatures = np.array([outcome.temperature for outcome in outcomes], dtype=np.float64)
    names = list(dict.fromkeys((base, *runtime.artifact.manifest.served_models)))
    split = SplitRuntime(runtime, config.threads)
    crps: dict[str, float] = {}
    for name, rows in split.predict_as(prompts, names, temperatures).items():
        candidates = [
            replace(outcome, prediction=runtime.prediction(row).length, served_model="")
            for outcome, row in zip(outcomes, rows.rows(), strict=True)
        ]
        crps[name] = _crps(corrected(candidates, {"": fit(candidates)}))
    return min(crps, key=crps.__getitem__)


def _write(
    folder: Path,
    old: Artifact,
    adaptations: Mapping[str, Adaptation],
    tensor: str | None,
    config: AdaptConfig,
) -> ArtifactRuntime:
    """Writes the corrected artifact and opens it in the runtime."""
    for name in old.manifest.files.keys() - _REPLACED:
        shutil.copyfile(old.path / name, folder / name)
    model = onnx.load(old.path / MODEL, load_external_data=False)
    manifest = with_corrections(model, old.manifest, adaptations, tensor)
    onnx.save(model, folder / MODEL)
    run = {"command": "adapt", "config": asdict(config), "versions": versions_of(("numpy", "onnx"))}
    write_json(folder / "run.json", run)
    record = {
        "artifact_version": old.manifest.artifact_version,
        "corrections": {name: each.to_json() for name, each in adaptations.items()},
    }
    metrics = old.manifest.metrics
    changes = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": {**metrics, "adaptations": [*metrics.get("adaptations", ()), record]},
    }
    prefix = old.manifest.artifact_version.rpartition("+")[0] or None
    write_manifest(folder, manifest.model_copy(update=changes), version_prefix=prefix)
    runtime = open_runtime(folder, provider="cpu", threads_per_run=config.threads)
    runtime.warm_up()
    return runtime


def _check_graph(
    before: Sequence[Outcome],
    after: Sequence[Outcome],
    adaptations: Mapping[str, Adaptation],
    runtime: ArtifactRuntime,
    features: FeatureRuntime,
) -> None:
    """Raises TailcastError if the new graph's predictions differ from the fitted ones."""
    for name, adaptation in adaptations.items():
        rows = [row for row, outcome in enumerate(before) if outcome.served_model == name]
        if adaptation.base != default_base(runtime.artifact.manifest, name) or not rows:
            continue
        expected = [before[row] for row in rows]
        if adaptation.shift is not None:
            h = features.features([outcome.prompt or "" for outcome in expected])
            expected = adaptation.shift.moved(expected, h)
        expected = corrected(expected, {name: adaptation.coefficients})
        one, other = (
            np.array([(each.mu, np.log(each.sigma)) for outcome in part if (each := outcome.prediction)])
            for part in (expected, [after[row] for row in rows])
        )
        if (gap := np.abs(one - other).max()) > _TOLERANCE:
            raise TailcastError(f"{name}: the graph is {gap:g} log tokens off the fitted predictions")
