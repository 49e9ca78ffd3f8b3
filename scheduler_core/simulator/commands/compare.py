"""`simulate compare`: two runs of the same requests, every metric seed against seed, and request by request."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, writable_target, write_json
from scheduler_core.options import check_outputs
from scheduler_core.ranges import check_ranges
from scheduler_core.report.page import Page, format_cell
from scheduler_core.simulator.metrics import flat, leaves
from scheduler_core.simulator.records import LATENCIES
from scheduler_core.simulator.records import SCHEMA as REQUESTS_SCHEMA
from scheduler_core.simulator.run import SCHEMA
from scheduler_core.simulator.tables import Columns, read_columns
from scheduler_core.statistics import FloatArray, interval

logger = logging.getLogger(__name__)

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
#: Columns of the tables of requests that are read.
_COLUMNS = ("seed", "request_id", "arrival_s", "prompt_tokens", "output_tokens", *LATENCIES)


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
    num_resamples: int = 1000
    """Samples of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, num_resamples=(1, 1_000_000))


def difference(a: float, b: float, ends: tuple[float, float] | None = None) -> dict[str, Any]:
    """A number of two runs: a, b, difference = b - a, ratio = b / a (None if a is 0), and low, high: an interval of the
    difference, with clear: whether it leaves out 0; None without one."""
    low, high = ends or (None, None)
    clear = None if low is None or high is None else low > 0 or high < 0
    ratio = b / a if a else None
    return {"a": a, "b": b, "difference": b - a, "ratio": ratio, "low": low, "high": high, "clear": clear}


