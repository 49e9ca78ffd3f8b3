"""The command `export-variants`: build, judge, time, report."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from export.exporter import PASSWORD, sign_artifact, toolchain_versions
from export.variants.answers import AnswerCheck
from export.variants.build import PRECISION, VariantBuilder
from export.variants.config import VariantsConfig
from export.variants.folder import note_result, size_of, write_variant
from export.variants.judging import judge
from export.variants.machine import instructions, processor
from export.variants.prompts import PartedPrompts, part_prompts
from export.variants.report import PLAIN, SCHEMA, VariantResult, best_of, markdown_of, reasons_against
from export.variants.timing import time_runtimes
from predictors.artifact import Artifact, Manifest, open_artifact
from predictors.minisign import read_secret_key
from predictors.runtime import open_runtime
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
#: Prompts on which answers are compared one by one.
COMPARED = 64


def export_variants(config: VariantsConfig) -> dict[str, Any]:
    """Runs the command; returns the content of report.json.

    Raises:
        InputError: Artifact, data or options cannot be used together.
        TailcastError: A graph cannot be rewritten, or `evaluate` failed.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    page = None if config.markdown is None else writable_target(config.markdown, "markdown")
    existing_file(config.data, "data")
    artifact = open_artifact(config.artifact, public_key=config.public_key)
    key = None if config.sign is None else read_secret_key(config.sign, os.environ.get(PASSWORD))
    with (
        atomic_directory(out, KIND, overwrite=config.overwrite) as folder,
        tempfile.TemporaryDirectory() as temporary,
    ):
        parts = part_prompts(
            config.data,
            Path(temporary) / "judged.parquet",
            config.calibration_prompts,
            np.random.default_rng(config.seed),
        )
        run = _Run(config, artifact, parts, folder, Path(temporary))
        content = run.content()
        if key is not None:
            for result in sorted(path for path in folder.iterdir() if path.is_dir()):
                sign_artifact(result, key)
        write_json(folder / REPORT, content)
        text = markdown_of(content, _command(config))
        (folder / "report.md").write_text(text, encoding="utf-8")
    if page is not None:
        with atomic_file(page) as target:
            target.write_text(text, encoding="utf-8")
    for provider, name in content["best"].items():
        logger.info("best on %s: %s", provider, name)
    return content


def _command(config: VariantsConfig) -> str:
    given = [("--data", config.data), ("--out", config.out)]
    given += [] if config.max_groups is None else [("--max-groups", str(config.max_groups))]
    if config.repetitions != VariantsConfig.repetitions:
        given.append(("--repetitions", str(config.repetitions)))
    words = [
        Path(config.artifact).name,
        *(word for name, value in given for word in (name, Path(value).name)),
    ]
    return "export-variants " + " ".join(words)


