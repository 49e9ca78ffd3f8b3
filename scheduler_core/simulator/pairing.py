"""Two runs of the same requests, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.simulator.bootstrap import BlockBootstrap, FloatArray, Spread
from scheduler_core.simulator.column_file import Columns
from scheduler_core.simulator.records import LATENCIES

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
#: More groups than this are not told one by one.
_MAX_GROUPS = 64


@dataclass(frozen=True, eq=False)
class Pairs:
    """The same requests in two runs, those of each seed in the order of their arrival.

    Attributes:
        a: Columns [n] of the first run, see `request_table.COMPARED`.
        b: Columns [n] of the second, row by row the same requests.
        num_only_a: Requests that only the first finished.
        num_only_b: Requests that only the second finished.
    """

    a: Columns
    b: Columns
    num_only_a: int
    num_only_b: int

    def __len__(self) -> int:
        return len(self.a["seed"])


def paired(a: Columns, b: Columns) -> Pairs:
    """Brings the rows of two tables together by seed and request id.

    Raises:
        InputError: They have no request in common, or a request has another length in the other run.
    """
    places = {key: place for place, key in enumerate(_keys(b))}
    order = np.lexsort((a["arrival_s"], a["seed"]))
    keys = _keys(a)
    rows = [(int(place), places[keys[place]]) for place in order if keys[place] in places]
    if not rows:
        raise InputError("b", "no request of a", "a run of the same requests")
    first, second = np.array(rows, np.int64).T
    mine = {name: values[first] for name, values in a.items()}
    other = {name: values[second] for name, values in b.items()}
    for name in ("prompt_tokens", "output_tokens"):
        differ = np.flatnonzero(mine[name] != other[name])
        if len(differ):
            one = differ[0]
            raise InputError(
                f"b, {name} of request {mine['request_id'][one]}", int(other[name][one]), f"{mine[name][one]} as in a"
            )  # fmt: skip
    return Pairs(mine, other, len(keys) - len(rows), len(places) - len(rows))


def _keys(table: Columns) -> list[tuple[int, str]]:
    return list(zip(table["seed"].tolist(), table["request_id"].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class PairedLatency:
    """One latency of paired requests, in seconds.

    Attributes:
        num: Requests that have it in both runs.
        mean: Of all of them.
        quantiles: p50, p90, p99: the difference of the two quantiles, not the quantile of the differences.
        lower_share: Share of the requests for which b is lower.
        equal_share: Share for which both are the same, up to rounding.
    """

    num: int
    mean: Spread
    quantiles: dict[str, Spread]
    lower_share: float
    equal_share: float


def paired_latencies(
    pairs: Pairs, rng: np.random.Generator, num_resamples: int = 1000, confidence: float = 0.95
) -> dict[str, PairedLatency]:
    """By name of the latency: how it differs, with bootstrap intervals.

    Args:
        pairs: The requests.
        rng: Draws the samples.
        num_resamples: How many samples.
        confidence: Of the intervals.
    """
    found: dict[str, PairedLatency] = {}
    for name in LATENCIES:
        a, b, known = _values(pairs, name)
        if not len(a):
            continue
        bootstrap = BlockBootstrap(pairs.a["seed"][known], rng, num_resamples, confidence)
        quantiles = bootstrap.quantiles(a, b, list(_QUANTILES.values()))
        equal = np.isclose(a, b, rtol=1e-9, atol=1e-12)
        found[name] = PairedLatency(
            len(a),
            bootstrap.mean(a, b),
            dict(zip(_QUANTILES, quantiles, strict=True)),
            float(((b < a) & ~equal).mean()),
            float(equal.mean()),
        )
    return found


def paired_groups(
    pairs: Pairs, names: Sequence[str], rng: np.random.Generator, num_resamples: int = 1000, confidence: float = 0.95
) -> dict[str, dict[str, dict[str, Any]]]:  # fmt: skip
    """By field (tier, tenant), value and latency: difference of the means, where the field has several values."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    bootstrap = BlockBootstrap(pairs.a["seed"], rng, num_resamples, confidence)
    for field in ("tier", "tenant"):
        values = sorted(set(pairs.a[field].tolist()))
        if not 1 < len(values) <= _MAX_GROUPS:
            continue
        found[field] = {
            str(value): {
                name: bootstrap.mean(pairs.a[name], pairs.b[name], np.asarray(pairs.a[field] == value))
                for name in names
            }
            for value in values
        }
    return found


def _values(pairs: Pairs, name: str) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """Values of both runs where both have one, and where that is [n]."""
    a, b = pairs.a[name], pairs.b[name]
    known = np.asarray(np.isfinite(a) & np.isfinite(b))
    return a[known], b[known], known


def ratios(pairs: Pairs, name: str) -> FloatArray:
    """b / a of every request that has the latency in both runs, and above 0."""
    a, b, _ = _values(pairs, name)
    above = (a > 0) & (b > 0)
    return np.asarray(b[above] / a[above], np.float64)
