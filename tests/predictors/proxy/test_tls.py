"""TLS to clients and engines over real sockets, and certificates that SIGHUP reads again."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from scheduler_core.errors import InputError
from tests.predictors.proxy.fake_engine import (
    CHAT,
    RunningProxy,
    chat,
    gated,
    paused,
    running_engine,
    running_proxy,
    stream_events,
    until,
)
from tests.predictors.proxy.test_signals import ROOT, config_of

TLS_ERRORS = (aiohttp.ClientError, ConnectionError, ssl.SSLError)


def files(folder: Path, authority: str = "ours", *, mutual: bool = False) -> dict[str, Any]:
    """Options of a server with a certificate of `authority`."""
    options = {
        name: str(folder / f"{authority}-server.{end}")
        for name, end in (("tls_cert", "pem"), ("tls_key", "key"))
    }
    return options | ({"tls_client_ca": str(folder / "ours.pem")} if mutual else {})


def trusting(pki: Path, authority: str, own: str | None = None) -> ssl.SSLContext:
    """The context of a client that trusts `authority`, and has the certificate `own`."""
    context = ssl.create_default_context(cafile=str(pki / f"{authority}.pem"))
    if own is not None:
        context.load_cert_chain(pki / f"{own}-client.pem", pki / f"{own}-client.key")
    return context


async def get(proxy: RunningProxy, context: ssl.SSLContext, path: str = "/v1/models") -> int | None:
    """Status of a request on a new connection; None if there is none."""
    base = proxy.admin if path in ("/readyz", "/metrics") else proxy.url
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client,
            client.get(base + path) as response,
        ):
            return response.status
    except TLS_ERRORS:
        return None


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
async def test_both_ports_have_tls_and_clients_may_need_certificates(pki: Path, mutual: bool) -> None:
    async with running_engine() as fake, running_proxy(fake.url, **files(pki, mutual=mutual)) as proxy:
        for authority, own, accepted in (
            ("ours", None, not mutual),
            ("ours", "ours", True),
            ("ours", "theirs", not mutual),
            ("theirs", None, False),
        ):
            status = await get(proxy, trusting(pki, authority, own))
            assert status == (200 if accepted else None), (authority, own)
        probe = trusting(pki, "ours")  # a probe has no certificate
        assert await get(proxy, probe, "/readyz") == await get(proxy, probe, "/metrics") == 200
        for url in (proxy.url, proxy.admin):
            with pytest.raises(aiohttp.ClientError):
                await proxy.client.get(url.replace("https:", "http:"))


async def test_engines_with_tls_are_verified_by_the_file(pki: Path, tmp_path: Path) -> None:
    """The engine with TLS is a second proxy."""
    authority = tmp_path / "ca.pem"
    shutil.copy(pki / "theirs.pem", authority)
    async with (
        running_engine() as fake,
        running_proxy(fake.url, **files(pki)) as engine,
        running_proxy(engine.url, engine_ca=str(authority)) as proxy,
        running_proxy(engine.url) as other,
    ):
        assert (await other.post(chat("x")))[0] == 502  # not a CA of the system
        assert (await proxy.post(chat("x")))[0] == 502
        assert await proxy.metric("tailcast_proxy_engine_up") == 0
        shutil.copy(pki / "ours.pem", authority)
        await proxy.server.reload(proxy.server.handler.config)
        status, body = await proxy.post(chat("x", stream=True))
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == 200
        authority.write_text("nothing")
        with pytest.raises(InputError, match="engine_ca: got .*ca.pem'; allowed: a PEM certificate"):
            await proxy.server.reload(proxy.server.handler.config)
        assert (await proxy.post(chat("x")))[0] == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls_cert": "none"}, "tls_cert: got .*none'; allowed: the path of an existing file"),
        ({"tls_key": "none"}, "tls_key: got .*none'; allowed: the path of an existing file"),
        (
            {"tls_key": "theirs-server.key"},
            "tls_key: got .*theirs-server.key'; allowed: the PEM private key of",
        ),
        (
            {"tls_key": "locked.key"},
            "tls_key: got .*locked.key'; allowed: a private key without a passphrase",
        ),
        ({"tls_client_ca": "ours-server.key"}, "tls_client_ca: got .*key'; allowed: a PEM certificate"),
        ({"tls_key": None}, "tls_cert, tls_key: got .*ours-server.pem'; allowed: both or none"),
        (
            {"engine_ca": "ours.pem"},
            "engine_ca: got .*ours.pem'; allowed: none without an engine at https://",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_wrong_files_are_named(
    pki: Path, tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    for path in pki.iterdir():
        shutil.copy(path, tmp_path)
    key = serialization.load_pem_private_key((pki / "ours-server.key").read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))
    )
    options = files(tmp_path, mutual=True)
    options |= {name: value and str(tmp_path / value) for name, value in changes.items()}
    with pytest.raises(InputError, match=message):
        server = ProxyServer(
            ProxyConfig(engine_url="http://127.0.0.1:1", port=0, predictor="none", **options)
        )
        await server.start()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
async def test_a_client_of_a_removed_ca_cannot_resume_its_session(
    pki: Path, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """A session that is resumed is not verified again."""
    shutil.copytree(pki, tmp_path, dirs_exist_ok=True)
    context = trusting(pki, "ours", "ours")
    context.maximum_version = version

    async with running_engine() as fake, running_proxy(fake.url, **files(tmp_path, mutual=True)) as proxy:
        port = int(proxy.url.rpartition(":")[2])

        def connect(session: ssl.SSLSession | None) -> tuple[bool, bool, ssl.SSLSession | None]:
            """Whether there is a response, whether the session was resumed, and a session to resume."""
            with (
                contextlib.suppress(*TLS_ERRORS),
                socket.create_connection(("127.0.0.1", port), 10.0) as plain,
                context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
            ):
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                is_served = connection.recv(2**16).startswith(b"HTTP/1.1 200")
                return is_served, bool(connection.session_reused), connection.session
            return False, False, None

        is_served, _, session = await asyncio.to_thread(connect, None)
        assert is_served
        assert (await asyncio.to_thread(connect, session))[:2] == (True, True)
        shutil.copy(pki / "theirs.pem", tmp_path / "ours.pem")
        await proxy.server.reload(proxy.server.handler.config)
        assert not (await asyncio.to_thread(connect, session))[0]


async def test_tls_is_turned_on_and_off_by_a_restart(pki: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_engine() as fake:
        for options in ({}, files(pki)):
            async with running_proxy(fake.url, **options) as proxy:
                other = files(pki) if not options else dict.fromkeys(options)
                await proxy.server.reload(config_of(proxy.server, **other, access_log=True))
                assert caplog.messages[-1] == "these options need a restart: tls_cert, tls_key"
                async with proxy.client.post(
                    proxy.url + CHAT, json=chat("x"), ssl=trusting(pki, "ours")
                ) as response:
                    assert response.status == 200
                assert proxy.server.handler.config.access_log


async def test_certificates_that_change_are_read_again(pki: Path, tmp_path: Path) -> None:
    mount(tmp_path, "ours", pki, "1")
    options = {
        "tls_cert": str(tmp_path / "tls.crt"),
        "tls_key": str(tmp_path / "tls.key"),
        "reload_poll_s": 0.01,
    }
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        num_reloads = 0

        async def reload() -> None:
            nonlocal num_reloads
            num_reloads += 1
            await proxy.server.reload(proxy.server.handler.config)

        proxy.server.reload_on_changes(reload)
        port = int(proxy.url.rpartition(":")[2])
        mount(tmp_path, "theirs", pki, "2")

        async def is_replaced() -> bool:
            return await presented(port) == serial(pki, "theirs")

        await until(is_replaced)
        assert 1 <= num_reloads <= 2  # twice, if one of the files was seen before the other


# SIGHUP, of a process with uvloop.


def mount(folder: Path, authority: str, pki: Path, version: str) -> None:
    """Swaps the content of a folder as Kubernetes does: by a link to a folder of the version."""
    content = folder / f"..{version}"
    content.mkdir(parents=True)
    shutil.copy(pki / f"{authority}-server.pem", content / "tls.crt")
    shutil.copy(pki / f"{authority}-server.key", content / "tls.key")
    (folder / "..new").symlink_to(content.name)
    before = (folder / "..data").resolve() if (folder / "..data").exists() else None
    os.replace(folder / "..new", folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    if before is not None:
        shutil.rmtree(before)


async def presented(port: int) -> int:
    """Serial number of the certificate of a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return x509.load_der_x509_certificate(
            writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        ).serial_number
    finally:
        writer.close()
        await writer.wait_closed()