class _Run:
    """One run: what is built goes into `folder`, what only serves the measurement into `temporary`."""

    def __init__(
        self, config: VariantsConfig, artifact: Artifact, parts: PartedPrompts, folder: Path, temporary: Path
    ) -> None:
        self._config = config
        self._artifact = artifact
        self._parts = parts
        self._folder = folder
        self._temporary = temporary
        self._manifests: dict[str, Manifest] = {}
        self._steps: dict[str, Mapping[str, int]] = {}
        self._refused: dict[str, str] = {}

    def content(self) -> dict[str, Any]:
        """Builds, judges and times all variants; the content of report.json."""
        self._build()
        folders = {name: self._folder / name for name in self._manifests}
        results, num_groups = self._judge(folders)
        latency = self._time(folders)
        best = {provider: best_of(_timed(results, shapes), shapes) for provider, shapes in latency.items()}
        for result in results:
            if result.name in folders and not result.accepted:
                _remove(folders[result.name])
            elif result.name in folders:
                note_result(folders[result.name], self._manifests[result.name], result.to_json())
        manifest, versions = self._artifact.manifest, toolchain_versions()
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
                "calibration_prompts": len(self._parts.calibration),
                "judged_prompts": len(self._parts.judging),
                "num_groups": num_groups,
            },
            "machine": {
                "processor": processor(),
                "instructions": instructions(),
                "threads": self._config.threads,
            },
            "limits": dataclasses.asdict(self._config.limits),
            "variants": {result.name: result.to_json() for result in results},
            "latency_ms": latency,
            "best": best,
            "config": dataclasses.asdict(self._config),
            "versions": versions,
        }

    def _build(self) -> None:
        builder = VariantBuilder.of(self._artifact, self._parts.calibration, seed=self._config.seed)
        run = {"command": "export-variants", "config": dataclasses.asdict(self._config)}
        for kind in self._config.variants:
            logger.info("building %s", kind)
            try:
                built = builder.build(kind)
            except InputError:
                raise
            except TailcastError as error:
                logger.warning("%s cannot be made: %s", kind, error)
                self._refused[kind] = str(error)
                continue
            self._steps[kind] = built.steps
            self._manifests[kind] = write_variant(
                self._artifact,
                built.model,
                self._folder / kind,
                name=kind,
                precision=PRECISION[kind],
                run=run,
            )

    def _judge(self, folders: Mapping[str, Path]) -> tuple[list[VariantResult], int]:
        """The variants judged, and on how many groups."""
        config = self._config
        options = ["--group-by", config.group_by, "--seed", str(config.seed)]
        options += ["--progress", str(config.progress).lower(), "--threads", str(config.threads)]
        if config.max_groups is not None:
            options += ["--max-groups", str(config.max_groups)]
        if config.max_tokens is not None:
            options += ["--max-tokens", str(config.max_tokens)]
        judged = self._temporary / "evaluation.json"
        metrics = judge(self._artifact.path, folders, self._parts.file, judged, options)
        num_groups: int = json.loads(judged.read_text(encoding="utf-8"))["model"]["num_prompts"]
        plain = open_runtime(self._artifact.path, provider="cpu", threads_per_run=config.threads)
        check = AnswerCheck(plain, self._parts.judging[:COMPARED])
        results = [
            VariantResult(
                name=PLAIN,
                precision=self._artifact.manifest.precision,
                num_bytes=size_of(self._artifact.path),
                metrics=metrics[PLAIN],
                differences=check.compare(plain),
            )
        ]
        del plain
        for name, folder in folders.items():
            logger.info("comparing answers of %s", name)
            differences = check.compare(open_runtime(folder, provider="cpu", threads_per_run=config.threads))
            reasons = reasons_against(
                metrics[PLAIN],
                metrics[name],
                differences,
                config.limits,
                exact=PRECISION[name] == "fp32",
            )
            for reason in reasons:
                logger.warning("%s is refused: %s", name, reason)
            results.append(
                VariantResult(
                    name=name,
                    precision=PRECISION[name],
                    num_bytes=size_of(folder),
                    steps=self._steps[name],
                    metrics=metrics[name],
                    differences=differences,
                    reasons=reasons,
                )
            )
        refused = [
            VariantResult(
                name=name, precision=PRECISION[name], num_bytes=0, reasons=(f"cannot be made: {reason}",)
            )
            for name, reason in self._refused.items()
        ]
        return results + refused, num_groups

    def _time(self, folders: Mapping[str, Path]) -> dict[str, dict[str, dict[str, float]]]:
        config = self._config
        longest = self._artifact.manifest.max_length or 1
        shapes = [(batch, tokens) for batch, tokens in config.timed_shapes if tokens <= longest]
        if not shapes:
            raise InputError("shapes", config.shapes, f"at least one of at most {longest} tokens")
        found = {}
        for provider, clock in (("cpu", time.process_time), ("cuda", time.perf_counter)):
            try:
                runtimes = {
                    name: open_runtime(folder, provider=provider, threads_per_run=config.threads)  # type: ignore[arg-type]
                    for name, folder in {PLAIN: self._artifact.path, **folders}.items()
                }
            except InputError:
                if provider == "cpu":
                    raise
                logger.info("no usable GPU: variants are timed on the CPU alone")
                continue
            found[provider] = time_runtimes(
                runtimes,
                shapes,
                repetitions=config.repetitions,
                rng=np.random.default_rng(config.seed),
                clock=clock,
            )
        return found


def _timed(
    results: list[VariantResult], latency_ms: Mapping[str, Mapping[str, float]]
) -> list[VariantResult]:
    names = set(next(iter(latency_ms.values())))
    return [result for result in results if result.name in names]


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
