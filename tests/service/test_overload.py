"""More load than the service can take: it answers what it can, refuses the rest at once, and stays as it was.

TAILCAST_LOAD_SECONDS is how long the long test lasts: 15 by default, 600 for the full one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import Served, eventually, load, served, write_costly_artifact

LOAD_SECONDS = float(os.environ.get("TAILCAST_LOAD_SECONDS", "15"))
MAX_QUEUE = 64

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """Its model costs so much that the load generator needs little of the machine in comparison."""
    with served(write_costly_artifact(tmp_path, layers=96), f"--max_queue={MAX_QUEUE}") as found:
        yield found


def test_a_fifth_more_than_it_can_take(server: Served) -> None:
    # Measured with all memory the server will need already touched.
    report = load(f"grpc://{server.address}", "--callers=32", "--seconds=4", "--warmup-s=2")
    assert set(report["statuses"]) == {"OK"}
    capacity: float = report["answers_per_s"]
    assert capacity > 5
    pss_mb: list[float] = []
    report = load(
        f"grpc://{server.address}",
        f"--rate={1.2 * capacity}",
        f"--seconds={LOAD_SECONDS}",
        "--warmup-s=2",
        meanwhile=lambda: pss_mb.append(server.process.pss_mb()),
    )
    # Every request was answered or refused; nothing hung, broke or was lost.
    assert set(report["statuses"]) <= {"OK", "RESOURCE_EXHAUSTED"}
    # No collapse: padded batches would fall to a third. The machine may have become slower meanwhile.
    assert report["answers_per_s"] > 0.5 * capacity
    # Nobody waits longer than a full queue takes; generously, for a machine that others use too.
    assert report["latency_ms"]["p99"] < 5 * 1000 * MAX_QUEUE / capacity + 1000
    assert report["latency_ms"]["max"] < 15_000
    quarter = len(pss_mb) // 4
    first, last = statistics.median(pss_mb[quarter : 2 * quarter]), statistics.median(pss_mb[-quarter:])
    assert last < 1.05 * first + 5, "memory grows"
    assert eventually(lambda: server.queue_length() == 0)