def paired(a: Columns, b: Columns) -> tuple[Columns, Columns]:
    """The requests [n] that are in both tables, row by row, those of each seed in the order of their arrival.

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
    own, other = (
        {name: values[index] for name, values in columns.items()}
        for columns, index in zip((a, b), np.array(rows, np.int64).T, strict=True)
    )
    for name in ("prompt_tokens", "output_tokens"):
        for row in np.flatnonzero(own[name] != other[name])[:1]:
            field = f"b, {name} of request {own['request_id'][row]}"
            raise InputError(field, int(other[name][row]), f"{own[name][row]} as in a")
    return own, other


def bootstrap_interval(
    differences: FloatArray, seeds: NDArray[np.int64], num_resamples: int, rng: np.random.Generator
) -> tuple[float, float] | None:
    """95 % percentile interval of the mean of paired differences [n]; None with fewer than two blocks.

    Latencies of neighbors go up and down together with the queue, so requests are not drawn one by one: that would make
    intervals far too narrow. Blocks of ceil(sqrt(n)) consecutive requests of a seed [n], which do not overlap, are drawn
    with replacement, as many as there are (Carlstein 1986; Lahiri 2003, section 2.6).
    """
    totals, sizes = np.zeros(num_resamples), np.zeros(num_resamples)
    num_all = 0
    for seed in np.unique(seeds):
        values = differences[seeds == seed]
        num_blocks = math.ceil(len(values) / math.ceil(math.sqrt(len(values))))
        blocks = np.arange(len(values)) * num_blocks // len(values)
        counts = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), num_resamples)
        totals += counts @ np.bincount(blocks, values)
        sizes += counts @ np.bincount(blocks)
        num_all += num_blocks
    if num_all < 2:
        return None
    low, high = np.quantile(totals / sizes, [0.025, 0.975])
    return float(low), float(high)


def latency_differences(a: Columns, b: Columns, num_resamples: int) -> dict[str, Any]:
    """Requests `paired` in two runs, by name of the latency.

    - `num`: requests that have it in both runs; `lower_fraction`: of these, those for which b is lower, by more than
      rounding.
    - `statistics`: mean (with a bootstrap interval), p50, p90, p99: differences of the statistics, not of single requests.
    """
    rng = np.random.default_rng(0)
    latencies = {}
    for name in LATENCIES:
        rows = np.isfinite(a[name]) & np.isfinite(b[name])
        if not rows.any():
            continue
        own, other = a[name][rows], b[name][rows]
        ends = bootstrap_interval(other - own, a["seed"][rows], num_resamples, rng)
        statistics = {"mean": difference(float(own.mean()), float(other.mean()), ends)}
        for key, level in _QUANTILES.items():
            statistics[key] = difference(float(np.quantile(own, level)), float(np.quantile(other, level)))
        lower = (other < own) & ~np.isclose(own, other, rtol=1e-9, atol=1e-12)
        latencies[name] = {
            "num": len(own), "statistics": statistics, "lower_fraction": float(lower.mean())
        }  # fmt: skip
    return latencies


def compare(config: CompareConfig) -> dict[str, Any]:
    """Reads and compares two results.

    - `metrics`: by dotted name: every metric that both have with every seed; means over seeds, the interval is Student's t
      of each seed against itself.
    - `settings`: by dotted name: the two values of settings that differ.
    - `requests`: see `latency_differences`; None without tables.

    Raises:
        InputError: One of them cannot be read, or they are not of the same requests.
    """
    paths = {"a": Path(config.a), "b": Path(config.b)}
    results = {name: _read_result(path, name) for name, path in paths.items()}
    tables = {
        name: path.parent / results[name]["requests"]
        for name, path in paths.items()
        if results[name]["requests"]
    }
    inputs = {f"requests of {name}": [path] for name, path in tables.items()}
    check_outputs(inputs, {"json": config.json, "report": config.report})
    a, b = results.values()
    _check_seeds(a, b)
    first, second = dict(leaves(a["config"])), dict(leaves(b["config"]))
    comparison = {
        "schema": "tailcast.comparison/4",
        "num_seeds": len(a["runs"]),
        "metrics": _metric_differences(a["runs"], b["runs"]),
        "settings": {
            name: (first.get(name), second.get(name))
            for name in first | second
            if first.get(name) != second.get(name)
        },
        "requests": None,
    }
    if len(tables) < 2:
        without = " and ".join(str(path) for name, path in paths.items() if name not in tables)
        logger.warning(
            "not compared by request: %s without a table (simulate run --requests FILE.parquet)", without
        )
        return comparison
    columns = [
        read_columns(path, _COLUMNS, REQUESTS_SCHEMA, f"requests of {name}") for name, path in tables.items()
    ]
    own, other = paired(*columns)
    num_pairs = len(own["seed"])
    return comparison | {
        "requests": {
            "num_pairs": num_pairs,
            "num_only_a": len(columns[0]["seed"]) - num_pairs,
            "num_only_b": len(columns[1]["seed"]) - num_pairs,
            "latencies": latency_differences(own, other, config.num_resamples),
        }
    }


def _read_result(path: Path, field: str) -> dict[str, Any]:
    """The result of a run, which has everything that is compared."""
    try:
        result = json.loads(existing_file(path, field).read_text(encoding="utf-8"))
        schema = str(result["schema"])
        if schema.startswith("tailcast.simulation/") and schema != SCHEMA:
            raise InputError(f"schema of {field}", schema, f"{SCHEMA}, which this version reads and writes")
        runs = [(run["seed"], run["trace"], run["metrics"].keys()) for run in result["runs"]]
        parts = (result["config"].keys(), result["trace"]["num_requests"], result["trace"]["source"])
        if schema != SCHEMA or not all((runs, parts)) or not isinstance(result["requests"], str | None):
            raise ValueError("another file")
    except InputError:
        raise
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        problem = f"a JSON result as simulate run wrote it ({type(error).__name__}: {error})"
        raise InputError(field, str(path), problem) from error
    return dict(result)


def _check_seeds(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raises `InputError` if two results were run with other seeds, or with other requests."""
    first, second = ({one["seed"]: one["trace"] for one in result["runs"]} for result in (a, b))
    if list(first) != list(second):
        seeds_a, seeds_b = (", ".join(map(str, one)) for one in (first, second))
        raise InputError("seeds of b", seeds_b, f"{seeds_a}, the seeds of a")
    for seed, trace in first.items():
        if second[seed] != trace:
            raise InputError(
                f"requests of b with seed {seed}",
                f"{b['trace']['num_requests']} requests of {b['trace']['source']}",
                f"those of a, {a['trace']['num_requests']} requests of {a['trace']['source']}, at the same rate",
            )


