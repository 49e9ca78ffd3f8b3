"""`export-variants`: faster variants of an artifact, built, evaluated, measured and reported.

`training` and `export` do not import each other: the command passes the evaluation as a function.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.exporter import TOOLCHAIN, signing_key
from predictors.artifact import open_artifact, write_manifest
from predictors.manifest import MANIFEST, MODEL, Precision
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import (
    atomic_directory,
    existing_file,
    folder_target,
    sha256_file,
    write_json,
)
from scheduler_core.shell.threads import check_threads
from scheduler_core.shell.versions import versions_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from export.variants.evaluate import PromptRow
    from predictors.artifact import Artifact
    from predictors.runtime import ArtifactRuntime, ProviderChoice

logger = logging.getLogger(__name__)

#: Kind of the output folder, see `scheduler_core.shell.files.atomic_directory`.
KIND = "variants"
#: Variants that can be built, with their precision.
PRECISION: dict[str, Precision] = {"fused": "fp32", "int8": "int8", "fp16": "fp16", "fp16-fused": "fp16"}
#: Name of the artifact itself in the results of the variants.
PLAIN = "fp32"
#: Maximum number of prompts that calibrate int8.
CALIBRATION_PROMPTS = 128
#: Number of prompts whose outputs are compared.
NUM_COMPARED = 64
#: Measured shapes, rows x tokens; those above the artifact's max_length are skipped.
SHAPES = ((1, 32), (8, 128))
#: Token ids below this exist in every vocabulary; latency does not depend on the tokens.
LOWEST_IDS = 16


@dataclass(frozen=True, kw_only=True)
class VariantsConfig:
    """Build faster variants of an artifact, reject those that lose quality, and measure their latency."""

    INPUTS = ("artifact", "data", "public_key", "sign")
    OUTPUTS = ("out",)

    artifact: str
    """Artifact folder written by export-onnx; it must have an encoder."""
    data: str
    """Parquet file of output lengths (samples/2, the input of evaluate) with prompts that were not used for
    training. Up to a third of the prompts, at most 128, calibrate int8; the others evaluate all variants."""
    out: str
    """Folder to write: an artifact folder per accepted variant, report.json and report.md."""
    overwrite: bool = False
    """Replace an existing set of variants at `out`; a folder with other content is kept."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key; the artifact must be signed with the matching private key."""
    sign: str | None = None
    """PEM file with an Ed25519 private key that signs the variants. The password of the key, if any, is read
    from the environment variable TAILCAST_SIGNING_PASSWORD."""
    variants: list[str] = field(default_factory=lambda: list(PRECISION))
    """Variants to build: fused (attention as one operator), int8 (CPU), fp16 and fp16-fused (GPU)."""
    max_groups: int | None = None
    """Maximum number of (prompt, served model) groups to evaluate; default: all."""
    repetitions: int = 5
    """Number of calls of each variant at each shape (1 x 32 and 8 x 128 tokens); variants are interleaved."""
    threads: int = 1
    """Number of threads of a model call."""
    seed: int = 0
    """Seed of the choice of calibration prompts and of random tokens."""
    progress: bool = True
    """Show progress bars on a terminal, or log lines elsewhere."""

    def __post_init__(self) -> None:
        for name in ("artifact", "data", "out"):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "a path")
        if not self.variants or len(set(self.variants) & set(PRECISION)) < len(self.variants):
            raise InputError("variants", self.variants, f"one or more of {', '.join(PRECISION)}, each once")
        check_ranges(self, repetitions=(1, INTEGERS), seed=(0, INTEGERS))
        check_threads("threads", self.threads)


#: (folders of variants by name, Parquet file) -> evaluation (docs/evaluation-format.md) of the artifact and
#: its variants on the same rows, variants under `compared`.
Evaluate = Callable[[Mapping[str, Path], Path], Mapping[str, Any]]


