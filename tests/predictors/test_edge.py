"""The edge of the servers: no log or error page quotes a client, half-sent requests end, compressed bodies are refused; TLS and tokens."""

import asyncio
import contextlib
import io
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor, TlsSettings
from predictors.hosting.http import HttpRunner, read_body
from predictors.hosting.logs import RequestDataFilter, redacted_traceback
from predictors.hosting.process import PortFile
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.errors import UnauthenticatedError
from predictors.service.security import BearerTokens, Certificates
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.predictors.test_cli import PATIENCE_S, running

CANARY = "canary-4711"
SECRET = CANARY.encode()
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
PREDICT = "/tailcast.predictor.v1.Predictor/Predict"
TOKEN = "a-known-token"
AUTHORIZED = f"Authorization: Bearer {TOKEN}".encode()
REQUEST = PredictionRequest("r", "name three rivers", 1)


def chained() -> Exception:
    """An exception with a cause, a context, a note and members of a group, each with the canary."""
    try:
        try:
            try:
                raise UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY)
            except ValueError:
                raise KeyError(CANARY) from ExceptionGroup(CANARY, [SyntaxError(CANARY), OSError(CANARY)])
        except KeyError as error:
            raise RuntimeError(CANARY) from error
    except RuntimeError as error:
        error.add_note(CANARY)
        return error


def test_an_exception_that_causes_itself_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert redacted_traceback(first).count("Traceback") == 2


