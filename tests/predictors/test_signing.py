"""Signed artifacts: Ed25519 keys as PEM files, `public_key` in every consumer, at the start and after every reload."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from predictors.artifact import MANIFEST, SIGNATURE, open_artifact
from predictors.cli import main
from predictors.client import InProcessPredictor
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.service.artifacts import open_sources
from predictors.service.errors import ReloadError
from predictors.service.metrics import ServiceMetrics
from predictors.signing import read_private_key, read_public_key, sign_file
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, running_server, version_prefix, write_artifact
from tests.predictors.test_workers import replace_artifact, running, version

OURS = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))


def private_key_file(path: Path, key: Any = OURS, password: bytes | None = None) -> Path:
    """Writes a private key as `openssl genpkey -algorithm ed25519` does."""
    encryption = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
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
    for arguments in (
        ("genpkey", "-algorithm", "ed25519", "-out", secret),
        ("pkey", "-in", secret, "-pubout", "-out", public),
    ):
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True)
    sign_file(text, read_private_key(secret))
    verify = ["pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", text]
    verify += ["-sigfile", f"{text}.sig"]
    subprocess.run([openssl, *map(str, verify)], check=True, capture_output=True)
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


def test_signed_artifact_opens_with_its_key_and_without(tmp_path: Path) -> None:
    folder, key = signed(tmp_path / "a"), public_key_file(tmp_path / "ours.pub")
    assert open_artifact(folder, public_key=key) == open_artifact(folder)
    (folder / SIGNATURE).write_bytes(b"short")
    with pytest.raises(InputError, match=r"signature manifest\.json\.sig"):
        open_artifact(folder, public_key=key)


def unsigned(folder: Path) -> Path:
    return write_artifact(folder, artifact_version="two")


def of_another_key(folder: Path) -> Path:
    return signed(folder, OTHER, artifact_version="two")


def changed_afterwards(folder: Path) -> Path:
    path = signed(folder, artifact_version="two") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "2027-01-01T00:00:00+00:00"}))
    return folder


BAD = pytest.mark.parametrize(
    ("bad", "message"),
    [
        (unsigned, "with a public key the artifact must be signed"),
        (of_another_key, "is not of this manifest.json by the public key"),
        (changed_afterwards, "is not of this manifest.json by the public key"),
    ],
)


@BAD
def test_the_start_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: Any, message: str
) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    good, refused = signed(tmp_path / "good", artifact_id="good"), bad(tmp_path / "refused")
    port_file = tmp_path / "port"
    options = [f"--public_key={key}", "--port=0", f"--port_file={port_file}"]
    assert main([str(refused), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("serve-predictor: error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert main([str(good), f'--more_artifacts=["{refused}"]', *options]) == 2
    assert message in capsys.readouterr().err
    assert not port_file.exists()


@BAD
async def test_a_reload_is_refused_and_the_signed_one_stays(tmp_path: Path, bad: Any, message: str) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    link = tmp_path / "current"
    link.symlink_to(signed(tmp_path / "one", artifact_version="one"))
    places, runtimes = open_sources([str(link)], provider="cpu", threads_per_run=1, public_key=str(key))
    metrics = ServiceMetrics()
    async with (
        running_server(runtimes, reopen=lambda name: places[name].open(), metrics=metrics) as (
            server,
            address,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]

        async def answered_by() -> str:
            return version_prefix((await stub.Predict(pb.PredictRequest(prompt="sea"))).artifact_version)

        move(link, bad(tmp_path / "two"))
        with pytest.raises(ReloadError, match=message):
            await server.artifacts.reload("tiny")
        assert await answered_by() == "one"
        sign_file(link / MANIFEST, OURS)
        assert await server.artifacts.reload("tiny")
        assert await answered_by() == "two"
        # The same content without its signature is no news to be taken, but no reason to go on silently either.
        (link / SIGNATURE).unlink()
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
        assert await answered_by() == "two"
    text = metrics.exposition().decode()
    assert 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 2.0' in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text


async def test_a_key_that_is_replaced_counts_from_the_next_reload(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    [(_, place)] = open_sources(
        [str(signed(tmp_path / "a"))], provider="cpu", threads_per_run=1, public_key=str(key)
    )[0].items()
    public_key_file(key, OTHER)
    with pytest.raises(InputError, match="signature"):
        place.open()
    key.unlink()
    with pytest.raises(InputError, match="public_key"):
        place.open()


def test_workers_verify_and_a_late_signature_is_found_by_looking(tmp_path: Path) -> None:
    """The new version comes before its signature: the first look refuses it, the second one takes it."""
    key = public_key_file(tmp_path / "ours.pub")
    replace_artifact(tmp_path, "one")
    sign_file(tmp_path / "current" / MANIFEST, OURS)
    options = ("--workers=2", f"--public_key={key}", "--reload_poll_s=0.05")
    with running(tmp_path, tmp_path / "current", *options) as server:
        port, _ = server.ports()
        assert version(port) == "one"
        assert f"artifacts must be signed with the key {key}" in server.log
        replace_artifact(tmp_path, "two")
        server.wait_for(
            lambda: len(re.findall(r"a new version was refused, one\+\w+ stays: signature", server.log)) >= 2
        )
        assert version(port) == "one"
        sign_file(tmp_path / "current" / MANIFEST, OURS)
        server.wait_for(lambda: len(re.findall(r"version two\+\w+ replaces one\+", server.log)) == 2)
        assert {version(port) for _ in range(4)} == {"two"}
        assert server.stop() == 0


async def test_in_process_clients_verify_too(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    request = PredictionRequest("r", "sea", 1)
    async with InProcessPredictor(signed(tmp_path / "a"), public_key=key) as predictor:
        [found] = await predictor.predict([request])
    assert found.mu == pytest.approx(expected("sea")[0], rel=1e-6)
    async with InProcessPredictor(signed(tmp_path / "b", OTHER), public_key=key) as predictor:
        with pytest.raises(InputError, match="signature"):
            await predictor.predict([request])


def move(link: Path, target: Path) -> None:
    """Lets a link name another folder, in one step."""
    following = link.with_name("next")
    following.symlink_to(target)
    following.replace(link)
