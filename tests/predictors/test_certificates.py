"""Certificates and tokens of the prediction service that are replaced while it serves, by real calls over gRPC and HTTP."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from predictors.client import ClientSettings, GrpcPredictor, PredictorError, TlsSettings
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.security import Certificates
from predictors.service.server import PredictionServer
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.predictors.proxy.test_tls import TLS_ERRORS, mount, presented, serial, trusting
from tests.waiting import until

REQUEST = PredictionRequest("r", "the sea", 100, "tiny-llm")
#: Start of HTTP/2: the preface of a client and its empty settings; a server then sends its settings (type 4).
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def mounted(folder: Path) -> dict[str, Any]:
    return {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


def client_of(address: str, pki: Path, authority: str) -> GrpcPredictor:
    tls = TlsSettings(ca=str(pki / f"{authority}.pem"))
    return GrpcPredictor(
        address.replace("127.0.0.1", "localhost"), ClientSettings(tls=tls, max_attempts=1, timeout_s=60.0)
    )


def counted(server: PredictionServer, outcome: str, kind: str = "certificate") -> float:
    lines = server.metrics.exposition().decode().splitlines()
    start = f'tailcast_{kind}_reloads_total{{outcome="{outcome}"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


@pytest.mark.parametrize("poll_s", [0.0, 0.01], ids=["sighup", "files"])
async def test_new_connections_have_the_new_certificate_and_open_ones_go_on(
    artifact_folder: Path, pki: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, poll_s: float
) -> None:
    caplog.set_level(logging.INFO)
    mount(tmp_path, "ours", pki, "1")
    runtime = fakes.GatedRuntime(artifact_folder)
    options = mounted(tmp_path) | {"http_port": 0, "reload_poll_s": poll_s}

    async def replaced(change: Callable[[], object], text: str) -> None:
        num = caplog.text.count(text)
        change()
        if not poll_s:
            await server.reload()  # what SIGHUP calls
        await until(lambda: caplog.text.count(text) == num + 1)

    async with (
        fakes.running_server(runtime, **options) as (server, address),
        client_of(address, pki, "ours") as before,
        client_of(address, pki, "theirs") as after,
        aiohttp.ClientSession() as session,
    ):
        port, http_port = int(address.rpartition(":")[2]), server.http_port
        assert http_port is not None
        url = f"https://localhost:{http_port}/readyz"
        ours = trusting(pki, "ours")
        await before.predict([REQUEST])
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            await after.predict([REQUEST])
        async with session.get(url, ssl=ours) as response:
            assert response.status == 200
        runtime.gate.clear()
        in_flight = asyncio.create_task(before.predict([REQUEST]))
        await until(lambda: server.num_in_flight == 1)
        await replaced(lambda: mount(tmp_path, "theirs", pki, "2"), "certificates: read again")
        for each in (port, http_port):  # the gRPC port has four listeners
            assert {await presented(each) for _ in range(16)} == {serial(pki, "theirs")}
        runtime.gate.set()
        assert len(await in_flight) == len(await before.predict([REQUEST])) == 1
        await until(lambda: _accepts(after))
        async with session.get(url, ssl=ours) as response:  # on the open connection
            assert response.status == 200

        key = tmp_path / "..data" / "tls.key"
        await replaced(lambda: key.write_text("nothing"), "certificates: rejected the new files")
        assert "tls_key: got" in caplog.text
        assert {await presented(port), await presented(http_port)} == {serial(pki, "theirs")}
        assert (counted(server, "taken"), counted(server, "refused")) == (1, 1)
        await replaced(lambda: shutil.copy(pki / "theirs-server.key", key), "certificates: read again")
        assert await presented(port) == serial(pki, "theirs")
        assert (counted(server, "taken"), counted(server, "refused")) == (2, 1)
    assert caplog.text.count("certificates: rejected") == 1


async def _accepts(client: GrpcPredictor) -> bool:
    """Whether a client whose connections were refused before is let in."""
    with contextlib.suppress(PredictorError):
        return len(await client.predict([REQUEST])) == 1
    return False


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
async def test_a_removed_client_ca_is_gone_at_once(
    artifact_folder: Path, pki: Path, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Also for a client that resumes its session, which is not verified again."""
    mount(tmp_path, "ours", pki, "1")
    authority = tmp_path / "clients.pem"
    shutil.copy(pki / "ours.pem", authority)
    options = mounted(tmp_path) | {"tls_client_ca": str(authority)}
    contexts = {name: trusting(pki, "ours", name) for name in ("ours", "theirs")}
    for context in contexts.values():
        context.maximum_version = version
        context.set_alpn_protocols(["h2"])

    async with fakes.running_server(open_runtime(artifact_folder), **options) as (server, address):
        port = int(address.rpartition(":")[2])

        def connect(name: str, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
            """Whether the server speaks HTTP/2 with a client, and the session to resume."""
            with (
                contextlib.suppress(*TLS_ERRORS),
                socket.create_connection(("127.0.0.1", port), 10.0) as plain,
                contexts[name].wrap_socket(plain, server_hostname="localhost", session=session) as connection,
            ):
                connection.sendall(HELLO)
                return connection.recv(9)[3:4] == b"\x04", connection.session
            return False, None

        is_served, session = await asyncio.to_thread(connect, "ours", None)
        assert is_served
        assert session is not None
        assert not (await asyncio.to_thread(connect, "theirs", None))[0]
        shutil.copy(pki / "theirs.pem", authority)
        await server.reload()
        assert not (await asyncio.to_thread(connect, "ours", session))[0]
        assert not (await asyncio.to_thread(connect, "ours", None))[0]
        assert (await asyncio.to_thread(connect, "theirs", None))[0]


def test_files_that_change_while_they_are_read_are_not_used(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate without its key would make gRPC refuse every connection."""
    from predictors.service import security

    mount(tmp_path, "ours", pki, "1")
    certificates = Certificates(fakes.serve_config(**mounted(tmp_path)))
    assert certificates.http is not None
    context = certificates.http.current
    original = security.server_context

    def slow(config: Any) -> ssl.SSLContext | None:
        result = original(config)
        mount(tmp_path, "theirs", pki, "2")
        return result

    monkeypatch.setattr(security, "server_context", slow)
    with pytest.raises(InputError, match="files that do not change while they are read"):
        certificates.reload()
    assert certificates.http.current is context
    assert certificates.have_changed
    monkeypatch.undo()
    certificates.reload()
    assert certificates.http.current is not context
    assert not certificates.have_changed


# A token that was removed from its file was accepted until a restart.
@pytest.mark.mend
@pytest.mark.parametrize("poll_s", [0.0, 0.01], ids=["sighup", "files"])
async def test_a_removed_token_is_refused_for_new_calls(
    artifact_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, poll_s: float
) -> None:
    """On open connections too; a file without a token keeps the old ones."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "tokens"
    file.write_text("first\n")
    options = {"token_file": str(file), "http_port": 0, "reload_poll_s": poll_s}

    async def replaced(content: bytes | None, text: str) -> None:
        num = caplog.text.count(text)
        if content is None:
            file.unlink()
        else:
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(file)
        if not poll_s:
            await server.reload()
        await until(lambda: caplog.text.count(text) == num + 1)

    async def accepted(token: str) -> bool:
        header = f"Bearer {token}"
        async with session.get("/v1/metadata", headers={"Authorization": header}) as response:
            over_http = response.status == 200
        call = stub.Predict(pb.PredictRequest(prompt="sea"), metadata=(("authorization", header),))
        over_grpc = {grpc.StatusCode.OK: True, grpc.StatusCode.UNAUTHENTICATED: False}[await call.code()]
        assert over_grpc is over_http
        return over_http

    async with (
        fakes.server_and_stub(open_runtime(artifact_folder), **options) as (server, stub),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        assert (await accepted("first"), await accepted("second")) == (True, False)
        await replaced(b"first\nsecond\n", "tokens: read again")
        assert (await accepted("first"), await accepted("second")) == (True, True)
        await replaced(b"second\n", "tokens: read again")
        assert (await accepted("first"), await accepted("second")) == (False, True)
        for content in (b"", b"# none\n", b"\xff\xfe", None):
            await replaced(content, "tokens: rejected the new files, kept the old ones: token_file")
            assert (await accepted("first"), await accepted("second")) == (False, True)
        assert (counted(server, "taken", "token"), counted(server, "refused", "token")) == (2, 4)
    assert "second" not in caplog.text
