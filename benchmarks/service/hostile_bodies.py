"""Longest block and peak memory that one hostile request causes in the prediction service.

Each body is sent separately to a server with a tiny artifact, in its own process. A callback runs there every
millisecond on the event loop. The longest time between two callbacks is the longest block, during which no
other request gets a response, /healthz included. It is reported as wall-clock time, which includes other
processes, and as CPU time of the loop's thread, which does not. Memory is the increase of the process's
resident set: its peak minus its value before the body was sent.

    python -m benchmarks.service.hostile_bodies [--only json] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import math
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.command import Parser
from benchmarks.shared.processes import print_ports, printing_ports
from benchmarks.shared.timing import memory_mb
from scheduler_core.report.page import markdown_table

MIB = 2**20
TICK_S = 0.001
PREDICT = "/tailcast.predictor.v1.Predictor/Predict"
PREDICT_BATCH = "/tailcast.predictor.v1.Predictor/PredictBatch"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
INFER = "/v2/models/tiny/infer"


@dataclass(frozen=True)
class Body:
    """One attack.

    Attributes:
        name: Short description.
        target: HTTP path, or gRPC method.
        make: Builds its bytes.
        headers: HTTP headers.
        raw: The bytes are written to the HTTP port as they are, including the head.
    """

    name: str
    target: str
    make: Callable[[], bytes]
    headers: dict[str, str] | None = None
    raw: bool = False

    @property
    def is_grpc(self) -> bool:
        """Whether it goes to the gRPC port."""
        return self.target in (PREDICT, PREDICT_BATCH, MODEL_INFER)


def filled(unit: bytes, size: int, start: bytes = b"", end: bytes = b"") -> bytes:
    """`start`, then as many repetitions of `unit` as fit into `size` (last separator removed), then `end`."""
    count = (size - len(start) - len(end)) // len(unit)
    return start + (unit * count).removesuffix(b",") + end


def varint(value: int) -> bytes:
    """Protobuf varint encoding."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, data: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, datatype: str, shape: list[int], contents: bytes = b"") -> bytes:
    """A field `inputs` of ModelInferRequest."""
    sizes = b"".join(varint(size) for size in shape)
    data = field(1, name.encode()) + field(2, datatype.encode()) + field(3, sizes)
    return field(5, data + (field(5, contents) if contents else b""))


def binary_inference(name: str, datatype: str, shape: list[int], raw: bytes) -> bytes:
    """The JSON part, padded to HEADER bytes, and one tensor."""
    parameters = {"binary_data_size": len(raw)}
    one = {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}
    return json.dumps({"inputs": [one]}).encode().ljust(HEADER) + raw


HEADER = 300
LEVELS = [(level + 1) / 102 for level in range(100)]
MANY_LEVELS = {"prompt": "sea", "max_tokens": 100, "quantile_levels": LEVELS}
BINARY = {"Inference-Header-Content-Length": str(HEADER)}
MODEL = field(1, b"tiny")
N = 4 * MIB - 64 * 1024
"""Size of most bodies: just below the service's limit of 4 MiB."""


def json_inference(datatype: str, count: int, unit: bytes) -> bytes:
    """One tensor [count, 1] of equal values, as JSON."""
    name = "prompt" if datatype == "BYTES" else "input_ids"
    head = f'{{"inputs":[{{"name":"{name}","datatype":"{datatype}","shape":[{count},1],"data":['.encode()
    return head + unit + (b"," + unit) * (count - 1) + b"]}]}"


