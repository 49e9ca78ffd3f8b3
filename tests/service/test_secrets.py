"""What clients send - tokens, headers, prompts - reaches no log, whatever goes wrong with it."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from predictors.edge import RequestDataFilter
from predictors.proto import predictor_v1_pb2 as pb
from tests.predictors.fakes import GatedRuntime, failure, running_server
from tests.predictors.test_cli import PATIENCE_S, running

CANARY = "canary-4711"
PREDICT = "/tailcast.predictor.v1.Predictor/Predict"
TOKEN = "a-known-token"
AUTHORIZED = f"Authorization: Bearer {TOKEN}".encode()
SECRET = CANARY.encode()


def http_request(*headers: bytes, body: bytes = b"", path: bytes = b"/v1/predict") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    if not any(header.lower().startswith(b"transfer-encoding") for header in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


PROMPT = b'{"prompt": "' + SECRET + b'"'
HEAD = b"POST /v1/predict HTTP/1.1\r\n"
HTTP = [
    SECRET + b"\r\n\r\n",
    b"POST /v1/predict?key=" + SECRET + b" HTTP/1\r\n\r\n",
    HEAD + b"Authorization Bearer " + SECRET + b"\r\n\r\n",
    http_request(b"Authorization: Bearer " + SECRET, body=PROMPT + b"}"),
    http_request(b"Authorization: Bearer \xff" + SECRET, body=PROMPT + b"}"),
    http_request(AUTHORIZED, b"Expect: " + SECRET),
    http_request(AUTHORIZED, b"traceparent: " + SECRET, body=PROMPT + b"}"),
    http_request(AUTHORIZED, b"Transfer-Encoding: chunked", body=SECRET + b"\r\n"),
    http_request(AUTHORIZED, b"Content-Encoding: gzip", body=b"\x1f\x8b" + SECRET),
    http_request(AUTHORIZED, b"Inference-Header-Content-Length: " + SECRET, path=b"/v2/models/tiny/infer"),
    http_request(AUTHORIZED, path=b"/v2/models/" + SECRET + b"/infer"),
    http_request(AUTHORIZED, body=SECRET * 2**19),
    *(
        http_request(AUTHORIZED, body=body)
        for body in (
            PROMPT,
            PROMPT + b"\xff}",
            PROMPT + b', "max_tokens": "' + SECRET + b'"}',
            PROMPT + b', "served_model": "' + SECRET + b'"}',
            PROMPT + b', "' + SECRET + b'\\ud800": 1}',
            b'{"prompt": "crash ' + SECRET + b'"}',
            b'{"prompt": "nan ' + SECRET + b'"}',
        )
    ),
]
METADATA = [("authorization", f"Bearer {TOKEN}")]
GRPC: list[tuple[bytes, list[tuple[str, Any]]]] = [
    (pb.PredictRequest(prompt=CANARY).SerializeToString(), [("authorization", f"Bearer {CANARY}")]),
    (pb.PredictRequest(prompt=CANARY).SerializeToString(), [("x-any-bin", SECRET), ("traceparent", CANARY)]),
    (b"\x12\xff" + SECRET, METADATA),
    (b"\x12\x0c\xff" + SECRET, METADATA),
    (pb.PredictRequest(prompt=f"crash {CANARY}").SerializeToString(), METADATA),
    (pb.PredictRequest(prompt=f"nan {CANARY}").SerializeToString(), METADATA),
    (pb.PredictRequest(prompt=CANARY * 2**19).SerializeToString(), METADATA),
]


def send_http(port: int, data: bytes) -> bytes:
    """The first bytes of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        return connection.recv(2**16)


def send_grpc(channel: grpc.Channel, data: bytes, metadata: list[tuple[str, Any]]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(PREDICT)(data, metadata=metadata, timeout=PATIENCE_S)
    return str(caught.value.code().name)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_servers_log_has_nothing_of_what_clients_sent(
    tmp_path: Path, artifact_folder: Path, log_format: str
) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    options = (f"--token_file={tmp_path / 'tokens'}", f"--log_format={log_format}")
    with running(tmp_path, artifact_folder, *options) as server:
        port, http_port = server.ports()
        statuses = {send_http(http_port, data).split()[1] for data in HTTP}
        assert statuses >= {b"200", b"400", b"401", b"404", b"413", b"417", b"500"}
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            codes = {send_grpc(channel, *call) for call in GRPC}
        assert codes == {"UNAUTHENTICATED", "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED"}
        assert server.stop() == 0
        assert "Traceback" in server.log  # of the model's failures
        assert CANARY not in server.log
        assert TOKEN not in server.log


def test_half_a_request_does_not_hold_a_drain(tmp_path: Path, artifact_folder: Path) -> None:
    with running(tmp_path, artifact_folder, "--drain_timeout_s=3600") as server:
        port, http_port = server.ports()
        head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\n"
        bodies = [b"Content-Length: 100\r\n\r\n{", b"Expect: 100-continue\r\n\r\n"]
        bodies.append(b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")
        halves = [(http_port, b"POST /v1/"), *((http_port, head + body) for body in bodies)]
        halves.append((port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0"))
        connections = [socket.create_connection(("127.0.0.1", number)) for number, _ in halves]
        for connection, (_, half) in zip(connections, halves, strict=True):
            connection.sendall(half)
        assert send_http(http_port, http_request(body=b'{"prompt": "sea"}')).startswith(b"HTTP/1.1 200")
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.log
        for connection in connections:
            connection.close()


class QuotingRuntime(GatedRuntime):
    """Its model calls fail, and quote a prompt in all the ways in which exceptions can."""

    def run(self, *arguments: Any, **options: Any) -> Any:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            error.add_note(CANARY)
            raise RuntimeError(f"cannot run {CANARY}") from error


@pytest.mark.parametrize("fault", ["model", "handler"])
async def test_unexpected_errors_quote_no_prompt_to_callers_or_the_log(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.handler.addFilter(RequestDataFilter())
    caplog.set_level(logging.DEBUG)
    runtime = QuotingRuntime(artifact_folder) if fault == "model" else GatedRuntime(artifact_folder)
    async with (
        running_server(runtime, http_port=0) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):

        def read(request: pb.PredictRequest) -> None:
            raise ValueError(f"cannot read {request.prompt}")

        if fault == "handler":
            monkeypatch.setattr(server.artifacts.default.reader, "read", read)
        async with session.post("/v1/predict", json={"prompt": CANARY}) as response:
            assert response.status == 500
            text = await response.text()
        data = pb.PredictRequest(prompt=CANARY).SerializeToString()
        error = await failure(channel.unary_unary(PREDICT)(data))
        text += f"{error.details()} {error.trailing_metadata()}"
        stream = channel.stream_stream(PREDICT + "Stream")(iter([data]))
        text += str([outcome async for outcome in stream])
    assert CANARY not in text
    assert ("the batch failed (RuntimeError)" in text) is (fault == "model")
    start = "a batch" if fault == "model" else "a request failed"
    failed = [record for record in caplog.records if record.getMessage().startswith(start)]
    assert failed
    assert all("Error" in str(record.exc_text) for record in failed)
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY not in str(record.__dict__)
