"""Streams on which a memory of past requests could be worse than calibration alone.

All scores are CRPS of ln tokens; `artifact` is a shipped predictor or an artifact folder.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.entrants import Mode, Tailcast
from benchmarks.lengths.features import Features
from benchmarks.lengths.scores import Run, run
from benchmarks.lengths.streams import FLOOD_START, SWAP_AFTER, Stream
from predictors.pretrained import PRETRAINED, TINY

#: Requests after a swap that begin and end each window.
SWAP_WINDOWS = ((0, 100), (100, 300), (300, None))
Row = dict[str, str | float]


def homogeneous(features: Features, seeds: int, artifact: str = TINY) -> list[Row]:
    """CRPS of calibration and memory for each application alone, and their ratio; means over seeds."""
    streams = [features.streams.homogeneous(seed) for seed in range(seeds)]
    _prepare(features, artifact, [each for of_seed in streams for each in of_seed.values()])
    rows: list[Row] = []
    for name in streams[0]:
        one, other = (
            float(np.mean([_run(features, artifact, mode, of_seed[name]).crps() for of_seed in streams]))
            for mode in (Mode.CALIBRATION, Mode.MEMORY)
        )
        num = len(streams[0][name])
        rows.append(
            {"application": name, "requests": num, "calibration": one, "memory": other, "ratio": other / one}
        )
    return rows


def flood(features: Features, seeds: int, artifact: str = PRETRAINED) -> list[Row]:
    """CRPS of the other requests after the flood has begun, with calibration and memory; means over seeds."""
    rows: list[Row] = []
    for tenants, kind in product((False, True), ("none", "template", "copies")):
        streams = [features.streams.flooded(seed, kind, tenants) for seed in range(seeds)]
        _prepare(features, artifact, streams)
        row: Row = {"tenants": "named" if tenants else "unknown", "flood": kind}
        for mode in (Mode.CALIBRATION, Mode.MEMORY):
            runs = [_run(features, artifact, mode, stream) for stream in streams]
            row[mode.value] = float(np.mean([_others(each) for each in runs]))
        rows.append(row)
    return rows


def swap(features: Features, seeds: int, artifact: str = PRETRAINED) -> list[Row]:
    """CRPS in windows after served models are replaced, and its ratio to that if the new ones had always served."""
    rows: list[Row] = []
    streams = {
        swap: [features.streams.swapped(seed, swap) for seed in range(seeds)] for swap in (True, False)
    }
    _prepare(features, artifact, [stream for both in streams.values() for stream in both])
    for mode in Mode:
        runs = {swap: [_run(features, artifact, mode, each) for each in of] for swap, of in streams.items()}
        for start, end in SWAP_WINDOWS:
            swapped, level = (
                np.mean([each.crps(_rows(each)[SWAP_AFTER:][start:end]) for each in runs[key]])
                for key in (True, False)
            )
            window = f"{start} to {'the end' if end is None else end}"
            row: Row = {"version": mode.value, "requests after the swap": window}
            rows.append(row | {"crps": float(swapped), "ratio to no swap": float(swapped / level)})
    return rows


HAZARDS: dict[str, Callable[[Features, int], list[Row]]] = {"H": homogeneous, "flood": flood, "swap": swap}


def _prepare(features: Features, artifact: str, streams: list[Stream]) -> None:
    features.prepare([artifact], (request.prompt for stream in streams for request, _ in stream))


def _run(features: Features, artifact: str, mode: Mode, stream: Stream) -> Run:
    return run(Tailcast(features, artifact, mode), stream)


def _others(result: Run) -> float:
    rows = _rows(result)[FLOOD_START:]
    return result.crps(rows[[result.applications[row] != "flood" for row in rows.tolist()]])


def _rows(result: Run) -> NDArray[np.intp]:
    return np.arange(len(result.order))