# Malformed HTTP put Authorization or the prompt into a traceback.
@pytest.mark.mend
async def test_no_record_holds_a_text_of_a_client(log: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    error = chained()
    logging.getLogger("aiohttp.server").error("Error handling request from %s", "::1", exc_info=error)
    logging.getLogger("any").warning("it broke: %s (%r)", error, error)
    logging.getLogger("any").warning(error)
    logging.getLogger("any").error("%s", ConnectionRefusedError(111, "Connection refused", CANARY))
    logging.getLogger("any").error("%s", TailcastError("artifact tiny: model.onnx is missing"))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(RuntimeError(CANARY))
    asyncio.get_running_loop().call_exception_handler(
        {"message": "Task exception was never retrieved", "exception": failed.exception(), "future": failed}
    )
    text = log.getvalue()
    assert CANARY not in text
    for line in ("Error handling request from ::1\n", "it broke: RuntimeError", "Task exception was never"):
        assert line in text
    # Errors of the system and of tailcast stay readable.
    assert "\nConnectionRefusedError: [Errno 111] Connection refused\nartifact tiny: model.onnx is" in text
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY not in str(record.__dict__)


async def echo(request: web.Request) -> web.Response:
    try:
        return web.Response(body=await read_body(request, timeout_s=0.05))
    except InputError as error:
        return web.Response(status=400, text=str(error))


@contextlib.asynccontextmanager
async def serving(keepalive_timeout: float) -> AsyncIterator[int]:
    application = web.Application(client_max_size=2**20)
    application.router.add_post("/", echo)
    runner = HttpRunner(application, keepalive_timeout=keepalive_timeout, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(60.0) as port:
        yield port


async def replies(port: int, *parts: bytes) -> bytes:
    """All that a connection gives, its parts sent one after another, until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def whole(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in (b"Connection: close", *headers))
    return HEAD + b"Content-Length: %d\r\n" % len(body) + lines + b"\r\n" + body


# Headers sent half held a connection for ever.
@pytest.mark.mend
async def test_half_a_head_ends() -> None:
    async with serving(0.05) as port:
        assert await replies(port, b"POST / HTTP/1.1\r\nX-Any: ", b"a") == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole(b"a").replace(b"close", b"keep-alive"))
        await reader.readuntil(b"\r\n\r\na")
        writer.write(b"GET ")
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


# Bodies sent half held a connection for ever.
@pytest.mark.mend
async def test_half_a_body_is_408(port: int) -> None:
    for half in (b"Content-Length: 10\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + half)
        found = await asyncio.wait_for(reader.readuntil(b" 0.05 s\n"), 60)
        assert found.startswith(b"HTTP/1.1 408 ")
        writer.close()


# A broken or huge compressed body was a 500.
@pytest.mark.mend
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"\xff" + SECRET])
async def test_compressed_bodies_are_refused_unread(port: int, encoding: bytes) -> None:
    page = await replies(port, whole(SECRET, b"Content-Encoding: " + encoding))
    assert page.startswith(b"HTTP/1.1 415 ")
    assert SECRET not in page


# aiohttp's page quoted the header, and bytes that are not UTF-8 were a 500 with a traceback.
@pytest.mark.mend
@pytest.mark.parametrize("value", [SECRET, b"\xff" + SECRET])
async def test_an_unknown_expectation_is_not_quoted(port: int, value: bytes) -> None:
    page = await replies(port, whole(b"", b"Expect: " + value))
    assert page.startswith(b"HTTP/1.1 417 ")
    assert SECRET not in page


def http_request(*headers: bytes, body: bytes = b"", path: bytes = b"/v1/predict") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    if not any(header.lower().startswith(b"transfer-encoding") for header in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


PROMPT = b'{"prompt": "' + SECRET + b'"'
HTTP = [
    SECRET + b"\r\n\r\n",
    b"POST /v1/predict?key=" + SECRET + b" HTTP/1\r\n\r\n",
    b"POST /v1/predict HTTP/1.1\r\nAuthorization Bearer " + SECRET + b"\r\n\r\n",
    http_request(b"Authorization: Bearer " + SECRET, body=PROMPT + b"}"),
    http_request(b"Authorization: Bearer \xff" + SECRET, body=PROMPT + b"}"),
    http_request(AUTHORIZED, b"Expect: " + SECRET),
    http_request(AUTHORIZED, b"traceparent: " + SECRET, body=PROMPT + b"}"),
    http_request(AUTHORIZED, b"Transfer-Encoding: chunked", body=SECRET + b"\r\n"),
    http_request(AUTHORIZED, b"Content-Encoding: gzip", body=b"\x1f\x8b" + SECRET),
    http_request(AUTHORIZED, b"Inference-Header-Content-Length: " + SECRET, path=b"/v2/models/tiny/infer"),
    http_request(AUTHORIZED, path=b"/v2/models/" + SECRET + b"/infer"),
    http_request(AUTHORIZED, body=SECRET * 2**19),
    http_request(AUTHORIZED, body=PROMPT),
    http_request(AUTHORIZED, body=PROMPT + b"\xff}"),
    http_request(AUTHORIZED, body=PROMPT + b', "max_tokens": "' + SECRET + b'"}'),
    http_request(AUTHORIZED, body=PROMPT + b', "served_model": "' + SECRET + b'"}'),
    http_request(AUTHORIZED, body=PROMPT + b', "' + SECRET + b'\\ud800": 1}'),
    http_request(AUTHORIZED, body=b'{"prompt": "crash ' + SECRET + b'"}'),
    http_request(AUTHORIZED, body=b'{"prompt": "nan ' + SECRET + b'"}'),
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


# Malformed HTTP put Authorization, API keys and prompts into the log.
@pytest.mark.mend
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_log_has_what_clients_sent(tmp_path: Path, artifact_folder: Path, log_format: str) -> None:
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


# One body sent half held the drain.
@pytest.mark.mend
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


class QuotingRuntime(fakes.GatedRuntime):
    """Its model calls fail, and quote a prompt in all the ways in which exceptions can."""

    def run(self, *arguments: Any, **options: Any) -> Any:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            error.add_note(CANARY)
            raise RuntimeError(f"cannot run {CANARY}") from error


# Errors of a batch quoted the prompts of other callers.
@pytest.mark.mend
@pytest.mark.parametrize("fault", ["model", "handler"])
async def test_unexpected_errors_quote_no_prompt_to_callers_or_the_log(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.handler.addFilter(RequestDataFilter())
    caplog.set_level(logging.DEBUG)
    runtime = QuotingRuntime(artifact_folder) if fault == "model" else fakes.GatedRuntime(artifact_folder)
    async with (
        fakes.server_and_stub(runtime, http_port=0) as (server, stub),
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
        error = await fakes.failure(stub.call("Predict", data))
        text += f"{error.details()} {error.trailing_metadata()}"
        text += str(
            await stub.PredictBatch(pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt=CANARY)]))
        )
    assert CANARY not in text
    assert ("the batch failed (RuntimeError)" in text) is (fault == "model")
    start = "a batch" if fault == "model" else "a request failed"
    failed = [record for record in caplog.records if record.getMessage().startswith(start)]
    assert failed
    assert all("Error" in str(record.exc_text) for record in failed)
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY not in str(record.__dict__)


def server_files(pki: Path, *, mutual: bool) -> dict[str, Any]:
    """Options of a server with a certificate."""
    files = {"tls_cert": str(pki / "ours-server.pem"), "tls_key": str(pki / "ours-server.key")}
    return files | ({"tls_client_ca": str(pki / "ours.pem")} if mutual else {})


def client_files(pki: Path, authority: str, name: str | None) -> TlsSettings:
    own = {} if name is None else {"certificate": str(pki / f"{name}.pem"), "key": str(pki / f"{name}.key")}
    return TlsSettings(ca=str(pki / f"{authority}.pem"), **own)


async def median_log(client: str, address: str, tls: TlsSettings | None) -> float:
    """The predicted mu of `REQUEST` by one of our clients."""
    settings = ClientSettings(tls=tls, max_attempts=1, timeout_s=60.0)
    if client == "blocking":
        with SyncPredictor(address, settings) as blocking:
            [response] = await asyncio.to_thread(blocking.responses, [REQUEST])
    else:
        async with GrpcPredictor(address, settings) as predictor:
            [response] = await predictor.responses([REQUEST])
    return response.mu


async def http_accepts(port: int | None, tls: TlsSettings | None) -> bool:
    """Whether the HTTP port answers a client with these certificates."""
    context: ssl.SSLContext | bool = True
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{'http' if tls is None else 'https'}://localhost:{port}/v1/predict",
                json={"prompt": "sea"},
                ssl=context,
            ) as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
async def test_certificates_decide_who_is_let_in(artifact_folder: Path, pki: Path, mutual: bool) -> None:
    options = server_files(pki, mutual=mutual) | {"http_port": 0}
    async with fakes.running_server(open_runtime(artifact_folder), **options) as (server, address):
        address = address.replace("127.0.0.1", "localhost")
        for authority, certificate, is_accepted in (
            ("ours", None, not mutual),
            ("ours", "ours-client", True),
            ("ours", "theirs-client", not mutual),
            ("theirs", "ours-client", False),
            (None, None, False),
        ):
            tls = None if authority is None else client_files(pki, authority, certificate)
            for client in ("calls", "blocking"):
                if is_accepted:
                    mu = await median_log(client, address, tls)
                    assert mu == pytest.approx(fakes.expected(REQUEST.prompt)[0], rel=1e-6)
                else:
                    with pytest.raises(PredictorError, match=address) as caught:
                        await median_log(client, address, tls)
                    assert caught.value.code == "UNAVAILABLE", (client, authority, certificate)
            assert await http_accepts(server.http_port, tls) is is_accepted, (authority, certificate)


@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_client_ca"])
def test_bad_files_of_a_server_are_named(tmp_path: Path, pki: Path, option: str) -> None:
    (tmp_path / "text").write_text("no PEM")
    for name in ("nothing", "text"):
        files = server_files(pki, mutual=True) | {option: str(tmp_path / name)}
        with pytest.raises(InputError, match=option):
            Certificates(fakes.serve_config(**files))


async def test_bad_files_of_a_client_are_named(pki: Path) -> None:
    key = str(pki / "ours-client.key")
    ca, client = TlsSettings(ca="nowhere.pem"), TlsSettings(certificate="nowhere.pem", key=key)
    for tls, name in ((ca, "tls ca: got .*nowhere"), (client, "tls certificate")):
        with pytest.raises(InputError, match=name):
            await median_log("calls", "localhost:1", tls)
    with pytest.raises(InputError, match="together with its key"):
        TlsSettings(certificate="client.pem")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "tokens"
    file.write_text("# known callers\nfirst\n\n  schl\u00fcssel  \n\ufffd\ufffd\n", encoding="utf-8")
    return str(file)


async def test_only_known_tokens_get_in_and_probes_need_none(artifact_folder: Path, token_file: str) -> None:
    options = {"token_file": token_file, "http_port": 0}
    async with (
        fakes.server_and_stub(open_runtime(artifact_folder), **options) as (server, stub),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        sea = pb.PredictRequest(prompt="sea")
        assert (await stub.Predict(sea, metadata=(("authorization", "Bearer first"),))).mu > 0
        reflection = reflection_pb2_grpc.ServerReflectionStub(stub.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        wrong = [(("authorization", header),) for header in ("Bearer third", "Basic first")]
        refused = [*(stub.Predict(sea, metadata=metadata) for metadata in (None, *wrong))]
        refused.append(reflection.read())
        for call in refused:
            assert (await fakes.failure(call)).code() == grpc.StatusCode.UNAUTHENTICATED
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for path, headers, status in (
            ("/v1/metadata", {"Authorization": "Bearer first"}, 200),
            ("/v1/metadata", {"Authorization": "Bearer third"}, 401),
            ("/metrics", {}, 401),
            *((probe, {}, 200) for probe in ("/healthz", "/readyz", "/v2/health/ready")),
        ):
            async with session.get(path, headers=headers) as response:
                assert response.status == status, path


def test_tokens_of_a_file(token_file: str) -> None:
    tokens = BearerTokens(token_file)
    for header in (b"Bearer first", "Bearer schl\u00fcssel", "Bearer schl\u00fcssel".encode()):
        tokens.check(header)
    unknown = [f"Bearer {token}" for token in ("# known callers", "", "\udcff")]
    for wrong in (*unknown, b"Bearer \xff", b"Bearer \xef\xbf\xbd", ""):
        with pytest.raises(UnauthenticatedError):
            tokens.check(wrong)
    Path(token_file).write_text("\n")
    with pytest.raises(InputError, match="token_file"):
        BearerTokens(token_file)


async def test_what_the_http_port_refuses_is_counted(artifact_folder: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKEN)
    large = (
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999\r\n"
        + AUTHORIZED
        + b"\r\n\r\n"
    )
    sent = [
        b"GET x y\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    ]
    sent += [HEAD + b"Connection: close\r\n\r\n", large + b"x" * 2**21]
    async with fakes.running_server(
        open_runtime(artifact_folder), token_file=str(token_file), http_port=0, max_message_mib=1
    ) as (server, _):
        assert server.http_port is not None
        for data in sent:
            with contextlib.suppress(ConnectionError):  # before all of the large body is sent
                await asyncio.to_thread(send_http, server.http_port, data)
        text = server.metrics.exposition().decode()
    for code, count in (("HTTP_400", 2), ("HTTP_413", 1), ("UNAUTHENTICATED", 1)):
        assert f'tailcast_requests_total{{artifact="tiny",code="{code}",method="HTTP"}} {count}.0' in text


# A file of the user at --port_file was removed at the start.
@pytest.mark.mend
@pytest.mark.parametrize("content", [b"years of work", b"1 2 3 x", b"50051\n" * 20, b"\xff"])
def test_a_port_file_replaces_only_a_port_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ports"
    path.write_bytes(content)
    with pytest.raises(InputError, match="port_file: got .*ports'; allowed: a new file, or the port file of"):
        PortFile(str(path))
    assert path.read_bytes() == content
    for earlier in (b"", b"50051\n", b"8100\n9090\n"):
        path.write_bytes(earlier)
        PortFile(str(path)).write(1, None, 2)
        assert path.read_text() == "1\n2\n"