def _metric_differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every metric that all runs have, in the order of the first."""
    first, second = ([dict(flat(run["metrics"])) for run in runs] for runs in (a, b))
    differences = {}
    for name in first[0]:
        if all(name in run for run in (*first, *second)):
            own, other = ([run[name] for run in runs] for runs in (first, second))
            ends = None
            if len(own) > 1:
                one = interval([y - x for x, y in zip(own, other, strict=True)])
                ends = (one.low, one.high)
            differences[name] = difference(float(np.mean(own)), float(np.mean(other)), ends)
    return differences


#: A part of the comparison, as shown on the page and on stdout: heading, note, header and rows.
_Table = tuple[str, str, Sequence[str], Sequence[Sequence[Any]]]


def run(config: CompareConfig) -> None:
    """Carries out `simulate compare`; without a file to write to, the tables go to stdout."""
    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    comparison = compare(config)
    tables = _tables(config, comparison)
    if config.json is not None:
        write_json(config.json, comparison | {"config": asdict(config)})
    if config.report is not None:
        page = Page(f"{Path(config.b).stem} compared with {Path(config.a).stem}")
        for heading, note, header, rows in tables:
            page.heading(heading)
            page.note(note)
            page.table(header, rows)
        page.write(config.report)
    if config.json is None and config.report is None:
        for heading, note, header, rows in tables:
            cells = [[format_cell(cell) for cell in row] for row in (header, *rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
            sys.stdout.write("\n".join([heading, note, *lines, "", ""]))


def _tables(config: CompareConfig, comparison: Mapping[str, Any]) -> list[_Table]:
    requests = comparison["requests"]
    settings = [[name, str(a), str(b)] for name, (a, b) in comparison["settings"].items()]
    num_seeds = comparison["num_seeds"]
    note = f"a is {Path(config.a).stem}, b is {Path(config.b).stem}; both ran the same requests with {num_seeds} seed(s)."
    tables: list[_Table] = [("Configured differently", note, ["setting", "a", "b"], settings)]
    columns = ["a", "b", "b - a", "low", "high"]
    if requests is not None:
        note = (
            f"{requests['num_pairs']} requests, b - a in seconds. Low and high: 95 % interval of b - a, by a bootstrap "
            "of blocks of consecutive requests of each seed. 'b lower': fraction of the requests for which b is lower. Only "
            f"a finished {requests['num_only_a']} others, only b {requests['num_only_b']}."
        )
        rows = [
            [f"{name}, {key}", *_cells(one), f"{latency['lower_fraction']:.1%}" if key == "mean" else ""]
            for name, latency in requests["latencies"].items()
            for key, one in latency["statistics"].items()
        ]
        tables.append(("Request by request, seconds", note, ["", *columns, "b lower"], rows))
    note = ""
    if num_seeds > 1:
        note = (
            "Means over seeds. Low and high: 95 % interval of the mean of b - a, each seed against itself "
            "(Student's t). b / a is marked * where that interval leaves out 0, ? where it does not."
        )
    marks = {None: "", True: "*", False: "?"}
    rows = [
        [name, *_cells(one), "-" if one["ratio"] is None else f"{one['ratio']:.3f}{marks[one['clear']]}"]
        for name, one in comparison["metrics"].items()
    ]
    return [*tables, ("All metrics", note, ["metric", *columns, "b / a"], rows)]


def _cells(one: Mapping[str, Any]) -> list[Any]:
    return [one[key] for key in ("a", "b", "difference", "low", "high")]
