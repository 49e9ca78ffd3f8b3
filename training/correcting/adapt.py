"""`adapt`: correct an artifact for each served model from logged output lengths, and write it if it scores better."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.splits import family_of, unit_hash
from predictors.artifact import KIND, Artifact, write_manifest
from predictors.manifest import CONFORMAL, MODEL, Manifest
from predictors.pretrained import PRETRAINED, artifact_folder
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import is_model_name
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.report.page import Page
from scheduler_core.shell.command import CHECK_FAILED, report_left_out
from scheduler_core.shell.files import atomic_directory, folder_target, writable_target, write_json
from scheduler_core.shell.options import check_outputs
from scheduler_core.shell.threads import check_threads
from scheduler_core.shell.versions import versions_of
from training.evaluating.scores import COVERAGE_LEVELS, OutputScores, kendall_tau

if TYPE_CHECKING:
    from predictors.runtime import ArtifactRuntime, Predicted
    from training.correcting.corrected_graph import FeatureRuntime
    from training.correcting.corrections import Correction, Requests

log = logging.getLogger(__name__)
FloatArray = NDArray[np.float64]
#: Minimum number of distinct prompts to fit a correction; served models with fewer keep their predictions.
MIN_PROMPTS = 20
#: Number of requests that select the base of a new served model; the artifact predicts them once per known model.
_BASE_REQUESTS = 100
_RESAMPLES = 400
_COLUMNS = ("prompt_id", "prompt", "messages", "model", "temperature", "max_tokens", "output_tokens", "finish_reason", "error")  # fmt: skip
#: Largest allowed difference between the graph's predictions and the fitted ones, in log tokens.
_TOLERANCE = 1e-3
#: Metrics of a comparison; the new artifact is written if the first one improves.
DECIDING = "CRPS, ln tokens"
METRICS = (DECIDING, "CRPS, tokens", "tau", "P50", "P90", "P99")
SIDES = ("old", "new", "new - old")
#: Exit code of a command whose check did not pass.
NOT_BETTER = CHECK_FAILED


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """Correct an artifact's predicted lengths for each served model of a log, compare it with the old one on held-back requests, and write it if it is better."""

    INPUTS = ("log",)
    OUTPUTS = ("out", "report")

    log: str
    """Log of finished requests with their prompts: a file of OpenAI-style requests and responses, a feedback folder of tailcast-proxy (with --feedback_prompts stored), or any table; see docs/importing.md."""
    out: str
    """Artifact folder to write, with the same artifact id. With --overwrite true it may be the old one's: a running service then loads it."""
    artifact: str = PRETRAINED
    """Artifact folder to start from, or pretrained."""
    overwrite: bool = False
    """Replace an earlier artifact at `out`, if it holds nothing else, and the report; anything else there is never replaced."""
    report: str | None = None
    """HTML page to write, with the comparison; unset: OUT.html."""
    kind: str = "auto"
    """Kind of the log, as in import-lengths; samples: the output of import-lengths; auto: detected from the content."""
    columns: str = ""
    """Column mapping for kind log, as in import-lengths."""
    model: str = ""
    """Name of the served model for requests without one."""
    on_error: Literal["skip", "stop"] = "skip"
    """Rows that cannot be used: skip them and report their number and reasons, or stop at the first."""
    max_tokens: int | None = None
    """Maximum number of output tokens of each request, for logs that do not record it."""
    held_back: float = 0.3
    """Fraction of the prompts excluded from fitting; the old and the new artifact are compared on their requests."""
    max_requests: int = 5000
    """Maximum number of requests; only the last ones of the log are used."""
    seed: int = 0
    """Seed of the split and of the bootstrap intervals."""
    threads: int = 2
    """Threads of the model."""
    progress: bool = True
    """Show progress bars on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, INTEGERS), max_requests=(50, INTEGERS), seed=(0, INTEGERS))
        check_ranges(self, held_back=(0.1, 0.9))
        check_threads("threads", self.threads)
        if self.report is None:  # so that it is checked as any output
            object.__setattr__(self, "report", f"{self.out.rstrip('/')}.html")


def adapt(config: AdaptConfig) -> int:
    """Runs the command; returns 3, and writes nothing, if the new artifact is not better on the held-back requests, else 0,
    or 3 if more than half of the rows of the log were left out."""
    from predictors.runtime import open_runtime
    from training.correcting.corrected_graph import FeatureRuntime

    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    assert config.report is not None
    report = writable_target(config.report, "report")
    check_outputs({"artifact": [config.artifact]}, {"report": report})  # only `out` may replace it
    old = open_runtime(artifact_folder(config.artifact), provider="cpu", threads_per_run=config.threads)
    manifest = old.artifact.manifest
    if "length" not in manifest.heads:
        raise InputError("artifact", config.artifact, "an artifact with a length head")
    requests, left_out, num_rows = _read_log(config, conversations=manifest.conversations)
    artifact = FeatureRuntime(old, config.threads)
    requests = artifact.predict(
        requests, _default_bases(manifest, requests.served_models), progress=config.progress
    )
    is_held_back = _held_back(requests, config)
    corrections, fits = _corrections(old, artifact, requests.take(~is_held_back), config)
    before = requests.take(is_held_back)
    with tempfile.TemporaryDirectory() as temporary:
        new = _write(Path(temporary), old.artifact, corrections, artifact.tensor, config)
        after = _predicted(new, before)
        _check_graph(before, after, corrections, manifest)
        comparison = compare(before, after, config.seed)
        for name, sides in (("metric", SIDES), *comparison.items()):
            log.info("%-18s%28s%28s%28s", name, *sides)
        if comparison[DECIDING][-1].estimate >= 0:
            log.error("not better than the old artifact on %d requests held back: not written", len(before))
            report_left_out(left_out, num_rows)
            return NOT_BETTER
        with atomic_directory(out, KIND, overwrite=config.overwrite) as folder:
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
    _page(config, comparison, fits, before, after, num_fitted=len(requests) - len(before)).write(report)
    log.info("wrote %s and %s", out, report)
    return report_left_out(left_out, num_rows)


def _read_log(config: AdaptConfig, *, conversations: bool) -> tuple[Requests, Counter[str], int]:
    """Reads the last requests of the log that have the text of a prompt and an output; predictions are left empty.

    Also returns the numbers of rows of the log that were left out, by reason, and of all its rows.
    """
    from data_gen.importers.config import ImportLengthsConfig
    from data_gen.importers.import_lengths import import_lengths
    from data_gen.samples import read_samples
    from training.correcting.corrections import Requests
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
    if conversations:
        table = with_conversations(table, path)
    is_error = pc.equal(table["finish_reason"], "error")
    has_prompt = pc.is_valid(table["prompt"])
    errors = table.filter(is_error)["error"].to_pylist()
    left_out.update(f"failed ({(error or 'unknown').partition(':')[0]})" for error in errors)
    if num_hashed := pc.sum(pc.and_not(pc.invert(has_prompt), is_error)).as_py():
        left_out["no text of the prompt"] += num_hashed
    table = table.filter(pc.and_not(has_prompt, is_error))
    is_named = pa.array([is_model_name(name or "") for name in table["model"].to_pylist()], pa.bool_())
    if num_strange := len(table) - pc.sum(is_named, min_count=0).as_py():
        left_out["name of the served model is empty, too long or not printable"] += num_strange
    table = table.filter(is_named)
    table = table.slice(max(0, len(table) - config.max_requests))
    if not len(table):
        allowed = (
            "requests with outputs and the text of their prompts (tailcast-proxy: --feedback_prompts stored)"
        )
        raise InputError("log", config.log, f"{allowed}; left out: {dict(left_out)}")
    prompts, prompt_ids, models = (table[name].to_numpy() for name in ("prompt", "prompt_id", "model"))
    lengths, limits, temperatures = (
        table[name].cast(pa.float64()).to_numpy() for name in ("output_tokens", "max_tokens", "temperature")
    )
    finished = table["finish_reason"].to_numpy() != "length"
    max_tokens = np.where(finished, np.where(np.isnan(limits), np.inf, limits), lengths)
    requests = Requests(prompts, prompt_ids, models, temperatures, lengths, finished, max_tokens)
    return requests, left_out, num_rows


def _is_samples(path: Path) -> bool:
    """Whether a file has the columns of `samples/2`."""
    from scheduler_core.shell.table_files import file_rows

    if path.suffix != ".parquet":
        return False
    _, first = next(file_rows(path, "log"), (0, {}))
    return {"prompt_id", "sample_index", "finish_reason", "run_id"} <= first.keys()


def _default_bases(manifest: Manifest, served_models: NDArray[np.object_]) -> NDArray[np.object_]:
    """Served model of the artifact for each name; for a new name the unknown model, or else the artifact's first one."""
    other = "" if manifest.accepts_unknown_models else manifest.served_models[0]
    return np.array(
        [name if name in manifest.served_models else other for name in served_models], dtype=object
    )