def serial(pki: Path, authority: str) -> int:
    return x509.load_pem_x509_certificate((pki / f"{authority}-server.pem").read_bytes()).serial_number


class Process:
    """A running `tailcast-proxy`, and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def logged(self, text: str) -> str:
        """The next line with this text."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(self.lines)

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)


@contextlib.asynccontextmanager
async def running_process(options: Path, url: str) -> AsyncIterator[Process]:
    """Runs the command until the end of the block, and asserts that it ends with 0 on SIGTERM, unless it was killed."""
    words = [sys.executable, "-m", "predictors.commands.tailcast_proxy", url, "--config", str(options)]
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        running = Process(process)
        await running.logged("ready on")
        yield running
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await running.logged("stopped")
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sighup_replaces_certificates_and_drops_nothing(pki: Path, tmp_path: Path) -> None:
    go = asyncio.Event()
    events = stream_events(["a", "b"], None)
    stream = paused(events, go)

    async def script(request: aiohttp.web.Request, body: bytes) -> aiohttp.web.StreamResponse:
        return await (stream if json.loads(body).get("stream") else gated(go))(request, body)

    folder, ports, options = tmp_path / "tls", tmp_path / "ports", tmp_path / "options.yaml"
    mount(folder, "ours", pki, "1")
    content: dict[str, Any] = {"predictor": "none", "release": 1, "port": 0, "admin_port": 0}
    content |= {"port_file": str(ports), "engine_probe_s": 0.0}
    content |= {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}
    options.write_text(json.dumps(content))
    ours, theirs = trusting(pki, "ours"), trusting(pki, "theirs")
    async with (
        asyncio.timeout(120),
        running_engine(script) as fake,
        running_process(options, fake.url) as proxy,
        aiohttp.ClientSession() as client,
    ):
        port, admin = map(int, ports.read_text().split())
        url = f"https://localhost:{port}{CHAT}"

        async def reloads(outcome: str, context: ssl.SSLContext) -> float:
            async with client.get(f"https://localhost:{admin}/metrics", ssl=context) as response:
                [line] = [
                    line
                    for line in (await response.text()).splitlines()
                    if line.startswith(f'tailcast_proxy_reloads_total{{outcome="{outcome}"}}')
                ]
                return float(line.split()[-1])

        async def post() -> int:
            async with client.post(url, json=chat("x"), ssl=ours) as response:
                await response.read()
                return response.status

        async with client.post(url, json=chat("x", stream=True), ssl=ours) as response:
            assert await response.content.readany() == events[0]
            waiting = asyncio.create_task(post())  # behind the stream, in the queue of the proxy
            assert await presented(port) == serial(pki, "ours")
            mount(folder, "theirs", pki, "2")
            proxy.reload()
            assert str(folder / "tls.crt") in await proxy.logged("reloaded:")
            assert await presented(port) == await presented(admin) == serial(pki, "theirs")
            (folder / "..data" / "tls.key").write_text("nothing")
            options.write_text(json.dumps(content | {"max_waiting": 1}))
            proxy.reload()
            refused = await proxy.logged("the reload failed, everything stays as it was")
            assert f"tls_key: got '{folder}/tls.key'; allowed: the PEM private key of tls_cert" in refused
            assert await presented(port) == serial(pki, "theirs")
            assert await reloads("applied", theirs) == await reloads("refused", theirs) == 1
            go.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await waiting == 200


async def test_no_connection_is_refused_while_certificates_are_replaced(pki: Path, tmp_path: Path) -> None:
    folder, ports, options = tmp_path / "tls", tmp_path / "ports", tmp_path / "options.yaml"
    mount(folder, "ours", pki, "0")
    content: dict[str, Any] = {"predictor": "none", "port": 0, "port_file": str(ports)}
    content |= {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}
    options.write_text(json.dumps(content))
    async with (
        asyncio.timeout(120),
        running_engine() as fake,
        running_process(options, fake.url) as proxy,
    ):
        [port] = map(int, ports.read_text().split())
        serials: list[int] = []
        is_over = False

        async def connect() -> None:
            while not is_over:
                serials.append(await presented(port))

        clients = [asyncio.create_task(connect()) for _ in range(4)]
        for version in range(1, 6):
            num = len(serials)
            mount(folder, ("ours", "theirs")[version % 2], pki, str(version))
            proxy.reload()
            await proxy.logged("reloaded:")
            await until(lambda num=num: len(serials) > num + 8)
        is_over = True
        await asyncio.gather(*clients)  # raises if a connection was refused or broken
        assert {serial(pki, "ours"), serial(pki, "theirs")} == set(serials)
