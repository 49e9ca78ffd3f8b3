"""Killed workers and clients, noise on the port, more load than there is capacity: nothing else breaks with it.

TAILCAST_LOAD_SECONDS is how long the test under load lasts: 15 by default, 600 for the full one.
"""

import asyncio
import contextlib
import os
import signal
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from predictors.client import ClientSettings, GrpcPredictor
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors.fakes import expected
from tests.service.harness import Served, load, served, start_load, write_costly_artifact
from tests.waiting import eventually, until

pytestmark = pytest.mark.slow

PROMPTS = ["sea" + " a" * (number % 12) for number in range(60)]
PATIENT = ClientSettings(timeout_s=300.0, num_connections=2, wait_for_ready=True)
LOAD_SECONDS = float(os.environ.get("TAILCAST_LOAD_SECONDS", "15"))
MAX_QUEUE = 64


async def checked(predictor: GrpcPredictor, number: int) -> None:
    """Asks for one prediction and checks it."""
    prompt = PROMPTS[number % len(PROMPTS)]
    [prediction] = await predictor.predict([PredictionRequest(f"r{number}", prompt, 100)])
    assert prediction.length is not None
    assert prediction.length.mu == pytest.approx(expected(prompt)[0], rel=1e-5)


async def test_workers_killed_while_clients_retry_and_nothing_is_lost(artifact_folder: Path) -> None:
    with served(artifact_folder, "--workers=2") as server:
        supervisor = psutil.Process(server.process.popen.pid)

        def workers() -> set[int]:
            pids = set()
            for child in supervisor.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
                    if "predictors.service.process" in " ".join(child.cmdline()):
                        pids.add(child.pid)
            return pids

        assert len(workers()) == 2
        killed: set[int] = set()
        num_asked = 0
        async with GrpcPredictor(server.address, PATIENT) as predictor:

            async def caller() -> None:
                nonlocal num_asked
                while len(killed) < 4 or num_asked < 500:
                    num_asked += 1
                    await checked(predictor, num_asked)

            async def killer() -> None:
                for _ in range(2):
                    await until(lambda before=num_asked: num_asked >= before + 100)
                    for victim in workers():  # all of them: for a moment nobody is there
                        os.kill(victim, signal.SIGKILL)
                        killed.add(victim)
                    await until(lambda: len(workers() - killed) >= 2)

            await asyncio.gather(killer(), *(caller() for _ in range(16)))
        server.process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.popen.wait, 60) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(write_costly_artifact(tmp_path_factory.mktemp("costly")), "--max_queue=256") as found:
        yield found


def test_clients_killed_in_the_middle_leave_nothing_behind(server: Served) -> None:
    for _ in range(3):
        clients = [start_load(f"grpc://{server.address}", "--callers=50", "--seconds=60") for _ in range(2)]
        assert eventually(lambda: server.queue_length() > 50)
        for client in clients:
            os.kill(client.pid, signal.SIGKILL)
            client.communicate()
        assert eventually(lambda: server.queue_length() == 0)
        assert server.answers()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 65536,
        bytes(range(256)) * 512,
    ],
)
def test_other_protocols_and_noise_on_the_port(server: Served, garbage: bytes) -> None:
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for one in sockets:
        one.sendall(garbage)
    assert server.answers(), "with the connections open"
    for one in sockets[::2]:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
    for one in sockets:
        one.close()
    assert server.answers()


@pytest.fixture
def costly_server(tmp_path: Path) -> Iterator[Served]:
    """Its model costs so much that the load generator needs little of the machine in comparison."""
    with served(write_costly_artifact(tmp_path, layers=96), f"--max_queue={MAX_QUEUE}") as found:
        yield found


def test_a_fifth_more_than_it_can_take(costly_server: Served) -> None:
    # Measured with all memory the server will need already touched.
    report = load(f"grpc://{costly_server.address}", "--callers=32", "--seconds=4", "--warmup-s=2")
    assert set(report["statuses"]) == {"OK"}
    capacity: float = report["answers_per_s"]
    assert capacity > 5
    pss_mb: list[float] = []
    report = load(
        f"grpc://{costly_server.address}",
        f"--rate={1.2 * capacity}",
        f"--seconds={LOAD_SECONDS}",
        "--warmup-s=2",
        meanwhile=lambda: pss_mb.append(costly_server.process.pss_mb()),
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
    assert eventually(lambda: costly_server.queue_length() == 0)
