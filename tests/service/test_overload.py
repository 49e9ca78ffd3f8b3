"""More load than the service can take: it answers what it can, refuses the rest at once, and stays as it was.

TAILCAST_LOAD_SECONDS is how long the long test lasts: 15 by default, 600 for the full one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.predictors.fakes import expected
from tests.service.harness import Served, eventually, load, served, write_costly_artifact

LOAD_SECONDS = float(os.environ.get("TAILCAST_LOAD_SECONDS", "15"))
MAX_QUEUE = 64

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def costly_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose model costs so much that the load generator needs little of the machine in comparison."""
    return write_costly_artifact(tmp_path_factory.mktemp("artifacts") / "costly", layers=96)


@pytest.fixture(scope="module")
def server(costly_folder: Path) -> Iterator[Served]:
    with served(costly_folder, f"--max_queue={MAX_QUEUE}") as found:
        yield found


@pytest.fixture(scope="module")
def capacity(server: Served) -> float:
    """Answers per second, measured, with all memory the server will need already touched."""
    report = load(f"grpc://{server.address}", "--callers=32", "--seconds=4", "--warmup-s=2")
    assert set(report["statuses"]) == {"OK"}
    found: float = report["answers_per_s"]
    assert found > 5
    return found


def test_the_costly_model_gives_the_tiny_ones_numbers(costly_folder: Path) -> None:
    from predictors.runtime import open_runtime

    found = open_runtime(costly_folder).predict(["name three rivers"])
    assert found.mu is not None
    assert found.mu[0] == pytest.approx(expected("name three rivers")[0], rel=1e-5)


def test_a_fifth_more_than_it_can_take(server: Served, capacity: float) -> None:
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


def test_a_flood_is_refused_at_once_and_does_not_slow_those_inside(server: Served, capacity: float) -> None:
    report = load(f"grpc://{server.address}", f"--rate={2 * capacity}", "--seconds=5", "--warmup-s=1")
    assert set(report["statuses"]) == {"OK", "RESOURCE_EXHAUSTED"}
    assert report["answers_per_s"] > 0.4 * capacity
    # A refusal does not wait for the queue. On a crowded machine it waits for a turn of the event loop, as answers do.
    assert report["refused_ms"]["p50"] < 0.75 * report["latency_ms"]["p50"]
    assert eventually(lambda: server.queue_length() == 0)
    assert server.answers()


def test_streams_are_bounded_too(server: Served, capacity: float) -> None:
    report = load(f"stream://{server.address}", f"--rate={1.5 * capacity}", "--seconds=5", "--warmup-s=1")
    assert set(report["statuses"]) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert report["answers_per_s"] > 0.4 * capacity
    assert eventually(lambda: server.queue_length() == 0)
