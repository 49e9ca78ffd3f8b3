"""TLS, mutual TLS and bearer tokens: a server's two ports, our clients and others'."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor, TlsSettings
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.errors import UnauthenticatedError
from predictors.service.security import BearerTokens, grpc_credentials
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, failure, running_server, serve_config, server_and_stub

trustme = pytest.importorskip("trustme")

REQUEST = PredictionRequest("r", "name three rivers", 1)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEM files: authorities "ours" and "theirs", and certificates that they have signed."""
    folder = tmp_path_factory.mktemp("pki")
    for authority in ("ours", "theirs"):
        issuer = trustme.CA()
        issuer.cert_pem.write_to_path(str(folder / f"{authority}.pem"))
        for name, host in (("server", "localhost"), ("client", "a.client")):
            certificate = issuer.issue_cert(host)
            certificate.private_key_pem.write_to_path(str(folder / f"{authority}-{name}.key"))
            for pem in certificate.cert_chain_pems:
                pem.write_to_path(str(folder / f"{authority}-{name}.pem"), append=True)
    return folder


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
    options = server_files(pki, mutual=mutual)
    async with running_server(open_runtime(artifact_folder), http_port=0, **options) as (server, address):
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
                    assert mu == pytest.approx(expected(REQUEST.prompt)[0], rel=1e-6)
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
            grpc_credentials(serve_config(**files))


async def test_bad_files_of_a_client_are_named(pki: Path) -> None:
    key = str(pki / "ours-client.key")
    for tls, name in (
        (TlsSettings(ca="nowhere.pem"), "tls ca: got .*nowhere"),
        (TlsSettings(certificate="nowhere.pem", key=key), "tls certificate"),
    ):
        with pytest.raises(InputError, match=name):
            await median_log("calls", "localhost:1", tls)
    with pytest.raises(InputError, match="together with its key"):
        TlsSettings(certificate="client.pem")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "tokens"
    file.write_text("# known callers\nfirst\n\n  schl\u00fcssel  \n\ufffd\ufffd\n", encoding="utf-8")
    return str(file)


async def test_only_known_tokens_are_let_in_and_probes_need_none(
    artifact_folder: Path, token_file: str
) -> None:
    options = {"token_file": token_file, "http_port": 0}
    async with (
        server_and_stub(open_runtime(artifact_folder), **options) as (server, stub),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        sea = pb.PredictRequest(prompt="sea")
        assert (await stub.Predict(sea, metadata=(("authorization", "Bearer first"),))).mu > 0
        reflection = reflection_pb2_grpc.ServerReflectionStub(stub.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        wrong = [(("authorization", header),) for header in ("Bearer third", "Basic first")]
        refused = [*(stub.Predict(sea, metadata=metadata) for metadata in (None, *wrong))]
        refused += [stub.PredictStream().read(), reflection.read()]
        for call in refused:
            assert (await failure(call)).code() == grpc.StatusCode.UNAUTHENTICATED
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


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("\n")
    with pytest.raises(InputError, match="token_file"):
        BearerTokens(str(tmp_path / "tokens"))
