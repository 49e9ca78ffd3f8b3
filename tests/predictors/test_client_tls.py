"""Our clients with real certificates: an encrypted server, one that asks clients for theirs, and those they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor, TlsSettings
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, write_artifact
from tests.predictors.test_workers import running

trustme = pytest.importorskip("trustme")

REQUEST = PredictionRequest("r", "name three rivers", 1)
ONE_TRY: dict[str, Any] = {"max_attempts": 1}


@dataclass(frozen=True)
class Authorities:
    """PEM files: two authorities, and certificates that the first and the second have signed."""

    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def client(self, authority: str, certificate: str | None) -> TlsSettings:
        own = (
            {}
            if certificate is None
            else {"certificate": self.file(certificate), "key": self.file(f"{certificate}-key")}
        )
        return TlsSettings(ca=self.file(authority), **own)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    found = Authorities(tmp_path_factory.mktemp("authorities"))
    for authority in ("ours", "theirs"):
        made = trustme.CA()
        made.cert_pem.write_to_path(found.file(authority))
        for name, host in (("server", "localhost"), ("client", "a.client"), ("elsewhere", "other.host")):
            certificate = made.issue_cert(host)
            certificate.private_key_pem.write_to_path(found.file(f"{authority}-{name}-key"))
            for pem in certificate.cert_chain_pems:
                pem.write_to_path(found.file(f"{authority}-{name}"), append=True)
    return found


def server_options(authorities: Authorities, *, mutual: bool) -> list[str]:
    options = [
        "--host=localhost",
        f"--tls_cert={authorities.file('ours-server')}",
        f"--tls_key={authorities.file('ours-server-key')}",
    ]
    return options + ([f"--tls_client_ca={authorities.file('ours')}"] if mutual else [])


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def server(
    request: pytest.FixtureRequest, authorities: Authorities, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, bool]]:
    """Address of a `serve-predictor` with certificates, and whether it asks clients for theirs."""
    folder = tmp_path_factory.mktemp("served")
    options = server_options(authorities, mutual=request.param)
    with running(folder, write_artifact(folder / "tiny"), *options) as process:
        yield f"localhost:{process.ports()[0]}", request.param
        assert process.stop() == 0


async def asynchronous(address: str, settings: ClientSettings) -> float | None:
    async with GrpcPredictor(address, settings) as predictor:
        return (await predictor.predict([REQUEST]))[0].mu


async def blocking(address: str, settings: ClientSettings) -> float | None:
    def ask() -> float | None:
        with SyncPredictor(address, settings) as predictor:
            return predictor.predict([REQUEST])[0].mu

    return await asyncio.to_thread(ask)


CLIENTS = pytest.mark.parametrize(
    ("ask", "transport"),
    [(asynchronous, "calls"), (asynchronous, "stream"), (blocking, "calls")],
    ids=["calls", "stream", "blocking"],
)


@CLIENTS
@pytest.mark.parametrize(
    ("authority", "certificate", "accepted"),
    [
        ("ours", None, "unless mutual"),
        ("ours", "ours-client", "always"),
        ("ours", "theirs-client", "unless mutual"),
        ("theirs", "ours-client", "never"),
        (None, "ours-client", "never"),
    ],
    ids=["no certificate", "right", "certificate of another authority", "another authority", "no TLS"],
)
async def test_who_is_let_in(
    server: tuple[str, bool],
    authorities: Authorities,
    ask: Any,
    transport: Any,
    authority: str | None,
    certificate: str | None,
    accepted: str,
) -> None:
    address, mutual = server
    tls = None if authority is None else authorities.client(authority, certificate)
    settings = ClientSettings(tls=tls, transport=transport, **ONE_TRY, timeout_s=60.0)
    if accepted == "always" or (accepted == "unless mutual" and not mutual):
        assert await ask(address, settings) == pytest.approx(expected(REQUEST.prompt)[0], rel=1e-6)
    else:
        with pytest.raises(PredictorError) as caught:
            await ask(address, settings)
        assert caught.value.code == "UNAVAILABLE"
        assert address in str(caught.value)


async def test_a_certificate_of_another_host_is_refused(authorities: Authorities, tmp_path: Path) -> None:
    options = [
        "--host=localhost",
        f"--tls_cert={authorities.file('ours-elsewhere')}",
        f"--tls_key={authorities.file('ours-elsewhere-key')}",
    ]
    with running(tmp_path, write_artifact(tmp_path / "tiny"), *options) as process:
        address = f"localhost:{process.ports()[0]}"
        settings = ClientSettings(tls=authorities.client("ours", None), **ONE_TRY, timeout_s=60.0)
        with pytest.raises(PredictorError) as caught:
            await asynchronous(address, settings)
        assert caught.value.code == "UNAVAILABLE"


async def test_files_that_cannot_be_read_are_named(authorities: Authorities) -> None:
    for tls, name in (
        (TlsSettings(ca="nowhere.pem"), "tls ca"),
        (TlsSettings(certificate="nowhere.pem", key=authorities.file("ours-client-key")), "tls certificate"),
    ):
        with pytest.raises(InputError, match=name):
            await asynchronous("localhost:1", ClientSettings(tls=tls, **ONE_TRY))
