"""The run of `export-variants`: build, evaluate, measure, report."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from export.exporter import sign_artifact, signing_key, toolchain_versions
from export.variants.build import PRECISION, VariantBuilder, add_result, model_bytes, write_variant
from export.variants.config import VariantsConfig
from export.variants.evaluate import Evaluate, OutputComparison, SplitPrompts, select_metrics, split_prompts
from export.variants.measure import machine, measure_latency
from export.variants.report import (
    PLAIN,
    SCHEMA,
    VariantResult,
    best_of,
    rejection_reasons,
    report_markdown,
)
from predictors.artifact import Artifact, Manifest, open_artifact
from predictors.runtime import ArtifactRuntime, ProviderChoice, open_runtime
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import (
    atomic_directory,
    atomic_file,
    existing_file,
    folder_target,
    sha256_file,
    writable_target,
    write_json,
)

logger = logging.getLogger(__name__)

REPORT = "report.json"
#: Of the folder's record, see `scheduler_core.files.atomic_directory`.
KIND = "variants"
#: Prompts on which outputs are compared one by one.
NUM_COMPARED = 64


def export_variants(config: VariantsConfig, evaluate: Evaluate) -> dict[str, Any]:
    """Makes the variants; returns the content of report.json.

    Args:
        config: The options.
        evaluate: Evaluation of predictors, which this package does not import.

    Raises:
        InputError: Artifact, data or options cannot be used together.
        TailcastError: A graph cannot be rewritten.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    page = None if config.markdown is None else writable_target(config.markdown, "markdown")
    existing_file(config.data, "data")
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    key = None if config.sign is None else signing_key(config.sign)
    with (
        atomic_directory(out, KIND, overwrite=config.overwrite) as folder,
        tempfile.TemporaryDirectory() as temporary,
    ):
        prompts = split_prompts(
            config.data,
            Path(temporary) / "evaluation.parquet",
            config.calibration_prompts,
            np.random.default_rng(config.seed),
        )
        content = _Run(config, evaluate, artifact, prompts, folder).content()
        if key is not None:
            for result in sorted(path for path in folder.iterdir() if path.is_dir()):
                sign_artifact(result, key)
        write_json(folder / REPORT, content)
        text = report_markdown(content, _command(config))
        (folder / "report.md").write_text(text, encoding="utf-8")
    if page is not None:
        with atomic_file(page) as target:
            target.write_text(text, encoding="utf-8")
    for provider, name in content["best"].items():
        logger.info("best on %s: %s", provider, name)
    return content


def _command(config: VariantsConfig) -> str:
    options = [("--data", config.data), ("--out", config.out)]
    options += [] if config.max_groups is None else [("--max_groups", str(config.max_groups))]
    if config.repetitions != VariantsConfig.repetitions:
        options.append(("--repetitions", str(config.repetitions)))
    words = [
        Path(config.artifact).name,
        *(word for name, value in options for word in (name, Path(value).name)),
    ]
    return "export-variants " + " ".join(words)


