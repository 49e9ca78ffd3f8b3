"""A minimal OpenAI server for benchmarks of clients; its own cost is negligible.

`python -m benchmarks.sampling.fast_openai DELAY_S INTERVAL_S` prints its port and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from functools import partial

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
        delay_s: Mean delay of the output or the first event of a stream, varied by a factor of 0.5 to 1.5.
        interval_s: Seconds between the events of a stream.
    """

    def __init__(self, delay_s: float, interval_s: float) -> None:
        self._delay_s, self._interval_s = delay_s, interval_s
        self._received = b""
        self._random = random.Random(id(self))
        self._loop = asyncio.get_running_loop()
        self._whole = self._page(json.dumps(OUTPUT).encode())
        choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        self._events = [self._chunk({**common, "choices": [choice]}) for _ in range(32)]
        last = {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        usage = {**common, "choices": [], "usage": USAGE}
        self._events.append(self._chunk(last) + self._chunk(usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    @staticmethod
    def _page(body: bytes) -> bytes:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    @staticmethod
    def _chunk(content: object) -> bytes:
        event = b"data: " + json.dumps(content).encode() + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(event), event)

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
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._loop.call_later(delay_s, self._stream, 0)
        else:
            self._loop.call_later(delay_s, self._write, self._whole)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _stream(self, number: int) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._write((b"" if number else head) + self._events[number])
        if number + 1 < len(self._events):
            self._loop.call_later(self._interval_s, self._stream, number + 1)


async def main() -> None:
    """Writes the port to standard output and serves until terminated."""
    allow_descriptors(12_000)
    protocol = partial(FastProtocol, *map(float, sys.argv[1:]))
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=20_000)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
