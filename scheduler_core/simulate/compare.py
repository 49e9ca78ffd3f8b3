"""`simulate compare`: two results side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, writable_target, write_json

_SCHEMA = "tailcast.simulation/"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two results of `simulate run`: every metric of both, their ratio, and how their configurations differ."""

    a: str
    """JSON result of the first run."""
    b: str
    """JSON result of the second run."""
    json: str | None = None
    """Where to write the comparison as JSON."""
    report: str | None = None
    """Where to write it as a page (.html)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of two runs.

    Attributes:
        name: Dotted name.
        a: Of the first.
        b: Of the second.
        ratio: b / a; None if a is 0.
        clear: Whether the confidence intervals over seeds do not overlap; None if a run has none.
    """

    name: str
    a: float
    b: float
    ratio: float | None
    clear: bool | None


def numbers(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in a tree of metrics."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Every metric that both results have, in the order of the first."""
    second, spread_a, spread_b = dict(numbers(b["metrics"])), _intervals(a), _intervals(b)
    found = []
    for name, value in numbers(a["metrics"]):
        if name not in second:
            continue
        clear = None
        if name in spread_a and name in spread_b:
            clear = spread_a[name][1] < spread_b[name][0] or spread_b[name][1] < spread_a[name][0]
            value, other = spread_a[name][2], spread_b[name][2]
        else:
            other = second[name]
        found.append(Difference(name, value, other, other / value if value else None, clear))
    return found


def _intervals(result: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """By name: (low, high, mean) over seeds."""
    flat = dict(numbers(result.get("intervals", {})))
    names = [name.removesuffix(".low") for name in flat if name.endswith(".low")]
    return {name: (flat[f"{name}.low"], flat[f"{name}.high"], flat[f"{name}.mean"]) for name in names}


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


def _read(path: str, field: str) -> dict[str, Any]:
    try:
        content = json.loads(existing_file(path, field).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(field, path, f"a JSON result of simulate run ({error})") from error
    if not isinstance(content, dict) or not str(content.get("schema", "")).startswith(_SCHEMA):
        raise InputError(field, path, "a JSON result of simulate run")
    return content


def run(config: CompareConfig) -> None:
    """Carries out `simulate compare`; without a file to write to, the table goes to stdout."""
    a, b = _read(config.a, "a"), _read(config.b, "b")
    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    found, changed = differences(a, b), changed_settings(a, b)
    same = (
        a["trace"]["sha256"] == b["trace"]["sha256"]
        and a["trace"]["num_requests"] == b["trace"]["num_requests"]
    )
    if config.json is not None:
        metrics = {
            one.name: {"a": one.a, "b": one.b, "ratio": one.ratio, "clear": one.clear} for one in found
        }
        write_json(config.json, {"schema": "tailcast.comparison/1", "metrics": metrics, "settings": changed})
    if config.report is not None:
        _write_page(config, found, changed, same)
    if config.json is None and config.report is None:
        lines = [f"{'metric':<46}{Path(config.a).stem:>14}{Path(config.b).stem:>14}{'b / a':>9}"]
        lines += [f"{one.name:<46}{one.a:>14.5g}{one.b:>14.5g}{_ratio(one):>9}" for one in found]
        sys.stdout.write("\n".join(lines) + "\n")


def _ratio(one: Difference) -> str:
    if one.ratio is None:
        return "-"
    return f"{one.ratio:.3f}" + ("" if one.clear is None else "*" if one.clear else "?")


def _write_page(
    config: CompareConfig, found: list[Difference], changed: dict[str, tuple[Any, Any]], same: bool
) -> None:
    from scheduler_core.simulator.report.page import Page

    assert config.report is not None
    page = Page(f"{Path(config.a).stem} and {Path(config.b).stem}")
    if not same:
        page.note("The two runs are of different traces: their numbers are not about the same requests.")
    page.heading("Configured differently")
    page.table(
        ["setting", "a", "b"], [[name, str(one), str(other)] for name, (one, other) in changed.items()]
    )
    page.heading("Metrics")
    page.note("b / a; * the 95 % intervals over seeds do not overlap, ? they do.")
    page.table(["metric", "a", "b", "b / a"], [[one.name, one.a, one.b, _ratio(one)] for one in found])
    page.write(config.report)
