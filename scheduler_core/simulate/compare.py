"""`simulate compare`: two runs of the same requests."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.files import check_outputs, existing_file, writable_target, write_json
from scheduler_core.simulator.column_file import Columns
from scheduler_core.simulator.comparison import (
    Comparison,
    changed_settings,
    checked_seeds,
    content,
    differences,
    ratio_text,
)
from scheduler_core.simulator.pairing import paired, paired_groups, paired_latencies
from scheduler_core.simulator.request_table import read_table
from scheduler_core.simulator.run import SCHEMA

logger = logging.getLogger(__name__)

_GROUPED = ("ttft_s", "ttlt_s", "per_token_latency_s")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two results of `simulate run` on the same requests: request by request, with bootstrap confidence
    intervals, every metric over seeds, and how the configurations differ.

    Both runs need a table of requests (--requests, Parquet) for the comparison by request.
    """

    INPUTS = ("a", "b")
    OUTPUTS = ("json", "report")

    a: str
    """JSON result of the first run."""
    b: str
    """JSON result of the second run; differences are b - a."""
    json: str | None = None
    """Where to write the comparison as JSON."""
    report: str | None = None
    """Where to write it as a page (.html)."""
    confidence: float = 0.95
    """Of all intervals."""
    num_resamples: int = 1000
    """Samples of the bootstrap; a million requests take about a minute for a thousand."""
    seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise InputError("confidence", self.confidence, "numbers between 0 and 1")
        if not 1 <= self.num_resamples <= 1_000_000:
            raise InputError("num_resamples", self.num_resamples, "integers from 1 to 1000000")
        if self.seed < 0:
            raise InputError("seed", self.seed, "integers >= 0")


def _read(path: str, field: str) -> dict[str, Any]:
    file = existing_file(path, field)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(field, path, f"a JSON result of simulate run ({error})") from error
    if not isinstance(found, dict) or not str(found.get("schema", "")).startswith("tailcast.simulation/"):
        raise InputError(field, path, "a JSON result of simulate run")
    if found["schema"] != SCHEMA:
        raise InputError(
            f"schema of {field}", found["schema"], f"{SCHEMA}, which this version reads and writes"
        )
    if not _is_whole(found):
        raise InputError(field, path, "a JSON result as simulate run wrote it, with runs by seed")
    return found


def _is_whole(result: Mapping[str, Any]) -> bool:
    """What is compared is there: seed, requests and metrics of each run, the configuration, the path of the table."""
    runs = result.get("runs")
    return (
        isinstance(runs, list)
        and len(runs) > 0
        and all(isinstance(one, dict) and isinstance(one.get("metrics"), dict) for one in runs)
        and all(isinstance(one.get("seed"), int) and isinstance(one.get("trace"), str) for one in runs)
        and all(isinstance(result.get(name), dict) for name in ("config", "trace"))
        and {"num_requests", "source"} <= set(result["trace"])
        and isinstance(result.get("requests"), str | None)
    )


def compare(config: CompareConfig) -> Comparison:
    """Reads and compares two results.

    Raises:
        InputError: One of them cannot be read, or they are not of the same requests.
    """
    a, b = _read(config.a, "a"), _read(config.b, "b")
    tables = {
        f"requests of {name}": [_table_path(path, one)]
        for name, path, one in (("a", config.a, a), ("b", config.b, b))
        if one["requests"] is not None
    }
    check_outputs(tables, {"json": config.json, "report": config.report})
    seeds = checked_seeds(a, b)
    metrics = differences(
        [one["metrics"] for one in a["runs"]], [one["metrics"] for one in b["runs"]], config.confidence
    )
    changed = changed_settings(a, b)
    if a["requests"] is None or b["requests"] is None:
        without = [path for path, one in ((config.a, a), (config.b, b)) if one["requests"] is None]
        logger.warning(
            "not compared by request: %s without a table (simulate run --requests FILE.parquet)",
            " and ".join(without),
        )
        return Comparison(metrics, changed, len(seeds), None, {}, {})
    pairs = paired(_table(config.a, a, "a"), _table(config.b, b, "b"))
    rng = np.random.default_rng(config.seed)
    with_quantiles = paired_latencies(pairs, rng, config.num_resamples, config.confidence)
    groups = paired_groups(pairs, _GROUPED, rng, config.num_resamples, config.confidence)
    return Comparison(metrics, changed, len(seeds), pairs, with_quantiles, groups)


def _table(path: str, result: Mapping[str, Any], field: str) -> Columns:
    return read_table(_table_path(path, result), f"requests of {field}")


def _table_path(path: str, result: Mapping[str, Any]) -> Path:
    return Path(path).parent / str(result["requests"])


def run(config: CompareConfig) -> None:
    """Carries out `simulate compare`; without a file to write to, the tables go to stdout."""
    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    found = compare(config)
    if config.json is not None:
        write_json(config.json, content(found) | {"config": asdict(config)})
    if config.report is not None:
        from scheduler_core.simulator.report.compare_page import write_compare_page

        write_compare_page(
            found, (Path(config.a).stem, Path(config.b).stem), config.confidence, config.report
        )
    if config.json is None and config.report is None:
        sys.stdout.write(_text(config, found))


def _text(config: CompareConfig, found: Comparison) -> str:
    a, b = Path(config.a).stem, Path(config.b).stem
    lines = []
    if found.pairs is not None:
        percent = f"{100 * config.confidence:g} %"
        lines.append(
            f"{len(found.pairs)} requests in pairs, b - a in seconds with {percent} bootstrap intervals"
        )
        lines.append(f"{'mean of':<22}{a:>14}{b:>14}{'b - a':>12}{'low':>12}{'high':>12}{'b lower':>9}")
        for name, one in found.latencies.items():
            mean = one.mean
            ends = "".join(
                f"{'-' if end is None else format(end, '.4g'):>12}" for end in (mean.low, mean.high)
            )
            lines.append(
                f"{name:<22}{mean.a:>14.5g}{mean.b:>14.5g}{mean.difference:>12.4g}{ends}{one.lower_share:>9.1%}"
            )
        lines.append("")
    lines.append(f"{'metric':<46}{a:>14}{b:>14}{'b / a':>9}")
    lines += [f"{one.name:<46}{one.a:>14.5g}{one.b:>14.5g}{ratio_text(one):>9}" for one in found.metrics]
    if found.num_seeds > 1:
        lines.append("* b - a is not 0 over seeds, ? it may be")
    return "\n".join(lines) + "\n"
