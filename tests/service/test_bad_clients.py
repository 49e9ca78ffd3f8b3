"""Clients that die, do not read, or speak no gRPC do not harm the others."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.client import SyncPredictor
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from scheduler_core.predictor import PredictionRequest
from tests.service.harness import Served, eventually, served, start_load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(costly_folder: Path) -> Iterator[Served]:
    with served(costly_folder, "--max_queue=256") as found:
        yield found


@pytest.mark.parametrize("scheme", ["grpc", "stream"])
def test_clients_killed_in_the_middle_leave_nothing_behind(server: Served, scheme: str) -> None:
    for _ in range(3):
        clients = [
            start_load(f"{scheme}://{server.address}", "--callers=50", "--seconds=60") for _ in range(2)
        ]
        assert eventually(lambda: server.queue_length() > 50)
        for client in clients:
            os.kill(client.pid, signal.SIGKILL)
            client.communicate()
        assert eventually(lambda: server.queue_length() == 0)
        assert server.answers()


def test_a_client_that_does_not_read_is_slowed_down_and_costs_no_memory(server: Served) -> None:
    before_mb = server.process.pss_mb()
    num_sent = 0
    stop = threading.Event()
    # Long ids make long answers: what nobody reads would fill the memory.
    long_id = "x" * 1000

    def requests() -> Iterator[pb.PredictRequest]:
        nonlocal num_sent
        while not stop.is_set() and num_sent < 200_000:
            num_sent += 1
            yield pb.PredictRequest(request_id=long_id, prompt="sea")

    with grpc.insecure_channel(server.address) as channel:
        call = PredictorStub(channel).PredictStream(requests())  # type: ignore[no-untyped-call]
        # It is no longer read from: the number of requests it has taken stands still.
        seen: list[int] = []

        def stands_still() -> bool:
            stop.wait(0.5)
            seen.append(num_sent)
            return len(seen) > 3 and len(set(seen[-3:])) == 1

        assert eventually(stands_still, 60)
        assert num_sent < 200_000
        with SyncPredictor(server.address) as other:
            assert other.predict([PredictionRequest("", "sea", 1)], timeout_s=30)
        assert server.process.pss_mb() < before_mb + 40
        # Once it reads, it gets what it asked for.
        assert next(call).prediction.request_id == long_id
        stop.set()
        call.cancel()
    assert eventually(lambda: server.queue_length() == 0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0" * 4096,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 65536,
        bytes(range(256)) * 512,
    ],
    ids=["nothing", "zeros", "http1", "half a preface", "preface and noise", "all bytes"],
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


def test_many_clients_at_once_all_get_their_own_answers(server: Served) -> None:
    words = ["name three rivers", "sea", "write a long essay about the sea", "a a a"]

    def ask(number: int) -> Any:
        with SyncPredictor(server.address) as client:
            return client.predict([PredictionRequest(str(number), words[number % 4], 1)], timeout_s=60)[0].mu

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(ask, range(64)))
    assert all(found[number] == pytest.approx(found[number % 4], rel=1e-5) for number in range(64))