class _Run:
    """One run; the variants are built inside `folder`."""

    def __init__(
        self,
        config: VariantsConfig,
        evaluate: Evaluate,
        artifact: Artifact,
        prompts: SplitPrompts,
        folder: Path,
    ) -> None:
        self._config = config
        self._evaluate = evaluate
        self._artifact = artifact
        self._prompts = prompts
        self._folder = folder
        self._manifests: dict[str, Manifest] = {}
        self._steps: dict[str, Mapping[str, int]] = {}
        self._failures: dict[str, str] = {}

    def content(self) -> dict[str, Any]:
        """Builds, evaluates and measures all variants; the content of report.json."""
        self._build()
        folders = {name: self._folder / name for name in self._manifests}
        evaluation = self._evaluate(self._config, folders, self._prompts.file)
        results = self._results(folders, evaluation)
        latency = self._measure(folders)
        best = {
            provider: best_of(results[: 1 + len(folders)], shapes) for provider, shapes in latency.items()
        }
        for result in results[1 : 1 + len(folders)]:
            if result.accepted:
                add_result(folders[result.name], self._manifests[result.name], result.to_json())
            else:
                shutil.rmtree(folders[result.name])
        manifest = self._artifact.manifest
        return {
            "schema": SCHEMA,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "artifact": {
                "artifact_id": manifest.artifact_id,
                "artifact_version": manifest.artifact_version,
            },
            "data": {
                "name": Path(self._config.data).name,
                "sha256": sha256_file(self._config.data),
                "calibration_prompts": len(self._prompts.calibration),
                "evaluation_prompts": len(self._prompts.rows),
                "num_groups": evaluation["model"]["num_prompts"],
            },
            "machine": machine() | {"threads": self._config.threads},
            "limits": dataclasses.asdict(self._config.limits),
            "variants": {result.name: result.to_json() for result in results},
            "latency_ms": latency,
            "best": best,
            "config": dataclasses.asdict(self._config),
            "versions": toolchain_versions(),
        }

    def _build(self) -> None:
        builder = VariantBuilder.of(self._artifact, self._prompts.calibration, seed=self._config.seed)
        run = {"command": "export-variants", "config": dataclasses.asdict(self._config)}
        for kind in self._config.variants:
            logger.info("building %s", kind)
            try:
                variant = builder.build(kind)
            except InputError:
                raise
            except TailcastError as error:
                logger.warning("%s cannot be made: %s", kind, error)
                self._failures[kind] = str(error)
                continue
            self._steps[kind] = variant.steps
            self._manifests[kind] = write_variant(
                self._artifact,
                variant.model,
                self._folder / kind,
                name=kind,
                precision=PRECISION[kind],
                run=run,
            )

    def _results(self, folders: Mapping[str, Path], evaluation: Mapping[str, Any]) -> list[VariantResult]:
        """The artifact's result, those of the built variants, and those of the others."""
        plain_metrics = select_metrics(evaluation["model"])
        plain = self._open(self._artifact.path)
        comparison = OutputComparison(plain, self._prompts.rows[:NUM_COMPARED])
        results = [
            VariantResult(
                name=PLAIN,
                precision=self._artifact.manifest.precision,
                num_bytes=model_bytes(self._artifact.path),
                metrics=plain_metrics,
                differences=comparison.compare(plain),
            )
        ]
        for name, folder in folders.items():
            logger.info("comparing outputs of %s", name)
            precision = PRECISION[name]
            metrics = select_metrics(evaluation["compared"][name])
            differences = comparison.compare(self._open(folder))
            reasons = rejection_reasons(
                plain_metrics, metrics, differences, self._config.limits, exact=precision == "fp32"
            )
            for reason in reasons:
                logger.warning("%s is rejected: %s", name, reason)
            results.append(
                VariantResult(
                    name=name,
                    precision=precision,
                    num_bytes=model_bytes(folder),
                    steps=self._steps[name],
                    metrics=metrics,
                    differences=differences,
                    reasons=reasons,
                )
            )
        return results + [
            VariantResult(
                name=name, precision=PRECISION[name], num_bytes=0, reasons=(f"cannot be made: {reason}",)
            )
            for name, reason in self._failures.items()
        ]

    def _open(self, folder: Path, provider: ProviderChoice = "cpu") -> ArtifactRuntime:
        return open_runtime(folder, provider=provider, threads_per_run=self._config.threads)

    def _measure(self, folders: Mapping[str, Path]) -> dict[str, dict[str, dict[str, float]]]:
        """Provider -> shape -> name -> milliseconds; CUDA where there is a GPU."""
        config = self._config
        max_length = self._artifact.manifest.max_length
        shapes = [(batch, tokens) for batch, tokens in config.measured_shapes if tokens <= max_length]
        if not shapes:
            raise InputError("shapes", config.shapes, f"at least one of at most {max_length} tokens")
        clocks: dict[ProviderChoice, Callable[[], float]] = {
            "cpu": time.process_time,
            "cuda": time.perf_counter,
        }
        latency = {}
        for provider, clock in clocks.items():
            try:
                runtimes = {
                    name: self._open(folder, provider)
                    for name, folder in {PLAIN: self._artifact.path, **folders}.items()
                }
            except InputError:
                if provider == "cpu":
                    raise
                logger.info("no usable GPU: variants are measured on the CPU only")
                continue
            latency[str(provider)] = measure_latency(
                runtimes,
                shapes,
                repetitions=config.repetitions,
                rng=np.random.default_rng(config.seed),
                clock=clock,
            )
        return latency
