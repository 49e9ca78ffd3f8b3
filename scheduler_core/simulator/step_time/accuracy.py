"""Errors of simulated latencies with step times from data sheets, by region of load, measured on models that were not fitted.

`python -m benchmarks.h100` writes accuracy.json, see docs/accuracy.md.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_choice
from scheduler_core.shell.json_text import from_json

#: Preemptions per request above which the KV memory counts as full.
_MAX_PREEMPTED = 0.01
#: Regions by the upper end of their load, the request rate over the one at which the engine is always busy with full batches.
REGIONS = {"light": 0.7, "near_saturation": 1.0, "overload": float("inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """Mean absolute relative errors in a region, as fractions: 0.06 is 6 %.

    Attributes:
        basis: "measured": differences from a real engine. "propagated": no run of a real engine was in the region; the
            measured error of the step time, applied in simulations of the region.
        num_runs: Runs (measured) or simulations (propagated) behind the figures.
    """

    region: str
    basis: str
    num_runs: int
    e2e_mean: float
    e2e_p99: float
    ttft_mean: float
    ttft_p99: float
    itl_mean: float
    max_rate: float
    """Of the request rate at which the engine saturates."""


def region_of(load: float, kv_usage: float = 0.0, preempted: float = 0.0) -> str:
    """The region of a load: the request rate of a replica over its `saturation_rate_rps`. `InputError` if it is not > 0.

    A light load whose requests wait for memory is near saturation, whatever the batches: if running requests use as much of the
    KV memory, `kv_usage` on average over time, as that region has of the rate; or with `preempted` preemptions per request.
    """
    if not load > 0:
        raise InputError("load", load, "numbers > 0")
    region = next(region for region, end in REGIONS.items() if load <= end)
    is_full = kv_usage > REGIONS["light"] or preempted > _MAX_PREEMPTED
    return "near_saturation" if is_full and region == "light" else region


def error_band(region: str) -> ErrorBand:
    """The errors in a region of `REGIONS`; `InputError` if it is unknown."""
    check_choice("region", region, REGIONS)
    return ErrorBand(region=region, **_bands()[region])


@cache
def _bands() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("accuracy.json").read_text()
    bands: dict[str, dict[str, Any]] = from_json(text)["regions"]
    return bands
