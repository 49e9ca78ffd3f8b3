"""The routing benchmark's table, and its rounds with engines that only count."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.routing import Chat, rounds, table
from scheduler_core.errors import InputError


def test_table_by_hand() -> None:
    runs = {"random": [np.full(6, 2.0), np.full(6, 4.0)], "least busy": [np.full(6, 1.0), np.full(6, 2.0)]}
    lines = table(runs).splitlines()
    assert len(lines) == 4
    assert (
        lines[2]
        == "| random | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 | 1 | 1 | 2.00 ± 0.00 | 2.00 ± 0.00 | 2.00 ± 0.00 |"
    )
    assert lines[3].startswith("| least busy | 1.50 |")
    assert lines[3].endswith("| 0.50 ± 0.00 | 0.50 ± 0.00 | 1 | 1 | 1 |")
    one = table({side: results[:1] for side, results in runs.items()}).splitlines()
    assert one[2].endswith("| 1 | 1 | 2.00 | 2.00 | 2.00 |")  # one round has no interval


class Sides:
    """Two sides that answer at once; the second fails from its `limit`-th request on."""

    def __init__(self, limit: int = 10**9) -> None:
        self.num_sent = {"first": 0, "least busy": 0}
        self._limit = limit

    def __call__(self) -> dict[str, Callable[[], Any]]:
        return {name: lambda name=name: self._side(name) for name in self.num_sent}

    @asynccontextmanager
    async def _side(self, name: str) -> AsyncIterator[Any]:
        async def send(chat: Chat) -> AsyncIterator[str]:
            self.num_sent[name] += 1
            if name == "least busy" and self.num_sent[name] > self._limit:
                raise ConnectionError("closed")
            yield "a token"

        yield send


def options(path: Path, **changes: Any) -> argparse.Namespace:
    values = {"part": "ray", "requests": 6, "load": 1000.0, "minutes": 0.0, "runs": str(path / "runs.jsonl")}
    return argparse.Namespace(**values | changes)


async def test_rounds_go_on_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError) as failure:
        await rounds(options(tmp_path), Sides(limit=8)())
    assert failure.value.__notes__[0].startswith("request ")
    finished = (tmp_path / "runs.jsonl").read_text().splitlines()
    sides = Sides()
    runs, capacity_rps = await rounds(options(tmp_path), sides())
    assert {side: len(results) for side, results in runs.items()} == {"first": 1, "least busy": 1}
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert lines[: len(finished)] == finished
    assert len(lines) == 3
    assert json.loads(lines[0])["capacity_rps"] == capacity_rps
    assert sides.num_sent["least busy"] == 6 + 6  # its warm-up and its run
    again = Sides()
    assert (await rounds(options(tmp_path), again()))[1] == capacity_rps
    assert set(again.num_sent.values()) == {0}
    with pytest.raises(InputError, match="runs"):
        await rounds(options(tmp_path, load=2.0), again())
