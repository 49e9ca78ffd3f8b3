"""Two results side by side: every metric, seed against seed, and what is configured differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.pairing import PairedLatency, Pairs
from scheduler_core.simulator.statistics import interval


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of two runs, means over seeds.

    Attributes:
        name: Dotted name.
        a: Of the first.
        b: Of the second.
        difference: b - a.
        ratio: b / a; None if a is 0.
        low: Lower end of the interval of the mean over seeds of b - a, each seed against itself; None with one seed.
        high: Upper end.
    """

    name: str
    a: float
    b: float
    difference: float
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool | None:
        """Whether the interval leaves out 0; None without one."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What can be said of two runs.

    Attributes:
        metrics: Every metric that both have.
        settings: By dotted name: the two values of what is configured differently.
        num_seeds: Seeds of both.
        pairs: Their requests; None without tables.
        latencies: By name; empty without tables.
        groups: See `paired_groups`; empty without tables.
    """

    metrics: list[Difference]
    settings: dict[str, tuple[Any, Any]]
    num_seeds: int
    pairs: Pairs | None
    latencies: dict[str, PairedLatency]
    groups: dict[str, dict[str, dict[str, Any]]]


def numbers(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in a tree of metrics."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], confidence: float = 0.95
) -> list[Difference]:
    """Every metric that both results have with every seed, in the order of the first.

    Args:
        a: Metrics of the first, seed by seed.
        b: Of the second, with the same seeds.
        confidence: Of the intervals.
    """
    first, second = [dict(numbers(one)) for one in a], [dict(numbers(one)) for one in b]
    found = []
    for name in first[0]:
        if not all(name in one for one in (*first, *second)):
            continue
        mine, other = [one[name] for one in first], [one[name] for one in second]
        off = [y - x for x, y in zip(mine, other, strict=True)]
        spread = interval(off, confidence)
        low, high = (spread.low, spread.high) if spread.num > 1 else (None, None)
        mean, mean_b = float(np.mean(mine)), float(np.mean(other))
        found.append(Difference(name, mean, mean_b, spread.mean, mean_b / mean if mean else None, low, high))
    return found


def settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By dotted name: the two values of what is configured differently."""
    first, second = dict(settings(a["config"])), dict(settings(b["config"]))
    names = dict.fromkeys((*first, *second))
    return {
        name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)
    }


def content(found: Comparison) -> dict[str, Any]:
    """The comparison, ready to be written as JSON."""
    metrics = {}
    for one in found.metrics:
        values = {key: value for key, value in asdict(one).items() if key != "name"}
        metrics[one.name] = values | {"clear": one.clear}
    pairs = found.pairs
    return {
        "schema": "tailcast.comparison/2",
        "num_seeds": found.num_seeds,
        "metrics": metrics,
        "settings": found.settings,
        "requests": None
        if pairs is None
        else {
            "num_pairs": len(pairs),
            "num_only_a": pairs.num_only_a,
            "num_only_b": pairs.num_only_b,
            "latencies": {name: asdict(one) for name, one in found.latencies.items()},
            "groups": {
                field: {
                    value: {name: asdict(spread) for name, spread in latencies.items()}
                    for value, latencies in values.items()
                }
                for field, values in found.groups.items()
            },
        },
    }


def ratio_text(one: Difference) -> str:
    """b / a with a mark: * if the interval over seeds of b - a leaves out 0, ? if not, none with one seed."""
    if one.ratio is None:
        return "-"
    return f"{one.ratio:.3f}" + ("" if one.clear is None else "*" if one.clear else "?")


def checked_seeds(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[int]:
    """Seeds of two JSON results of the same requests.

    Raises:
        InputError: They were run with other seeds, or with other requests.
    """
    first = {one["seed"]: one["trace"] for one in a["runs"]}
    second = {one["seed"]: one["trace"] for one in b["runs"]}
    if list(first) != list(second):
        raise InputError("seeds of b", _told(second), f"{_told(first)}, the seeds of a")
    for seed, trace in first.items():
        if second[seed] != trace:
            raise InputError(
                f"requests of b with seed {seed}",
                f"{b['trace']['num_requests']} requests of {b['trace']['source']} ({second[seed][:12]})",
                f"those of a: {a['trace']['num_requests']} requests of {a['trace']['source']} ({trace[:12]}), with the same "
                "arrivals, lengths and tiers; give both runs the same trace or workload and the same rate",
            )  # fmt: skip
    return list(first)


def _told(seeds: Mapping[int, str]) -> str:
    return ", ".join(map(str, seeds))