def _predicted(runtime: ArtifactRuntime, requests: Requests) -> Requests:
    """Returns the requests with the artifact's predictions."""
    columns = (list(requests.prompts), list(requests.served_models), list(requests.temperatures))
    return replace(requests, **_length_fields(runtime.predict(*columns, batch_size=8)))


def _length_fields(predicted: Predicted) -> dict[str, Any]:
    """Fields of `Requests` for predicted lengths."""
    arrays = predicted.arrays()
    quantiles = arrays.get("quantiles", np.zeros((len(predicted), 0)))
    return {"mu": arrays["mu"], "sigma": arrays["sigma"], "nu": arrays["nu"], "quantiles": quantiles}


def _held_back(requests: Requests, config: AdaptConfig) -> NDArray[np.bool_]:
    """Mask of the requests held back from fitting, by a hash of the prompt; equal texts and turns of a conversation stay together."""
    hashes = [unit_hash(f"held back\x00{config.seed}\x00{family_of(name)}") for name in requests.prompt_ids]
    texts = set(requests.prompts[np.array(hashes) < config.held_back])
    is_held_back = np.array([text in texts for text in requests.prompts])
    counts = [len(set(requests.prompts[rows])) for rows in (~is_held_back, is_held_back)]
    if min(counts) < MIN_PROMPTS:
        allowed = f"at least {MIN_PROMPTS} to fit to, and {MIN_PROMPTS} others to compare on"
        raise InputError("log, prompts with outputs", f"{counts[0]} and {counts[1]}", allowed)
    return is_held_back


