"""`simulate compare`: compares runs on the same requests with the first one, by metric and by request."""

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
from scheduler_core.report.page import Page, text_table
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import existing_file, writable_target, write_json
from scheduler_core.shell.options import check_outputs
from scheduler_core.simulator.commands.last_lines import few_seeds
from scheduler_core.simulator.metrics import flat, leaves
from scheduler_core.simulator.records import LATENCIES
from scheduler_core.simulator.records import SCHEMA as REQUESTS_SCHEMA
from scheduler_core.simulator.run import SCHEMA
from scheduler_core.simulator.tables import Columns, read_columns
from scheduler_core.statistics import FloatArray, interval

logger = logging.getLogger(__name__)

#: Samples of the bootstrap.
_NUM_RESAMPLES = 1000
#: Columns to read from the tables of requests.
_COLUMNS = ("seed", "request_id", "arrival_s", "prompt_tokens", "output_tokens", *LATENCIES)
#: Metrics of the verdict; lower is better.
_VERDICT = ("ttft_s", "ttlt_s")
#: A part of the comparison, as shown on the page and on stdout: heading, note, header and rows.
_Table = tuple[str, str, Sequence[str], Sequence[Sequence[Any]]]


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare results of `simulate run` on the same requests with the first one: a verdict, every metric over
    seeds, latencies by request with bootstrap confidence intervals, and differences of the configurations.

    The comparison by request needs a table of requests of each run (--requests, Parquet).
    """

    INPUTS = ("runs",)
    OUTPUTS = ("json", "report")

    runs: list[str]
    """JSON results of two or more runs, each FILE or NAME=FILE; the first is the baseline."""
    overwrite: bool = False
    """Replace existing output files."""
    json: str | None = None
    """Path of the comparison as JSON."""
    report: str | None = None
    """Path of the comparison as a page (.html)."""

    def __post_init__(self) -> None:
        if len(self.paths) < 2:
            raise InputError("runs", self.runs, "two results or more")

    @property
    def paths(self) -> dict[str, Path]:
        """Name -> file; the default name is that of the file without suffix."""
        paths: dict[str, Path] = {}
        for entry in self.runs:
            name, _, file = entry.rpartition("=") if not Path(entry).exists() else ("", "", entry)
            name = name or Path(file).stem
            if name in paths:
                raise InputError("runs", entry, f"distinct names, as in NAME=FILE; {name} is repeated")
            paths[name] = Path(file)
        return paths


def difference(a: float, b: float, ends: tuple[float, float] | None = None) -> dict[str, Any]:
    """Comparison of a number of two runs: a, b, difference = b - a, ratio = b / a (None if a is 0); low and high,
    the ends of an interval of the difference, and clear, whether it excludes 0; None without an interval."""
    low, high = ends or (None, None)
    clear = None if low is None or high is None else low > 0 or high < 0
    ratio = b / a if a else None
    return {"a": a, "b": b, "difference": b - a, "ratio": ratio, "low": low, "high": high, "clear": clear}


def paired(a: Columns, b: Columns) -> tuple[Columns, Columns]:
    """The requests [n] that are in both tables, row by row, by seed and arrival. `InputError` if there is no
    common request, or the lengths of a request differ."""
    keys, keys_b = (
        list(zip(one["seed"].tolist(), one["request_id"].tolist(), strict=True)) for one in (a, b)
    )
    rows_b = {key: row for row, key in enumerate(keys_b)}
    order = np.lexsort((a["arrival_s"], a["seed"])).tolist()
    rows = np.array([(row, rows_b[keys[row]]) for row in order if keys[row] in rows_b], np.int64)
    if not len(rows):
        raise InputError("b", "no request of a", "a run of the same requests")
    own = {name: values[rows[:, 0]] for name, values in a.items()}
    other = {name: values[rows[:, 1]] for name, values in b.items()}
    for name in ("prompt_tokens", "output_tokens"):
        for row in np.flatnonzero(own[name] != other[name])[:1]:
            field = f"b, {name} of request {own['request_id'][row]}"
            raise InputError(field, int(other[name][row]), f"{own[name][row]} as in a")
    return own, other


def bootstrap_interval(
    differences: FloatArray, seeds: NDArray[np.int64], rng: np.random.Generator
) -> tuple[float, float] | None:
    """95 % percentile interval of the mean of paired differences [n]; None with fewer than two blocks.

    Latencies of consecutive requests are correlated through the queue, so intervals from individually
    resampled requests would be far too narrow. Therefore disjoint blocks of ceil(sqrt(n)) consecutive requests
    of a seed are resampled with replacement, as many as there are (Carlstein 1986; Lahiri 2003, section 2.6).
    """
    totals, sizes = np.zeros(_NUM_RESAMPLES), np.zeros(_NUM_RESAMPLES)
    num_all = 0
    for seed in np.unique(seeds):
        values = differences[seeds == seed]
        num_blocks = math.ceil(len(values) / math.ceil(math.sqrt(len(values))))
        blocks = np.arange(len(values)) * num_blocks // len(values)
        counts = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), _NUM_RESAMPLES)
        totals += counts @ np.bincount(blocks, values)
        sizes += counts @ np.bincount(blocks)
        num_all += num_blocks
    if num_all < 2:
        return None
    low, high = np.quantile(totals / sizes, [0.025, 0.975])
    return float(low), float(high)


def latency_differences(a: Columns, b: Columns) -> dict[str, Any]:
    """Comparison of `paired` requests of two runs, by name of the latency.

    - `num`: requests with this latency in both runs; `lower_fraction`: fraction for which b is lower by more than rounding.
    - `mean`: `difference` of the means, with a bootstrap interval.
    """
    rng = np.random.default_rng(0)
    latencies = {}
    for name in LATENCIES:
        rows = np.isfinite(a[name]) & np.isfinite(b[name])
        if not rows.any():
            continue
        own, other = a[name][rows], b[name][rows]
        ends = bootstrap_interval(other - own, a["seed"][rows], rng)
        mean = difference(float(own.mean()), float(other.mean()), ends)
        lower = (other < own) & ~np.isclose(own, other, rtol=1e-9, atol=1e-12)
        latencies[name] = {"num": len(own), "mean": mean, "lower_fraction": float(lower.mean())}
    return latencies


def compare(config: CompareConfig) -> dict[str, Any]:
    """Reads all results and compares each with the first; `InputError` if their requests differ.

    Returns:
        schema; baseline, the name of the first; num_seeds; and runs, by the names of the others:

        - `verdict`: mean ttft_s and ttlt_s, each with better, worse, no clear difference, or one run: no interval.
        - `metrics`: by dotted name, every metric that both runs have with every seed: means over seeds, with the
          Student's t interval of the differences per seed.
        - `settings`: by dotted name, the two values of settings that differ.
        - `requests`: see `latency_differences`; None without tables.
    """
    paths = config.paths
    results = {name: _read_result(path, name) for name, path in paths.items()}
    tables = {
        name: paths[name].parent / result["requests"]
        for name, result in results.items()
        if result["requests"]
    }
    inputs = paths | {f"requests of {name}": path for name, path in tables.items()}
    outputs = {"json": config.json, "report": config.report}
    check_outputs({name: [path] for name, path in inputs.items()}, outputs)
    first, *others = results
    for name in others:
        _check_seeds(results[first], results[name], first, name)
    if len(tables) < len(paths):
        without = ", ".join(str(path) for name, path in paths.items() if name not in tables)
        text = "no comparison by request: no table of requests (simulate run --requests FILE.parquet) for %s"
        logger.warning(text, without)
    columns = {
        name: read_columns(path, _COLUMNS, REQUESTS_SCHEMA, f"requests of {name}")
        for name, path in tables.items()
    }
    comparisons = {}
    for name in others:
        a, b = results[first], results[name]
        metrics = _metric_differences(a["runs"], b["runs"])
        requests = None
        if first in columns and name in columns:
            own, other = paired(columns[first], columns[name])
            num_pairs = len(own["seed"])
            requests = {
                "num_pairs": num_pairs,
                "num_only_a": len(columns[first]["seed"]) - num_pairs,
                "num_only_b": len(columns[name]["seed"]) - num_pairs,
                "latencies": latency_differences(own, other),
            }
        settings, changed = dict(leaves(a["config"])), dict(leaves(b["config"]))
        pairs = {key: (settings.get(key), changed.get(key)) for key in settings | changed}
        comparisons[name] = {
            "verdict": _verdict(metrics, requests),
            "metrics": metrics,
            "settings": {key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
            "requests": requests,
        }
    schema, num_seeds = "tailcast.comparison/6", len(results[first]["runs"])
    return {"schema": schema, "baseline": first, "num_seeds": num_seeds, "runs": comparisons}


def _verdict(metrics: Mapping[str, Any], requests: Mapping[str, Any] | None) -> dict[str, Any]:
    """By latency: the difference of means, by request if there are tables, and its interpretation."""
    verdict = {}
    for name in _VERDICT:
        mean = metrics[f"{name}.mean"]
        if requests is not None and name in requests["latencies"]:
            mean = requests["latencies"][name]["mean"]
        text = "one run: no interval" if mean["clear"] is None else "no clear difference"
        if mean["clear"]:
            text = "better" if mean["difference"] < 0 else "worse"
        verdict[name] = {**mean, "verdict": text}
    return verdict


def _read_result(path: Path, field: str) -> dict[str, Any]:
    """Reads the result of a run; `InputError` if a part that is compared is missing."""
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
        problem = f"a JSON result written by simulate run ({type(error).__name__}: {error})"
        raise InputError(field, str(path), problem) from error
    return dict(result)


def _check_seeds(a: Mapping[str, Any], b: Mapping[str, Any], name_a: str, name_b: str) -> None:
    """Raises `InputError` if the seeds or requests of two results differ."""
    first, second = ({one["seed"]: one["trace"] for one in result["runs"]} for result in (a, b))
    if list(first) != list(second):
        seeds_a, seeds_b = (", ".join(map(str, one)) for one in (first, second))
        raise InputError(f"seeds of {name_b}", seeds_b, f"{seeds_a}, the seeds of {name_a}")
    about_a, about_b = (
        f"{one['trace']['num_requests']} requests of {one['trace']['source']}" for one in (a, b)
    )
    for seed, trace in first.items():
        if second[seed] != trace:
            allowed = f"those of {name_a}, {about_a}, at the same rate"
            raise InputError(f"requests of {name_b} with seed {seed}", about_b, allowed)


def _metric_differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Differences of every metric that all runs have, in the order of the first run."""
    first, second = ([dict(flat(run["metrics"])) for run in runs] for runs in (a, b))
    differences = {}
    for name in first[0]:
        if all(name in run for run in (*first, *second)):
            own, other = ([run[name] for run in runs] for runs in (first, second))
            ends = None
            if len(own) > 1:
                estimate = interval([y - x for x, y in zip(own, other, strict=True)])
                ends = (estimate.low, estimate.high)
            differences[name] = difference(float(np.mean(own)), float(np.mean(other)), ends)
    return differences