def chunked(path: str, piece: bytes, count: int) -> bytes:
    """A complete request whose body is sent in many chunks."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + (b"%x\r\n%b\r\n" % (len(piece), piece)) * count + b"0\r\n\r\n"


def bomb(size: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """`size` zeros, compressed."""
    packer = zlib.compressobj(9, wbits=wbits)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()


def with_headers(count: int, size: int) -> bytes:
    """A complete request with many headers."""
    lines = b"".join(b"x-%d: %b\r\n" % (number, b"a" * size) for number in range(count))
    return b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + lines + b"\r\n"


CORPUS = [
    Body("oip http binary INT8 [1e6, 1], 1 MiB", INFER, lambda: binary_inference("input_ids", "INT8", [MIB, 1], bytes(MIB)), BINARY),
    Body("oip http binary INT8 [N, 1]", INFER, lambda: binary_inference("input_ids", "INT8", [N, 1], bytes(N)), BINARY),
    Body("oip http binary INT8 [256, N/256]", INFER, lambda: binary_inference("input_ids", "INT8", [256, N // 256], bytes(N)), BINARY),
    Body("oip http binary INT8 [N], no column", INFER, lambda: binary_inference("input_ids", "INT8", [N], bytes(N)), BINARY),
    Body("oip http binary max_tokens [N]", INFER, lambda: binary_inference("max_tokens", "INT8", [N], bytes(N)), BINARY),
    Body("oip http binary shape wrong", INFER, lambda: binary_inference("prompt", "BYTES", [1], bytes(N // 4 * 4)), BINARY),
    Body("oip http binary BYTES, empty strings", INFER, lambda: binary_inference("prompt", "BYTES", [N // 4], bytes(N // 4 * 4)), BINARY),
    Body("oip http json input_ids", INFER, lambda: json_inference("INT64", N // 2, b"1")),
    Body("oip http json input_ids nested", INFER, lambda: json_inference("INT64", N // 4, b"[1]")),
    Body("oip http json empty prompts", INFER, lambda: json_inference("BYTES", N // 3, b'""')),
    Body("oip http json many inputs", INFER, lambda: filled(b"{},", N, b'{"inputs":[', b"]}")),
    Body("oip http json many outputs", INFER, lambda: filled(b'{"name":"mu"},', N, b'{"inputs":[],"outputs":[', b"]}")),
    Body("oip grpc raw INT8 [N, 1]", MODEL_INFER, lambda: MODEL + tensor("input_ids", "INT8", [N, 1]) + field(7, bytes(N))),
    Body("oip grpc raw INT8 [1e6, 1], 1 MiB", MODEL_INFER, lambda: MODEL + tensor("input_ids", "INT8", [MIB, 1]) + field(7, bytes(MIB))),
    Body("oip grpc raw BYTES, empty strings", MODEL_INFER, lambda: MODEL + tensor("prompt", "BYTES", [N // 4]) + field(7, bytes(N // 4 * 4))),
    Body("oip grpc typed INT32 [N, 1]", MODEL_INFER, lambda: MODEL + tensor("input_ids", "INT32", [N, 1], field(2, bytes(N)))),
    Body("oip grpc typed INT64 [256, N/256]", MODEL_INFER, lambda: MODEL + tensor("input_ids", "INT64", [256, N // 256], field(3, bytes(N)))),
    Body("oip grpc typed empty strings", MODEL_INFER, lambda: MODEL + tensor("prompt", "BYTES", [N // 2], b"\x42\0" * (N // 2))),
    Body("oip grpc shape of N sizes", MODEL_INFER, lambda: MODEL + field(5, field(1, b"prompt") + field(2, b"BYTES") + field(3, bytes(N)))),
    Body("oip grpc many inputs", MODEL_INFER, lambda: MODEL + b"\x2a\0" * (N // 2)),
    Body("oip grpc many outputs", MODEL_INFER, lambda: MODEL + b"\x32\0" * (N // 2)),
    Body("oip grpc many raw contents", MODEL_INFER, lambda: MODEL + b"\x3a\0" * (N // 2)),
    Body("batch json {}", "/v1/predict-batch", lambda: filled(b"{},", N, b'{"requests":[', b"]}")),
    Body("batch json prompts", "/v1/predict-batch", lambda: filled(b'{"prompt":"sea"},', N, b'{"requests":[', b"]}")),
    Body("batch grpc, empty requests", PREDICT_BATCH, lambda: b"\x0a\0" * (N // 2)),
    Body("batch grpc, 256 prompts of 15 KiB", PREDICT_BATCH, lambda: field(1, field(2, b"sea " * 3_750)) * 256),
    Body("predict json token ids", "/v1/predict", lambda: filled(b"1,", N, b'{"token_ids":[', b"]}")),
    Body("predict json 300,000 token ids", "/v1/predict", lambda: filled(b"1,", 600_000, b'{"token_ids":[', b"]}")),
    Body("predict json messages", "/v1/predict", lambda: filled(b"{},", N, b'{"messages":[', b"]}")),
    Body("predict json 80,000 messages", "/v1/predict", lambda: filled(b"{},", 240_000, b'{"messages":[', b"]}")),
    Body("predict json quantile levels", "/v1/predict", lambda: filled(b"0,", N, b'{"quantile_levels":[', b"]}")),
    Body("predict grpc token ids", PREDICT, lambda: field(3, field(1, bytes(N)))),
    Body("predict grpc messages", PREDICT, lambda: field(4, b"\x0a\0" * (N // 2))),
    Body("predict grpc quantile levels", PREDICT, lambda: field(2, b"sea") + field(8, bytes(N // 8 * 8))),
    Body("batch json, 256 of 100 levels", "/v1/predict-batch", lambda: json.dumps({"requests": [MANY_LEVELS] * 256}).encode()),
    Body("batch grpc, 256 conversations", PREDICT_BATCH, lambda: field(1, field(4, b"\x0a\0" * 7_500)) * 256),
    Body("batch grpc, 256 of 100 levels", PREDICT_BATCH, lambda: field(1, field(2, b"sea") + b"\x30\x64" + field(8, struct.pack("<100d", *LEVELS))) * 256),
    Body("over the limit: json, 16 MiB", "/v1/predict", lambda: filled(b"{},", 16 * MIB, b'{"messages":[', b"]}")),
    Body("over the limit: grpc, 16 MiB", PREDICT_BATCH, lambda: b"\x0a\0" * 8 * MIB),
    Body("over the limit: gzip, 16 MiB of {}", "/v1/predict", lambda: gzip.compress(filled(b"{},", 16 * MIB, b'{"messages":[', b"]}")), {"Content-Encoding": "gzip"}),
    Body("json nested lists", "/v1/predict", lambda: b"[" * N),
    Body("json nested objects", "/v1/predict", lambda: b'{"a":' * (N // 5)),
    Body("json nested, closed", "/v1/predict", lambda: b"[" * (N // 2) + b"]" * (N // 2)),
    Body("json a key again and again", "/v1/predict", lambda: filled(b'"a":1,', N, b"{", b"}")),
    Body("json many keys", "/v1/predict", lambda: b"{" + b",".join(b'"%d":1' % n for n in range(N // 11)) + b"}"),
    Body("json key of 4 MiB", "/v1/predict", lambda: b'{"' + b"a" * N + b'":1}'),
    Body("json number of 4e6 digits", "/v1/predict", lambda: b'{"max_tokens":' + b"7" * N + b"}"),
    Body("json numbers of 4,300 digits", "/v1/predict", lambda: filled(b"7" * 4300 + b",", N, b'{"token_ids":[', b"]}")),
    Body("json fraction of 4e6 digits", "/v1/predict", lambda: b'{"temperature":0.' + b"7" * N + b"}"),
    Body("json whitespace", "/v1/predict", lambda: b" " * N + b"{}"),
    Body("json prompt of 4 MiB", "/v1/predict", lambda: filled(b"name three rivers ", N, b'{"prompt":"', b'"}')),
    Body("json prompt, 4 MiB of UTF-8", "/v1/predict", lambda: filled("é".encode(), N, b'{"prompt":"', b'"}')),
    Body("json prompt, escaped new lines", "/v1/predict", lambda: filled(rb"\n", N, b'{"prompt":"sea', b'"}')),
    Body("json prompt, escaped letters", "/v1/predict", lambda: filled(rb"\u00e9", N, b'{"prompt":"', b'"}')),
    Body("json prompt, escaped quotes", "/v1/predict", lambda: filled(rb"\"", N, b'{"prompt":"', b'"}')),
    Body("json request id of 4 MiB", "/v1/predict", lambda: b'{"prompt":"sea","request_id":"' + b"a" * N + b'"}'),
    Body("json model name of 4 MiB", "/v1/predict", lambda: b'{"prompt":"sea","served_model":"' + b"a" * N + b'"}'),
    Body("json backslashes, not closed", "/v1/predict", lambda: b'{"prompt":"' + b"\\" * N),
    Body("grpc prompt of 4 MiB", PREDICT, lambda: field(2, b"name three rivers " * (N // 18))),
    Body("grpc prompt, 4 MiB of UTF-8", PREDICT, lambda: field(2, "é".encode() * (N // 2))),
    Body("grpc spaces, 4 MiB", PREDICT, lambda: field(2, b" " * N)),
    Body("grpc request id of 4 MiB", PREDICT, lambda: field(1, b"a" * N) + field(2, b"sea")),
    Body("grpc unknown fields", PREDICT, lambda: b"\xfa\x07\0" * (N // 3)),
    Body("chunks of one byte", "/v1/predict", lambda: chunked("/v1/predict", b" ", N // 6), raw=True),
    Body("gzip bomb of 1 GiB", "/v1/predict", lambda: bomb(1024 * MIB, zlib.MAX_WBITS | 16), {"Content-Encoding": "gzip"}),
    Body("deflate bomb of 1 GiB", "/v1/predict", lambda: bomb(1024 * MIB), {"Content-Encoding": "deflate"}),
    Body("gzip, 4 MiB of {}", "/v1/predict-batch", lambda: gzip.compress(filled(b"{},", N, b'{"requests":[', b"]}")), {"Content-Encoding": "gzip"}),
    Body("10,000 headers", "/v1/predict", lambda: with_headers(10_000, 10), raw=True),
    Body("120 headers of 8,000 bytes", "/v1/predict", lambda: with_headers(120, 8000), raw=True),
    Body("10,000 pipelined requests", "/healthz", lambda: b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000, raw=True),
]  # fmt: skip


class LoopProbe:
    """Measures the longest time between two callbacks of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reset()
        self._tick()

    def reset(self) -> None:
        """Restarts the measurement."""
        self.wall_s = self.cpu_s = 0.0
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def _tick(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self.wall_s = max(self.wall_s, wall - self._wall - TICK_S)
        self.cpu_s = max(self.cpu_s, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        self._loop.call_later(TICK_S, self._tick)


def serve(artifact: str) -> None:
    """Serves until stdin is closed; prints the measurements since the last line for each line on stdin."""
    from predictors.hosting.process import run
    from predictors.runtime import open_runtime
    from predictors.service.batcher import BatchingSettings
    from predictors.service.config import ServeConfig
    from predictors.service.server import PredictionServer

    async def main() -> None:
        config = ServeConfig(artifact=artifact, port=0, http_port=0)
        runtimes = [open_runtime(artifact, provider="cpu")]
        server = PredictionServer(runtimes, BatchingSettings.cpu(1), config)
        port = await server.start()
        probe = LoopProbe()
        ended = asyncio.Event()

        def report() -> None:
            if not sys.stdin.readline():
                ended.set()
                return
            stats = {"wall_s": probe.wall_s, "cpu_s": probe.cpu_s, "peak_mib": memory_mb()}
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            stats["now_mib"] = memory_mb("VmRSS")
            sys.stdout.write(json.dumps(stats) + "\n")
            sys.stdout.flush()
            probe.reset()

        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), report)
        print_ports(port, server.http_port or 0)
        await ended.wait()

    run(main())