def _corrections(
    runtime: ArtifactRuntime, artifact: FeatureRuntime, requests: Requests, config: AdaptConfig
) -> tuple[dict[str, Correction], dict[str, Any]]:
    """Fits a correction for each served model with enough prompts; also returns how each was selected."""
    from training.correcting.corrections import select_correction
    from training.evaluating.split_runtime import SplitRuntime

    manifest = runtime.artifact.manifest
    split = None if manifest.conditioning is None else SplitRuntime(runtime, config.threads)
    corrections, fits = {}, {}
    for name in sorted(set(requests.served_models)):
        part = requests.take(requests.served_models == name)
        if (count := len(set(part.prompts))) < MIN_PROMPTS:
            log.warning("%s: only %d prompts to fit to; it keeps its predictions", name, count)
            continue
        [default] = set(_default_bases(manifest, part.served_models))
        bases = {default: part}
        if name not in manifest.served_models and split is not None:
            few = part.take(np.arange(len(part)) >= len(part) - _BASE_REQUESTS)
            names = list(dict.fromkeys((default, *manifest.served_models)))
            predicted = split.predict_as(few.prompts.tolist(), names, few.temperatures)
            candidates = {each: replace(few, **_length_fields(predicted[each])) for each in names}
            base = select_correction(candidates, config.seed, ["shift and scale"])[0].base
            if base != default:
                bases[base] = artifact.predict(
                    part, np.full(len(part), base, dtype=object), progress=config.progress
                )
        correction, trials = select_correction(bases, config.seed)
        corrections[name] = correction
        fits[name] = {"num_requests": len(part), **correction.to_json(), "crps_log_held_out": trials}
    return corrections, fits


def _write(
    folder: Path,
    old: Artifact,
    corrections: Mapping[str, Correction],
    features: str | None,
    config: AdaptConfig,
) -> ArtifactRuntime:
    """Writes the corrected artifact and opens it in the runtime."""
    import onnx

    from predictors.runtime import open_runtime
    from training.correcting.corrected_graph import with_corrections

    # Conformal quantiles are valid for the old predictions only.
    for name in old.manifest.files.keys() - {MODEL, CONFORMAL, "run.json"}:
        shutil.copyfile(old.path / name, folder / name)
    model = onnx.load(old.path / MODEL, load_external_data=False)
    manifest = with_corrections(model, old.manifest, corrections, features)
    onnx.save(model, folder / MODEL)
    run = {"command": "adapt", "config": asdict(config), "versions": versions_of(("numpy", "scipy", "onnx"))}
    write_json(folder / "run.json", run)
    adaptations = [
        *old.manifest.metrics.get("adaptations", ()),
        {
            "artifact_version": old.manifest.artifact_version,
            "corrections": {name: each.to_json() for name, each in corrections.items()},
        },
    ]
    changes = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": {**old.manifest.metrics, "adaptations": adaptations},
    }
    prefix = old.manifest.artifact_version.rpartition("+")[0] or None
    write_manifest(folder, manifest.model_copy(update=changes), version_prefix=prefix)
    runtime = open_runtime(folder, provider="cpu", threads_per_run=config.threads)
    runtime.warm_up()
    return runtime


