"""Task metrics of artifacts, by the command `evaluate`.

The judge is the command itself, found as the shell finds it, so that a variant is judged exactly as any predictor is and no
module here needs one of `training`; what it says is read from its JSON file (docs/evaluation-format.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scheduler_core.errors import TailcastError

SCHEMA = "evaluation/2"
LEVELS = ("p50", "p90", "p99")

Metrics = Mapping[str, float | None]


def judge(
    artifact: Path, variants: Mapping[str, Path], data: Path, out: Path, options: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Metrics of the artifact, under the name fp32, and of each variant on the same rows.

    Args:
        artifact: Folder of the artifact.
        variants: Name -> folder.
        data: Answer lengths.
        out: JSON file of `evaluate` to write.
        options: More options of `evaluate`.

    Returns:
        Name -> r2, tau, p50, p90, p99, crps_tokens; None where it is unknown.

    Raises:
        TailcastError: The command failed; it has said why.
    """
    command = _evaluate()
    words = [str(artifact), "--data", str(data), "--json", str(out), "--ceiling", "false", *options]
    for name, folder in variants.items():
        words += ["--beside", f"{name}={folder}"]
    if command(words) != 0:
        raise TailcastError("evaluate could not judge the variants (its message is above)")
    content = json.loads(out.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise TailcastError(
            f"evaluate wrote {content.get('schema')}, not {SCHEMA}: the versions do not fit together"
        )
    return {"fp32": read_metrics(content["model"])} | {
        name: read_metrics(content["beside"][name]) for name in variants
    }


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers that decide, out of the metrics of one predictor."""
    coverage = metrics["coverage"]
    return {
        "r2": metrics["mu"]["r2"],
        "tau": metrics["kendall_tau"]["median_vs_fitted_mu"],
        **{level: coverage.get(level, {}).get("estimate") for level in LEVELS},
        "crps_tokens": metrics["crps_tokens"],
    }


def _evaluate() -> Any:
    try:
        scripts = metadata.distribution("tailcast").entry_points
    except metadata.PackageNotFoundError as error:
        raise TailcastError("tailcast is not installed, so its command evaluate cannot be found") from error
    for script in scripts:
        if script.group == "console_scripts" and script.name == "evaluate":
            return script.load()
    raise TailcastError("this installation of tailcast has no command evaluate")