def export_variants(config: VariantsConfig, evaluate: Evaluate) -> dict[str, Any]:
    """Builds the variants and returns the content of report.json; InputError for unusable options."""
    from export.variants.evaluate import LIMITS, split_prompts

    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    existing_file(config.data, "data")
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    if artifact.manifest.precision != "fp32" or artifact.manifest.variant:
        raise InputError("artifact", config.artifact, "an artifact of export-onnx that is not a variant")
    key = None if config.sign is None else signing_key(config.sign)
    rng = np.random.default_rng(config.seed)
    with (
        atomic_directory(out, KIND, overwrite=config.overwrite) as folder,
        tempfile.TemporaryDirectory() as temporary,
    ):
        others = Path(temporary) / "evaluation.parquet"
        calibration, rows = split_prompts(config.data, others, CALIBRATION_PROMPTS, rng)
        plain = _open(config, artifact.path)
        tokens = [prompt.ids for prompt in plain.tokenizer(calibration)]
        steps, failed = _build(config, plain, tokens, folder)
        folders = {name: folder / name for name in steps}
        evaluation = evaluate(folders, others)
        results = _compare(config, plain, rows, {PLAIN: artifact.path, **folders}, evaluation)
        latency = _measure(config, {PLAIN: artifact.path, **folders}, artifact.manifest.max_length)
        for name, path in folders.items():
            results[name]["steps"] = steps[name]
            if results[name]["accepted"]:
                manifest = open_artifact(path).manifest
                variant = {**manifest.variant, **results[name]}
                write_manifest(path, manifest.model_copy(update={"variant": variant}))
                if key is not None:
                    from predictors.signing import sign_file

                    sign_file(path / MANIFEST, key)
            else:
                shutil.rmtree(path)
        accepted = [name for name, result in results.items() if result["accepted"]]
        content: dict[str, Any] = {
            "schema": "variants/1",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "artifact": artifact.manifest.model_dump(include={"artifact_id", "artifact_version"}),
            "data": {
                "name": Path(config.data).name,
                "sha256": sha256_file(config.data),
                "calibration_prompts": len(calibration),
                "evaluation_prompts": len(rows),
                "num_groups": evaluation["model"]["num_prompts"],
            },
            "processor": _processor(),
            "limits": LIMITS,
            "variants": results | failed,
            "latency_ms": latency,
            "best": {
                # the smallest geometric mean over all shapes
                provider: min(accepted, key=lambda name: math.prod(times[name] for times in shapes.values()))
                for provider, shapes in latency.items()
            },
            "config": dataclasses.asdict(config),
            "versions": versions_of(TOOLCHAIN),
        }
        write_json(folder / "report.json", content)
        (folder / "report.md").write_text(_page(content), encoding="utf-8")
    for provider, name in content["best"].items():
        logger.info("best on %s: %s", provider, name)
    return content


def _page(content: Mapping[str, Any]) -> str:
    import jinja2

    from export.variants.evaluate import EXACT

    template = resources.files("export.variants").joinpath("report.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template).render(content, exact=EXACT)


def _open(config: VariantsConfig, folder: Path, provider: ProviderChoice = "cpu") -> ArtifactRuntime:
    from predictors.runtime import open_runtime

    return open_runtime(folder, provider=provider, threads_per_run=config.threads)


def _build(
    config: VariantsConfig, plain: ArtifactRuntime, tokens: Sequence[NDArray[np.int64]], folder: Path
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, Any]]]:
    """Writes the variants to `folder`; returns the rewrites of each, and the results of those that failed."""
    from export.variants.build import build_variant

    run = {"command": "export-variants", "config": dataclasses.asdict(config)}
    graph, tokenizer = plain.artifact.path / MODEL, plain.tokenizer
    limits = {"max_length": tokenizer.max_length, "vocabulary": tokenizer.vocabulary_size}
    steps: dict[str, dict[str, int]] = {}
    failed: dict[str, dict[str, Any]] = {}
    for kind in config.variants:
        logger.info("building %s", kind)
        try:
            model, steps[kind] = build_variant(graph, kind, tokens, **limits, seed=config.seed)
        except TailcastError as error:
            logger.warning("%s cannot be built: %s", kind, error)
            empty = ("steps", "metrics", "rms_to_artifact", "probability_shift", "batch_mates")
            result = {"accepted": False, "reasons": [f"cannot be built: {error}"], "bytes": 0}
            failed[kind] = result | {"precision": PRECISION[kind]} | {name: {} for name in empty}
            continue
        _write_variant(plain.artifact, model, folder / kind, run)
    return steps, failed


