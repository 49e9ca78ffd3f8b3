"""TLS, mutual TLS and bearer tokens, on both ports."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.errors import UnauthenticatedError
from predictors.service.security import BearerTokens, TlsFiles
from scheduler_core.errors import InputError
from tests.predictors.fakes import running_server

trustme = pytest.importorskip("trustme")


@dataclass
class Pki:
    """Files of an authority, a server's and a client's certificate."""

    server: TlsFiles
    mutual: TlsFiles
    authority: bytes
    client_key: Path
    client_certificate: Path

    def channel(self, address: str, *, with_certificate: bool) -> grpc.aio.Channel:
        pair = (
            (self.client_key.read_bytes(), self.client_certificate.read_bytes())
            if with_certificate
            else (None, None)
        )
        credentials = grpc.ssl_channel_credentials(self.authority, *pair)
        return grpc.aio.secure_channel(address.replace("127.0.0.1", "localhost"), credentials)

    def context(self, *, with_certificate: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority.decode())
        if with_certificate:
            context.load_cert_chain(self.client_certificate, self.client_key)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, certificate in (
        ("server", authority.issue_cert("localhost", "127.0.0.1")),
        ("client", authority.issue_cert("client")),
    ):
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(str(folder / f"{name}.pem"), append=True)
    plain = TlsFiles(certificate=folder / "server.pem", key=folder / "server.key")
    mutual = TlsFiles(
        certificate=folder / "server.pem", key=folder / "server.key", client_authority=folder / "ca.pem"
    )
    return Pki(plain, mutual, (folder / "ca.pem").read_bytes(), folder / "client.key", folder / "client.pem")


async def grpc_code(channel: grpc.aio.Channel, **arguments: Any) -> grpc.StatusCode:
    try:
        await PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea"), timeout=20, **arguments)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_on_both_ports(artifact_folder: Path, pki: Pki, mutual: bool) -> None:
    tls = pki.mutual if mutual else pki.server
    async with running_server(open_runtime(artifact_folder), tls=tls, http_port=0) as (server, address):
        async with grpc.aio.insecure_channel(address) as channel:
            assert await grpc_code(channel) == grpc.StatusCode.UNAVAILABLE
        for with_certificate in (False, True):
            async with pki.channel(address, with_certificate=with_certificate) as channel:
                accepted = await grpc_code(channel) == grpc.StatusCode.OK
            assert accepted is (with_certificate or not mutual)
            context = pki.context(with_certificate=with_certificate)
            accepted = True
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(
                        f"https://localhost:{server.http_port}/v1/predict",
                        json={"prompt": "sea"},
                        ssl=context,
                    ) as response,
                ):
                    assert response.status == 200
            except aiohttp.ClientError:
                accepted = False
            assert accepted is (with_certificate or not mutual)


async def test_only_known_tokens_are_let_in_and_probes_need_none(artifact_folder: Path) -> None:
    tokens = BearerTokens(["first", "second"])
    async with (
        running_server(open_runtime(artifact_folder), tokens=tokens, http_port=0) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        for header, accepted in (
            ("Bearer first", True),
            ("bearer second", True),
            ("Bearer third", False),
            ("Basic first", False),
            ("first", False),
            (None, False),
        ):
            metadata = None if header is None else (("authorization", header),)
            wanted = grpc.StatusCode.OK if accepted else grpc.StatusCode.UNAUTHENTICATED
            assert await grpc_code(channel, metadata=metadata) == wanted, header
            headers = {} if header is None else {"Authorization": header}
            async with session.post("/v1/predict", json={"prompt": "sea"}, headers=headers) as response:
                assert response.status == (200 if accepted else 401), header
        stream = PredictorStub(channel).PredictStream()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for path, code in (("/healthz", 200), ("/readyz", 200), ("/v2/health/ready", 200), ("/metrics", 401)):
            async with session.get(path) as response:
                assert response.status == code, path


def test_token_file_holds_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# known callers\none\n\n  two  \n")
    tokens = BearerTokens.of_file(file)
    tokens.check("Bearer one")
    tokens.check(b"Bearer two")
    for wrong in ("Bearer # known callers", "Bearer ", b"Bearer \xff", None):
        with pytest.raises(UnauthenticatedError):
            tokens.check(wrong)
    file.write_text("\n")
    with pytest.raises(InputError, match="token_file"):
        BearerTokens.of_file(file)


@pytest.mark.parametrize("field", ["certificate", "key", "client_authority"])
def test_bad_files_are_named(tmp_path: Path, pki: Pki, field: str) -> None:
    option = {"certificate": "tls_cert", "key": "tls_key", "client_authority": "tls_client_ca"}[field]
    files = {
        "certificate": pki.mutual.certificate,
        "key": pki.mutual.key,
        "client_authority": pki.mutual.client_authority,
    }
    with pytest.raises(InputError, match=option):
        TlsFiles(**(files | {field: tmp_path / "nothing"})).grpc_credentials()
    (tmp_path / "text").write_text("no PEM")
    with pytest.raises(InputError, match=option):
        TlsFiles(**(files | {field: tmp_path / "text"})).grpc_credentials()


@pytest.mark.parametrize("header", ["Bearer schl\u00fcssel", "Bearer schl\u00fcssel".encode()])
def test_a_token_need_not_be_ascii(header: str | bytes) -> None:
    BearerTokens(["schl\u00fcssel"]).check(header)


@pytest.mark.parametrize(
    "header", ["Bearer \udcff", b"Bearer \xff", b"Bearer \xef\xbf\xbd", "Bearer schl\udcfcssel", "", None]
)
def test_bytes_that_are_no_text_are_no_token(header: str | bytes | None) -> None:
    tokens = BearerTokens(["schl\u00fcssel", "\ufffd\ufffd"])
    with pytest.raises(UnauthenticatedError):
        tokens.check(header)