def run(config: CompareConfig) -> int:
    """Runs `simulate compare`; without an output file, prints the tables to stdout. Returns the exit code."""
    for name in config.OUTPUTS:
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    comparison = compare(config)
    tables = _tables(comparison)
    if config.json is not None:
        write_json(config.json, comparison | {"config": asdict(config)})
    if config.report is not None:
        page = Page(f"{', '.join(comparison['runs'])} compared with {comparison['baseline']}")
        for heading, note, header, rows in tables:
            page.heading(heading)
            page.note(note)
            page.table(header, rows)
        page.write(config.report)
    if config.json is None and config.report is None:
        for heading, note, header, rows in tables:
            sys.stdout.write("\n".join([heading, note, text_table(header, rows), "", ""]))
    for warning in few_seeds(comparison["num_seeds"]).values():
        logger.warning(warning)
    unpaired, num_requests = {}, 0
    for name, one in comparison["runs"].items():
        if (requests := one["requests"]) is not None:
            num_only = requests["num_only_a"] + requests["num_only_b"]
            num_requests += requests["num_pairs"] + num_only
            if num_only:
                unpaired[f"finished only in {comparison['baseline']} or only in {name}"] = num_only
    return report_left_out(unpaired, num_requests, "requests")


def _tables(comparison: Mapping[str, Any]) -> list[_Table]:
    baseline, num_seeds = comparison["baseline"], comparison["num_seeds"]
    note = (
        f"Mean latencies in seconds compared with {baseline}, with the 95 % interval of the difference. All runs used the same "
        f"requests with {num_seeds} seed(s)."
    )
    rows = []
    for name, run in comparison["runs"].items():
        for latency, one in run["verdict"].items():
            change = "-" if one["ratio"] is None else f"{one['ratio'] - 1:+.1%}"
            rows.append([name, latency, *_cells(one), change, one["verdict"]])
    header = ["run", "latency", baseline, "run's", "difference", "low", "high", "change", "verdict"]
    tables: list[_Table] = [("Verdict", note, header, rows)]
    for name, one in comparison["runs"].items():
        tables += _run_tables(baseline, name, num_seeds, one)
    return tables


