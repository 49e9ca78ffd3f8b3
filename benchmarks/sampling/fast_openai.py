"""A minimal OpenAI server for benchmarks of clients; its own cost is negligible.

`python -m benchmarks.sampling.fast_openai DELAY_S` prints its port and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from functools import partial

from benchmarks.shared.processes import print_ports
from data_gen.openai.http_client import allow_descriptors

MODEL = "fake-model"


MESSAGE = {"role": "assistant", "content": " ".join(["word"] * 32)}
USAGE = {"prompt_tokens": 12, "completion_tokens": 32, "total_tokens": 44}
OUTPUT = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "length"}],
    "usage": USAGE,
}


class FastProtocol(asyncio.Protocol):
    """Returns the same output for every request, at a small fraction of a client's cost.

    Args:
        delay_s: Mean delay of the output, varied by a factor of 0.5 to 1.5.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._received = b""
        self._random = random.Random(id(self))
        self._loop = asyncio.get_running_loop()
        self._whole = self._page(json.dumps(OUTPUT).encode())

    @staticmethod
    def _page(body: bytes) -> bytes:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        head, separator, body = received.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line[:15].lower() == b"content-length:":
                length = int(line[15:])
        if not separator or len(body) < length:
            self._received = received
            return
        self._received = b""
        delay_s = self._delay_s * self._random.uniform(0.5, 1.5)
        if head.startswith(b"GET /v1/models"):
            entry = {"id": MODEL, "object": "model", "owned_by": "vllm"}
            self._transport.write(self._page(json.dumps({"object": "list", "data": [entry]}).encode()))
        elif head.startswith(b"GET"):
            self._transport.write(self._page(b'{"version": "9.9"}'))
        else:
            self._loop.call_later(delay_s, self._write, self._whole)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def main() -> None:
    """Writes the port to standard output and serves until terminated."""
    allow_descriptors(12_000)
    protocol = partial(FastProtocol, float(sys.argv[1]))
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=20_000)
    print_ports(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
