"""Streams on which a memory of past requests could be worse than calibration alone: CRPS of ln tokens with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.entrants import Mode, Tailcast
from benchmarks.lengths.features import Features
from benchmarks.lengths.scores import run
from benchmarks.lengths.streams import FLOOD_START, SWAP_AFTER, Stream
from predictors.pretrained import TINY

#: Requests after a swap at which its windows begin.
SWAP_WINDOWS = (0, 100, 300)
Row = dict[str, str | float]


def homogeneous(features: Features, seeds: int) -> list[Row]:
    """Each application alone."""
    streams = [features.streams.homogeneous(seed) for seed in range(seeds)]
    return [_row(features, "alone", name, [each[name] for each in streams]) for name in streams[0]]


def flood(features: Features, seeds: int) -> list[Row]:
    """The other requests after a flood has begun."""
    rows = []
    for tenants, kind in product((False, True), ("none", "template", "copies")):
        streams = [features.streams.flooded(seed, kind, tenants) for seed in range(seeds)]
        is_other = [
            [row for row in range(FLOOD_START, len(each)) if each[row][0].application != "flood"]
            for each in streams
        ]
        case = f"{kind}, tenants {'named' if tenants else 'unknown'}"
        rows.append(_row(features, "flood", case, streams, is_other))
    return rows


def swap(features: Features, seeds: int) -> list[Row]:
    """Windows after the served models have been replaced, and the same requests if the new ones had always served."""
    rows = []
    ends = [*SWAP_WINDOWS[1:], None]
    for (start, end), swaps in product(zip(SWAP_WINDOWS, ends, strict=True), (True, False)):
        streams = [features.streams.swapped(seed, swaps) for seed in range(seeds)]
        windows = [range(SWAP_AFTER, len(each))[start:end] for each in streams]
        case = f"requests {start} to {end or 'the end'}"
        rows.append(_row(features, "swap" if swaps else "no swap", case, streams, windows))
    return rows


HAZARDS: dict[str, Callable[[Features, int], list[Row]]] = {"H": homogeneous, "flood": flood, "swap": swap}


def _row(
    features: Features,
    study: str,
    case: str,
    streams: Sequence[Stream],
    windows: Sequence[Sequence[int]] | None = None,
) -> Row:
    """CRPS of the requests in the windows (None: all), with calibration and with memory; means over streams."""
    features.prepare((), (request.prompt for stream in streams for request, _ in stream))
    row: Row = {"study": study, "case": case, "requests": len(streams[0])}
    for mode in (Mode.CALIBRATION, Mode.MEMORY):
        runs = [run(Tailcast(features, TINY, mode), stream) for stream in streams]
        chosen: list[NDArray[np.intp]] = [np.arange(len(stream)) for stream in streams]
        if windows is not None:
            chosen = [np.array(window, np.intp) for window in windows]
        row[mode.value] = float(np.mean([each.crps(part) for each, part in zip(runs, chosen, strict=True)]))
    row["ratio"] = float(row["memory"]) / float(row["calibration"])
    return row
