"""`simulate compare`: two runs of the same requests, every metric seed against seed, and request by request."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, writable_target, write_json
from scheduler_core.options import check_outputs
from scheduler_core.report.page import Page, format_cell
from scheduler_core.simulator import figures
from scheduler_core.simulator.metrics import flat
from scheduler_core.simulator.records import LATENCIES, FloatArray, read_requests
from scheduler_core.simulator.run import SCHEMA
from scheduler_core.simulator.tables import Columns
from scheduler_core.statistics import interval

logger = logging.getLogger(__name__)

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_RATIOS = {"TTFT": "ttft_s", "TTLT": "ttlt_s", "normalized latency": "normalized_latency_s"}


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two results of `simulate run` on the same requests: every metric over seeds, request by request with
    bootstrap confidence intervals, and how the configurations differ.

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
    """Samples of the bootstrap."""
    seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise InputError("confidence", self.confidence, "numbers between 0 and 1")
        if not 1 <= self.num_resamples <= 1_000_000:
            raise InputError("num_resamples", self.num_resamples, "integers from 1 to 1000000")
        if self.seed < 0:
            raise InputError("seed", self.seed, "integers >= 0")


@dataclass(frozen=True, slots=True)
class Difference:
    """A number of two runs, b - a, and b / a (None if a is 0), with an interval of the difference (None: none).

    Of a metric the numbers are means over seeds, and the interval is Student's t of each seed against itself.
    """

    a: float
    b: float
    difference: float
    ratio: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, a: float, b: float, ends: tuple[float, float] | None = None) -> Difference:
        low, high = ends or (None, None)
        return cls(a, b, b - a, b / a if a else None, low, high)

    @property
    def clear(self) -> bool | None:
        """Whether the interval leaves out 0; None without one."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0

    def ratio_text(self) -> str:
        """b / a with a mark: * if the interval leaves out 0, ? if not, none without one."""
        if self.ratio is None:
            return "-"
        return f"{self.ratio:.3f}" + ("" if self.clear is None else "*" if self.clear else "?")


@dataclass(frozen=True, slots=True)
class LatencyDifference:
    """One latency of the requests of both runs, in seconds.

    Attributes:
        num: Requests that have it in both runs.
        statistics: mean (with a bootstrap interval), p50, p90, p99: differences of the statistics, not of single requests.
        lower_fraction: Fraction of the requests for which b is lower, by more than rounding.
    """

    num: int
    statistics: dict[str, Difference]
    lower_fraction: float


@dataclass(frozen=True, eq=False)
class RequestPairs:
    """The same requests in two runs, row by row [n], those of each seed in the order of their arrival.

    Attributes:
        a: Columns of the first run, see `records.COMPARED`.
        b: Columns of the second.
        num_only_a: Requests that only the first finished.
        num_only_b: Requests that only the second finished.
    """

    a: Columns
    b: Columns
    num_only_a: int
    num_only_b: int

    @classmethod
    def of(cls, a: Columns, b: Columns) -> RequestPairs:
        """Joins two tables by seed and request id.

        Raises:
            InputError: They have no request in common, or a request has another length in the other run.
        """
        keys, keys_b = (
            list(zip(one["seed"].tolist(), one["request_id"].tolist(), strict=True)) for one in (a, b)
        )
        rows_b = {key: row for row, key in enumerate(keys_b)}
        order = np.lexsort((a["arrival_s"], a["seed"])).tolist()
        rows = [(row, rows_b[keys[row]]) for row in order if keys[row] in rows_b]
        if not rows:
            raise InputError("b", "no request of a", "a run of the same requests")
        first, second = np.array(rows, np.int64).T
        own = {name: values[first] for name, values in a.items()}
        other = {name: values[second] for name, values in b.items()}
        for name in ("prompt_tokens", "output_tokens"):
            different = np.flatnonzero(own[name] != other[name])
            if len(different):
                row = different[0]
                field = f"b, {name} of request {own['request_id'][row]}"
                raise InputError(field, int(other[name][row]), f"{own[name][row]} as in a")
        return cls(own, other, len(keys) - len(rows), len(keys_b) - len(rows))

    def __len__(self) -> int:
        return len(self.a["seed"])

    def values(self, name: str) -> tuple[FloatArray, FloatArray, NDArray[np.int64]]:
        """A latency in both runs and the seed, of the requests that have it in both."""
        a, b = self.a[name], self.b[name]
        rows = np.asarray(np.isfinite(a) & np.isfinite(b))
        return a[rows], b[rows], self.a["seed"][rows]

    def ratios(self, name: str) -> FloatArray:
        """b / a of every request that has the latency in both runs, and above 0."""
        a, b, _ = self.values(name)
        above = (a > 0) & (b > 0)
        return np.asarray(b[above] / a[above], np.float64)