def _run_tables(baseline: str, name: str, num_seeds: int, run: Mapping[str, Any]) -> list[_Table]:
    requests = run["requests"]
    settings = [[key, str(a), str(b)] for key, (a, b) in run["settings"].items()]
    note = f"a is {baseline}, b is {name}."
    tables: list[_Table] = [(f"{name}: configured differently", note, ["setting", "a", "b"], settings)]
    columns = ["a", "b", "b - a", "low", "high"]
    if requests is not None:
        note = (
            f"{requests['num_pairs']} requests, means in seconds. Low and high: 95 % interval of b - a, by a bootstrap "
            "of blocks of consecutive requests of each seed. 'b lower': fraction of the requests for which b is lower. "
            f"{requests['num_only_a']} other requests finished only in a, {requests['num_only_b']} only in b."
        )
        rows = [
            [latency, *_cells(values["mean"]), f"{values['lower_fraction']:.1%}"]
            for latency, values in requests["latencies"].items()
        ]
        tables.append((f"{name}: request by request, seconds", note, ["", *columns, "b lower"], rows))
    note = ""
    if num_seeds > 1:
        note = (
            "Means over seeds. Low and high: 95 % interval of the mean of b - a, paired by seed "
            "(Student's t). b / a is marked * if that interval excludes 0, otherwise ?."
        )
    marks = {None: "", True: "*", False: "?"}
    rows = [
        [key, *_cells(one), "-" if one["ratio"] is None else f"{one['ratio']:.3f}{marks[one['clear']]}"]
        for key, one in run["metrics"].items()
    ]
    return [*tables, (f"{name}: all metrics", note, ["metric", *columns, "b / a"], rows)]


def _cells(one: Mapping[str, Any]) -> list[Any]:
    return [one[key] for key in ("a", "b", "difference", "low", "high")]