@dataclass(frozen=True)
class Server:
    """A server process and its ports."""

    process: subprocess.Popen[str]
    port: int
    http_port: int

    def stats(self) -> dict[str, float]:
        """Measurements since the last call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        blocks: dict[str, float] = json.loads(self.process.stdout.readline())
        return blocks


def sent(body: Body, data: bytes, server: Server) -> str:
    """Sends a body and returns the status of the response."""
    try:
        if body.is_grpc:
            return sent_over_grpc(body, data, server)
        if body.raw:
            return sent_raw(data, server)
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120)
        try:
            with contextlib.suppress(ConnectionError):  # rejected before all of it was sent
                connection.request("POST", body.target, body=data, headers=body.headers or {})
            return str(connection.getresponse().status)
        finally:
            connection.close()
    except (ConnectionError, http.client.HTTPException):
        return "closed"


def sent_over_grpc(body: Body, data: bytes, server: Server) -> str:
    import grpc

    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        try:
            call: Any = channel.unary_unary
            call(body.target)(data, timeout=120)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def sent_raw(data: bytes, server: Server) -> str:
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=120) as connection:
        sender = threading.Thread(target=_send, args=(connection, data), daemon=True)
        sender.start()
        status = connection.recv(64 * 1024).decode("latin-1").split(" ")
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while connection.recv(MIB):
                pass
        return status[1] if len(status) > 1 else "closed"


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def main() -> None:
    """Prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="only bodies whose name contains this text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    rows, worst_s = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        from tests.predictors.fakes import write_artifact

        artifact = write_artifact(Path(folder) / "tiny")
        with printing_ports("benchmarks.service.hostile_bodies", "--serve", str(artifact)) as (
            process,
            ports,
        ):
            server = Server(process, *ports)
            for body in CORPUS:
                if options.only in body.name:
                    data = body.make()
                    status, wall_s, cpu_s, mib = attacked(body, data, server, options.rounds)
                    worst_s = max(worst_s, wall_s)
                    numbers = (f"{number:.0f}" for number in (1000 * wall_s, 1000 * cpu_s, mib))
                    rows.append((body.name, f"{len(data) / MIB:.1f}", status, *numbers))
    print(markdown_table(("body", "size, MiB", "status", "block, ms", "CPU, ms", "memory, MiB"), rows))
    print(f"\nlongest block: {1000 * worst_s:.0f} ms")


def attacked(body: Body, data: bytes, server: Server, rounds: int) -> tuple[str, float, float, float]:
    """Status, longest block (wall-clock and CPU seconds, minimum over the rounds), peak in MiB (maximum)."""
    status, wall_s, cpu_s, mib = "", math.inf, math.inf, 0.0
    for _ in range(rounds):
        before = server.stats()
        status = sent(body, data, server)
        time.sleep(0.1)
        stats = server.stats()
        wall_s, cpu_s = min(wall_s, stats["wall_s"]), min(cpu_s, stats["cpu_s"])
        mib = max(mib, stats["peak_mib"] - before["now_mib"])
    return status, wall_s, cpu_s, mib


if __name__ == "__main__":
    main()