def bootstrap_interval(
    differences: FloatArray, seeds: NDArray[np.int64], config: CompareConfig, rng: np.random.Generator
) -> tuple[float, float] | None:
    """Percentile interval of the mean of paired differences [n]; None with fewer than two blocks.

    Latencies of neighbors go up and down together with the queue, so requests are not drawn one by one: that would make
    intervals far too narrow. Blocks of ceil(sqrt(n)) consecutive requests of a seed [n], which do not overlap, are drawn
    with replacement, as many as there are (Carlstein 1986; Lahiri 2003, section 2.6).
    """
    totals, sizes = np.zeros(config.num_resamples), np.zeros(config.num_resamples)
    num_all = 0
    for seed in np.unique(seeds):
        values = differences[seeds == seed]
        num_blocks = math.ceil(len(values) / math.ceil(math.sqrt(len(values))))
        blocks = np.arange(len(values)) * num_blocks // len(values)
        counts = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), config.num_resamples)
        totals += counts @ np.bincount(blocks, values)
        sizes += counts @ np.bincount(blocks)
        num_all += num_blocks
    if num_all < 2:
        return None
    tails = [(1 - config.confidence) / 2, (1 + config.confidence) / 2]
    low, high = np.quantile(totals / sizes, tails)
    return float(low), float(high)


