"""Clients that die or speak no gRPC do not harm the others."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

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
