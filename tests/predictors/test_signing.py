"""Signed artifacts: Ed25519 keys as PEM files, `public_key` in every consumer, at the start and after every reload."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from predictors.artifact import open_artifact
from predictors.cli import main
from predictors.client import InProcessPredictor
from predictors.manifest import MANIFEST, SIGNATURE
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.service.artifacts import open_sources
from predictors.service.errors import ReloadError
from predictors.signing import read_private_key, read_public_key, sign_file
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import running_server, serve_config, version_prefix, write_artifact

OURS = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
REQUEST = PredictionRequest("r", "sea", 1)
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))


def private_key_file(path: Path, key: Any = OURS, password: bytes | None = None) -> Path:
    """Writes a private key as `openssl genpkey -algorithm ed25519` does."""
    encryption: Any = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    return path


def public_key_file(path: Path, key: Any = OURS) -> Path:
    """Writes a public key as `openssl pkey -pubout` does."""
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))
    return path


def signed(folder: Path, key: Ed25519PrivateKey = OURS, **changes: Any) -> Path:
    write_artifact(folder, **changes)
    sign_file(folder / MANIFEST, key)
    return folder


def test_keys_and_signatures_are_those_of_openssl(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    secret, public, text = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "text"
    text.write_text("hello\n")

    def run(*arguments: object) -> None:
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True)

    run("genpkey", "-algorithm", "ed25519", "-out", secret)
    run("pkey", "-in", secret, "-pubout", "-out", public)
    sign_file(text, read_private_key(secret))
    run("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", text, "-sigfile", f"{text}.sig")
    read_public_key(public).verify((tmp_path / "text.sig").read_bytes(), b"hello\n")


def test_key_with_a_password_takes_it(tmp_path: Path) -> None:
    path = private_key_file(tmp_path / "key.pem", password=b"secret")
    assert read_private_key(path, "secret").private_bytes_raw() == OURS.private_bytes_raw()
    for password in ("wrong", None):
        with pytest.raises(InputError, match="sign: got .*Ed25519 private key"):
            read_private_key(path, password)


def test_other_keys_are_named(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate()
    (tmp_path / "text").write_text("no key\n")
    for path in (tmp_path / "text", public_key_file(tmp_path / "x.pub", other), tmp_path / "nothing"):
        with pytest.raises(InputError, match="public_key: got"):
            read_public_key(path)
    for path in (tmp_path / "text", private_key_file(tmp_path / "x.pem", other), tmp_path / "x.pub"):
        with pytest.raises(InputError, match="sign: got"):
            read_private_key(path)


@pytest.mark.parametrize("how", ["unsigned", "of another key", "changed afterwards"])
async def test_wrong_signatures_are_refused_by_server_and_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    folder, key = tmp_path / "a", public_key_file(tmp_path / "ours.pub")
    signed(folder, OTHER if how == "of another key" else OURS)
    open_artifact(folder)
    if how == "unsigned":
        (folder / SIGNATURE).unlink()
    elif how == "changed afterwards":
        assert open_artifact(folder, public_key=key) == open_artifact(folder)
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text() + " ")
    assert main([str(folder), f"--public_key={key}", "--port=0"]) == 2
    [error] = capsys.readouterr().err.strip().splitlines()
    missing, wrong = "with a public key it must be there", "is not of this manifest.json by the"
    assert (missing if how == "unsigned" else wrong) in error
    async with InProcessPredictor(folder, public_key=key) as predictor:
        with pytest.raises(InputError, match="signature"):
            await predictor.predict([REQUEST])


async def test_wrong_signatures_are_refused_at_a_reload(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    bad = write_artifact(tmp_path / "bad", artifact_version="two")
    link = tmp_path / "current"
    link.symlink_to(signed(tmp_path / "one", artifact_version="one"))
    sources, runtimes = open_sources(serve_config(artifact=str(link), provider="cpu", public_key=str(key)))
    async with (
        running_server(runtimes, reopen=lambda name: sources[name].open()) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]

        async def version() -> str:
            return version_prefix((await stub.Predict(pb.PredictRequest(prompt="sea"))).artifact_version)

        (tmp_path / "next").symlink_to(bad)
        (tmp_path / "next").replace(link)
        with pytest.raises(ReloadError, match="with a public key it must be there"):
            await server.artifacts.reload("tiny")
        assert await version() == "one"
        sign_file(link / MANIFEST, OURS)
        assert await server.artifacts.reload("tiny")
        assert await version() == "two"
        # The same content without its signature is no news to be taken, but no reason to go on silently either.
        (link / SIGNATURE).unlink()
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
        assert await version() == "two"
        # A key that is replaced counts from the next reload.
        sign_file(link / MANIFEST, OURS)
        public_key_file(key, OTHER)
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
    text = server.metrics.exposition().decode()
    assert 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 3.0' in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text