def latency_differences(pairs: RequestPairs, config: CompareConfig) -> dict[str, LatencyDifference]:
    """By name of the latency: its differences."""
    rng = np.random.default_rng(config.seed)
    differences: dict[str, LatencyDifference] = {}
    for name in LATENCIES:
        a, b, seeds = pairs.values(name)
        if len(a):
            ends = bootstrap_interval(b - a, seeds, config, rng)
            statistics = {"mean": Difference.of(float(a.mean()), float(b.mean()), ends)}
            for key, level in _QUANTILES.items():
                statistics[key] = Difference.of(float(np.quantile(a, level)), float(np.quantile(b, level)))
            lower = (b < a) & ~np.isclose(a, b, rtol=1e-9, atol=1e-12)
            differences[name] = LatencyDifference(len(a), statistics, float(lower.mean()))
    return differences


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs.

    Attributes:
        metrics: By dotted name: every metric that both have with every seed.
        settings: By dotted name: the two values of settings that differ.
        num_seeds: Seeds of both.
        pairs: Their requests; None without tables.
        latencies: By name; empty without tables.
    """

    metrics: dict[str, Difference]
    settings: dict[str, tuple[Any, Any]]
    num_seeds: int
    pairs: RequestPairs | None
    latencies: dict[str, LatencyDifference]

    def to_json(self) -> dict[str, Any]:
        """The comparison, ready to be written."""
        pairs, requests = self.pairs, None
        if pairs is not None:
            latencies = {name: asdict(one) for name, one in self.latencies.items()}
            requests = {
                "num_pairs": len(pairs),
                "num_only_a": pairs.num_only_a,
                "num_only_b": pairs.num_only_b,
                "latencies": latencies,
            }
        return {
            "schema": "tailcast.comparison/3",
            "num_seeds": self.num_seeds,
            "metrics": {name: asdict(one) | {"clear": one.clear} for name, one in self.metrics.items()},
            "settings": self.settings,
            "requests": requests,
        }


def compare(config: CompareConfig) -> Comparison:
    """Reads and compares two results.

    Raises:
        InputError: One of them cannot be read, or they are not of the same requests.
    """
    a, b = _read_result(config.a, "a"), _read_result(config.b, "b")
    paths = {name: _table_path(path, one) for name, path, one in (("a", config.a, a), ("b", config.b, b))}
    inputs = {f"requests of {name}": [path] for name, path in paths.items() if path is not None}
    check_outputs(inputs, {"json": config.json, "report": config.report})
    num_seeds = _check_seeds(a, b)
    metrics = _metric_differences(a["runs"], b["runs"], config.confidence)
    first, second = dict(_settings(a["config"])), dict(_settings(b["config"]))
    settings = {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    }
    path_a, path_b = paths["a"], paths["b"]
    if path_a is None or path_b is None:
        without = [path for path, name in ((config.a, "a"), (config.b, "b")) if paths[name] is None]
        message = "not compared by request: %s without a table (simulate run --requests FILE.parquet)"
        logger.warning(message, " and ".join(without))
        return Comparison(metrics, settings, num_seeds, None, {})
    requests_a, requests_b = read_requests(path_a, "requests of a"), read_requests(path_b, "requests of b")
    pairs = RequestPairs.of(requests_a, requests_b)
    return Comparison(metrics, settings, num_seeds, pairs, latency_differences(pairs, config))


def _read_result(path: str, field: str) -> dict[str, Any]:
    file = existing_file(path, field)
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(field, path, f"a JSON result of simulate run ({error})") from error
    if not isinstance(result, dict) or not str(result.get("schema", "")).startswith("tailcast.simulation/"):
        raise InputError(field, path, "a JSON result of simulate run")
    if result["schema"] != SCHEMA:
        allowed = f"{SCHEMA}, which this version reads and writes"
        raise InputError(f"schema of {field}", result["schema"], allowed)
    if not _is_complete(result):
        raise InputError(field, path, "a JSON result as simulate run wrote it, with runs by seed")
    return result


def _is_complete(result: Mapping[str, Any]) -> bool:
    """It has everything that is compared: seed, requests and metrics of each run, configuration, path of the table."""
    runs = result.get("runs")
    if not isinstance(runs, list) or not runs or not isinstance(result.get("requests"), str | None):
        return False
    types = {"metrics": dict, "seed": int, "trace": str}
    has_runs = all(
        isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in types.items())
        for one in runs
    )
    config, trace = result.get("config"), result.get("trace")
    return (
        has_runs
        and isinstance(config, dict)
        and isinstance(trace, dict)
        and {"num_requests", "source"} <= set(trace)
    )


def _table_path(path: str, result: Mapping[str, Any]) -> Path | None:
    return None if result["requests"] is None else Path(path).parent / str(result["requests"])


def _check_seeds(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Number of seeds of two results of the same requests.

    Raises:
        InputError: They were run with other seeds, or with other requests.
    """
    first, second = ({one["seed"]: one["trace"] for one in result["runs"]} for result in (a, b))
    if list(first) != list(second):
        seeds_a, seeds_b = (", ".join(map(str, one)) for one in (first, second))
        raise InputError("seeds of b", seeds_b, f"{seeds_a}, the seeds of a")
    for seed, trace in first.items():
        if second[seed] != trace:
            raise InputError(
                f"requests of b with seed {seed}",
                f"{b['trace']['num_requests']} requests of {b['trace']['source']} ({second[seed][:12]})",
                f"those of a: {a['trace']['num_requests']} requests of {a['trace']['source']} ({trace[:12]}), with the same "
                "arrivals, lengths and tiers; give both runs the same trace or workload and the same rate",
            )  # fmt: skip
    return len(first)