def _write_variant(artifact: Artifact, model: ir.Model, folder: Path, run: Mapping[str, Any]) -> None:
    """Writes an artifact folder named after the variant; copies all files but the graph and run.json."""
    from export.passes.graph import save

    folder.mkdir(parents=True)
    for file in artifact.manifest.files:
        if not file.startswith(MODEL) and file != "run.json":
            shutil.copyfile(artifact.path / file, folder / file)
    save(model, folder / MODEL)
    write_json(folder / "run.json", dict(run))
    changes = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "precision": PRECISION[folder.name],
        "variant": {"name": folder.name, "made_from": artifact.manifest.artifact_version},
        "parity": {},
    }
    write_manifest(folder, artifact.manifest.model_copy(update=changes))


def _compare(
    config: VariantsConfig,
    plain: ArtifactRuntime,
    rows: Sequence[PromptRow],
    folders: Mapping[str, Path],
    evaluation: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Quality and acceptance of the artifact and its variants, by name."""
    from export.variants.evaluate import compare_outputs, rejection_reasons, select_metrics

    reference = select_metrics(evaluation["model"])
    results = {}
    for name, folder in folders.items():
        logger.info("comparing outputs of %s", name)
        is_plain = name == PLAIN
        result = {
            "precision": PRECISION.get(name, "fp32"),
            "bytes": sum(file.stat().st_size for file in folder.glob(f"{MODEL}*")),
            "steps": {},
            "metrics": reference if is_plain else select_metrics(evaluation["compared"][name]),
            **compare_outputs(plain, _open(config, folder), rows[:NUM_COMPARED]),
        }
        reasons = [] if is_plain else list(rejection_reasons(reference, result))
        for reason in reasons:
            logger.warning("%s is rejected: %s", name, reason)
        results[name] = {"accepted": not reasons, "reasons": reasons, **result}
    return results


def _measure(
    config: VariantsConfig, folders: Mapping[str, Path], max_length: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Minimum time of a call: provider -> "batch x tokens" -> variant -> milliseconds. Full batches, variants
    interleaved; CPU time for "cpu"; "cuda" only if a GPU is usable."""
    shapes = [(batch, tokens) for batch, tokens in SHAPES if tokens <= max_length] or [(1, max_length)]
    clocks: dict[ProviderChoice, Callable[[], float]] = {"cpu": time.process_time, "cuda": time.perf_counter}
    latency: dict[str, dict[str, dict[str, float]]] = {}
    for provider, clock in clocks.items():
        try:
            runtimes = {name: _open(config, folder, provider) for name, folder in folders.items()}
        except InputError:
            if provider == "cpu":
                raise
            logger.info("no usable GPU: variants are measured on the CPU only")
            continue
        served_models = runtimes[PLAIN].artifact.manifest.served_models or (None,)
        rng, latency[provider] = np.random.default_rng(config.seed), {}
        for batch, tokens in shapes:
            logger.info("measuring %d x %d tokens", batch, tokens)
            prompts = [rng.integers(0, LOWEST_IDS, size=tokens) for _ in range(batch)]
            best = dict.fromkeys(runtimes, np.inf)
            for number in range(config.repetitions + 1):  # the first one warms up
                for name, runtime in runtimes.items():
                    start = clock()
                    runtime.run(prompts, served_models[:1] * batch)
                    if number:
                        best[name] = min(best[name], 1000 * (clock() - start))
            latency[provider][f"{batch}x{tokens}"] = best
    return latency


def _processor() -> str:
    """Name of the processor, from /proc/cpuinfo if that exists."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