def _check_graph(
    before: Requests, after: Requests, corrections: Mapping[str, Correction], manifest: Manifest
) -> None:
    """Raises TailcastError if the new graph's predictions differ from the fitted ones."""
    for name, correction in corrections.items():
        rows = before.served_models == name
        if set(_default_bases(manifest, before.served_models[rows])) == {correction.base}:
            fitted, part = before.take(rows).corrected(correction), after.take(rows)
            gap = np.abs([fitted.mu - part.mu, np.log(fitted.sigma / part.sigma)]).max(initial=0.0)
            if gap > _TOLERANCE:
                raise TailcastError(f"{name}: the graph is {gap:g} log tokens off the fitted predictions")


class IntervalEstimate(NamedTuple):
    """An estimate and its 95 % interval; NaN where undefined."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def compare(before: Requests, after: Requests, seed: int) -> dict[str, list[IntervalEstimate]]:
    """Metrics of both artifacts on the same requests, in the order of `SIDES`, with intervals of a bootstrap over prompts."""
    sides = [(requests, requests.scores()) for requests in (before, after)]
    _, prompt = np.unique(before.prompts.astype(str), return_inverse=True)
    order = np.argsort(prompt, kind="stable")
    rows_of_prompt = np.split(order, np.cumsum(np.bincount(prompt))[:-1])
    rng = np.random.default_rng(seed)
    samples = [np.arange(len(before))] + [
        np.concatenate(
            [rows_of_prompt[number] for number in rng.integers(0, len(rows_of_prompt), len(rows_of_prompt))]
        )
        for _ in range(_RESAMPLES)
    ]
    # [1 + resamples, old and new, metrics]
    values = np.array([[_metrics(*side, rows) for side in sides] for rows in samples])
    old, new = values[:, 0], values[:, 1]
    return {
        name: [_interval(part[:, column]) for part in (old, new, new - old)]
        for column, name in enumerate(METRICS)
    }


def _metrics(requests: Requests, scores: OutputScores, rows: NDArray[np.intp]) -> list[float]:
    """Values of METRICS on the selected rows."""
    tau = kendall_tau(requests.mu[rows], requests.lengths[rows])
    coverage = [scores.coverage(level, rows)["estimate"] for level in COVERAGE_LEVELS]
    numbers = [scores.crps_log[rows].mean(), scores.crps_tokens[rows].mean(), tau, *coverage]
    return [np.nan if number is None else float(number) for number in numbers]


def _interval(values: FloatArray) -> IntervalEstimate:
    """Estimate (the first value) with the 95 % interval of its resamples (the remaining values)."""
    resamples = values[1:][~np.isnan(values[1:])]
    low, high = np.quantile(resamples, (0.025, 0.975)) if len(resamples) else (np.nan, np.nan)
    return IntervalEstimate(float(values[0]), float(low), float(high))


def _page(
    config: AdaptConfig,
    comparison: Mapping[str, Sequence[IntervalEstimate]],
    fits: Mapping[str, Any],
    before: Requests,
    after: Requests,
    *,
    num_fitted: int,
) -> Page:
    """Report on an accepted artifact."""
    page = Page(
        "Adapted artifact",
        f"{Path(config.artifact).name} corrected from {num_fitted} requests of {Path(config.log).name}. Old and new "
        f"artifact are compared on {len(before)} requests whose prompts were held back from fitting.",
    )
    page.heading("Old and new artifact on the requests held back")
    page.table(("metric", *SIDES), [(name, *map(str, sides)) for name, sides in comparison.items()])
    page.note(
        "In brackets: 95 % interval of a bootstrap over prompts. CRPS: smaller is better; tau: Kendall's tau-b of "
        "predicted median and length; P50, P90, P99: fraction of outputs at most as long as that predicted quantile."
    )
    page.heading("By served model")
    table = []
    for name in sorted(set(before.served_models)):
        sides = (part.take(before.served_models == name) for part in (before, after))
        metrics = [_metrics(side, side.scores(), np.arange(len(side))) for side in sides]
        cells = [f"{old:.3f} -> {new:.3f}" for old, new in zip(*metrics, strict=True)]
        table.append((name, int((before.served_models == name).sum()), *cells))
    page.table(("served model", "requests", *METRICS), table)
    page.heading("Corrections")
    rows = [
        (name, fit["num_requests"], fit["kind"], fit["base"] or "unknown", *fit["terms"], fit["scale"])
        for name, fit in fits.items()
    ]
    terms = ("shift", "by mu", "by sigma", "by ln tokens")
    header = ("served model", "requests", "kind", "based on", *terms, "scale of sigma")
    page.table(header, rows, text_columns=(0, 2, 3))
    page.note(
        "mu' = mu + shift + by mu x mu + by sigma x sigma + by ln tokens x ln(tokens of the prompt) (+ weights x features of the encoder), sigma' = scale x sigma ^ power."
    )
    return page