def _metric_differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], confidence: float
) -> dict[str, Difference]:
    """Every metric that all runs have, in the order of the first."""
    first, second = ([dict(flat(run["metrics"])) for run in runs] for runs in (a, b))
    differences = {}
    for name in first[0]:
        if all(name in run for run in (*first, *second)):
            own, other = ([run[name] for run in runs] for runs in (first, second))
            ends = None
            if len(own) > 1:
                one = interval([y - x for x, y in zip(own, other, strict=True)], confidence)
                ends = (one.low, one.high)
            differences[name] = Difference.of(float(np.mean(own)), float(np.mean(other)), ends)
    return differences


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True, slots=True)
class _Table:
    """A part of the comparison, as shown on the page and on stdout."""

    heading: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


def run(config: CompareConfig) -> None:
    """Carries out `simulate compare`; without a file to write to, the tables go to stdout."""
    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    comparison = compare(config)
    tables = _tables(config, comparison)
    if config.json is not None:
        write_json(config.json, comparison.to_json() | {"config": asdict(config)})
    if config.report is not None:
        _write_page(config, comparison, tables, config.report)
    if config.json is None and config.report is None:
        for table in tables:
            rows = [[format_cell(cell) for cell in row] for row in (table.header, *table.rows)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
            sys.stdout.write("\n".join([table.heading, table.note, *lines, "", ""]))


def _tables(config: CompareConfig, comparison: Comparison) -> list[_Table]:
    percent, pairs = f"{100 * config.confidence:g} %", comparison.pairs
    settings = [[name, str(a), str(b)] for name, (a, b) in comparison.settings.items()]
    note = f"a is {Path(config.a).stem}, b is {Path(config.b).stem}; both ran the same requests with {comparison.num_seeds} seed(s)."
    tables = [_Table("Configured differently", note, ["setting", "a", "b"], settings)]
    columns = ["a", "b", "b - a", "low", "high"]
    if pairs is not None:
        note = (
            f"{len(pairs)} requests, b - a in seconds. Low and high: {percent} interval of b - a, by a bootstrap of blocks of "
            "consecutive requests of each seed. 'b lower': fraction of the requests for which b is lower."
        )
        if pairs.num_only_a or pairs.num_only_b:
            note += f" Only a finished {pairs.num_only_a} others, only b {pairs.num_only_b}."
        rows = [
            [f"{name}, {key}", *_cells(difference), f"{one.lower_fraction:.1%}" if key == "mean" else ""]
            for name, one in comparison.latencies.items()
            for key, difference in one.statistics.items()
        ]
        tables.append(_Table("Request by request, seconds", note, ["", *columns, "b lower"], rows))
    note = ""
    if comparison.num_seeds > 1:
        note = (
            f"Means over seeds. Low and high: {percent} interval of the mean of b - a, each seed against itself "
            "(Student's t). b / a is marked * where that interval leaves out 0, ? where it does not."
        )
    rows = [[name, *_cells(one), one.ratio_text()] for name, one in comparison.metrics.items()]
    return [*tables, _Table("All metrics", note, ["metric", *columns, "b / a"], rows)]


def _cells(one: Difference) -> list[Any]:
    return [one.a, one.b, one.difference, one.low, one.high]


def _write_page(config: CompareConfig, comparison: Comparison, tables: Sequence[_Table], path: str) -> None:
    page = Page(f"{Path(config.b).stem} compared with {Path(config.a).stem}")
    for table in tables:
        page.heading(table.heading)
        page.note(table.note)
        page.table(table.header, table.rows)
    pairs = comparison.pairs
    curves = {}
    if pairs is not None:
        ratios = {title: pairs.ratios(name) for title, name in _RATIOS.items()}
        curves = {
            title: {"all": figures.empirical(values)} for title, values in ratios.items() if len(values)
        }
    if curves:
        page.heading("Ratio of latencies")
        caption = "Distribution over requests of b / a; left of 1: b is faster for the request."
        page.figure(figures.ratio_functions(curves), caption)
    page.write(path)
