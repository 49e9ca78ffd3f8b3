from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from predictors.artifact import open_artifact
from predictors.minisign import (
    PublicKey,
    SecretKey,
    read_public_key,
    read_secret_key,
    sign_file,
    verify_file,
)
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from tests.predictors.fakes import write_artifact

# Made by minisign 0.11 for the file "hello\n".
PUBLIC = "RWTw3m8dwcq/PoWHvebcByT4HGgfaMn25jFitij/COYfFa5pyObnKgFY"
SIGNATURE = """untrusted comment: signature from minisign secret key
RUTw3m8dwcq/PvlWyLcVBfkaQ7OSCgFV72u1p1U/FX2zxKcQ2XnbFLEBOeSOcpFzpOz7El+u6Mr6BxSPwB3us4Zx22zZyAG07QE=
trusted comment: a comment
HEwu9mcy3asBzleXUJRL4uWQ/FoqF6omrPHyvQPy+A+m9BkgALJd8/VNLeJgLbLbE0V7ugAi3rwHxMlgUBF+Cg==
"""
# The secret key of that, without a password; it protects nothing.
SECRET = (
    "RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA8N5vHcHKvz7OFF8sYrAqtYQF/D0+YUPg"
    "hxYUj4NLRbCQ29yrEvYNwIWHvebcByT4HGgfaMn25jFitij/COYfFa5pyObnKgFYAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
)
OTHER = SecretKey(b"otherkey", bytes(range(32)))


def public_key_file(path: Path, key: PublicKey) -> Path:
    """Writes a public key as minisign does."""
    line = base64.b64encode(b"Ed" + key.key_id + key.key).decode()
    path.write_text(f"untrusted comment: minisign public key {key.name}\n{line}\n")
    return path


@pytest.fixture
def secret(tmp_path: Path) -> SecretKey:
    path = tmp_path / "secret.key"
    path.write_text(f"untrusted comment: minisign encrypted secret key\n{SECRET}\n")
    return read_secret_key(path)


@pytest.fixture
def signed(tmp_path: Path, secret: SecretKey) -> Path:
    folder = write_artifact(tmp_path / "a")
    sign_file(folder / "manifest.json", secret, "ours")
    return folder


def test_what_minisign_signed_is_verified(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("hello\n")
    (tmp_path / "f.minisig").write_text(SIGNATURE)
    key = read_public_key(PUBLIC)
    assert key.name == "3EBFCAC11D6FDEF0"
    assert verify_file(tmp_path / "f", key) == "a comment"
    (tmp_path / "key.pub").write_text(f"untrusted comment: minisign public key\n{PUBLIC}\n")
    assert read_public_key(tmp_path / "key.pub") == read_public_key(str(tmp_path / "key.pub")) == key


def test_signing_again_gives_minisigns_own_bytes(tmp_path: Path, secret: SecretKey) -> None:
    (tmp_path / "f").write_text("hello\n")
    lines = sign_file(tmp_path / "f", secret, "a comment").read_text().splitlines()
    assert lines[1:] == SIGNATURE.splitlines()[1:]
    assert secret.public == read_public_key(PUBLIC)


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_verifies_what_is_signed_here(signed: Path) -> None:
    command = ["minisign", "-V", "-P", PUBLIC, "-m", str(signed / "manifest.json")]
    assert (
        "Trusted comment: ours" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )


def test_key_with_a_password_takes_it(tmp_path: Path) -> None:
    """The file is made as minisign makes it, but with scrypt limits that do not take a gigabyte."""
    salt, operations, memory = bytes(32), 1 << 15, 1 << 20
    body = OTHER.key_id + OTHER.seed + OTHER.public.key
    plain = body + hashlib.blake2b(b"Ed" + body, digest_size=32).digest()
    # libsodium's pickparams of these limits: N = 2^10, r = 8, p = 1.
    stream = hashlib.scrypt(b"secret", salt=salt, n=1 << 10, r=8, p=1, dklen=104)
    limits = operations.to_bytes(8, "little") + memory.to_bytes(8, "little")
    raw = b"EdScB2" + salt + limits + bytes(a ^ b for a, b in zip(plain, stream, strict=True))
    path = tmp_path / "secret.key"
    path.write_text(f"untrusted comment: x\n{base64.b64encode(raw).decode()}\n")
    assert read_secret_key(path, "secret").public == OTHER.public
    with pytest.raises(InputError, match="its right password"):
        read_secret_key(path, "wrong")
    with pytest.raises(InputError, match="a key without password, or its password"):
        read_secret_key(path)


def test_signed_artifact_opens_with_its_key(signed: Path) -> None:
    assert open_artifact(signed, public_key=PUBLIC).manifest.artifact_id == "tiny"
    assert len(open_runtime(signed, public_key=PUBLIC).predict(["sea"])) == 1
    assert open_artifact(signed).manifest.artifact_id == "tiny"


def test_missing_signature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"signature manifest\.json\.minisig: .*existing file"):
        open_artifact(write_artifact(tmp_path / "a"), public_key=PUBLIC)


def test_signature_of_another_key_is_refused(signed: Path) -> None:
    sign_file(signed / "manifest.json", OTHER, "theirs")
    with pytest.raises(InputError, match="got 'key 79656B726568746F'; allowed: key 3EBFCAC11D6FDEF0"):
        open_artifact(signed, public_key=PUBLIC)
    # The same id in front of another key's signature does not help.
    forged = SecretKey(read_public_key(PUBLIC).key_id, OTHER.seed)
    sign_file(signed / "manifest.json", forged, "ours")
    with pytest.raises(InputError, match="a signature that does not fit"):
        open_artifact(signed, public_key=PUBLIC)


def test_any_change_after_signing_is_refused(signed: Path) -> None:
    path = signed / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"artifact_id": "evil"}))
    with pytest.raises(InputError, match=r"allowed: manifest\.json as it was signed with key 3EBF"):
        open_artifact(signed, public_key=PUBLIC)


def test_changed_comment_and_broken_files_are_refused(signed: Path) -> None:
    path = signed / "manifest.json.minisig"
    good = path.read_text()
    older = base64.b64encode(b"Ed" + base64.b64decode(good.splitlines()[1])[2:]).decode()
    for bad, message in (
        (good.replace("comment: ours", "comment: else"), "a trusted comment as it was signed"),
        ("", "a minisign signature"),
        (good.replace("trusted comment: ours\n", ""), "a minisign signature"),
        (good.replace(good.splitlines()[1], "AAAA"), "a minisign signature"),
        (good.replace(good.splitlines()[1], older), "algorithm ED"),
    ):
        path.write_text(bad)
        with pytest.raises(InputError, match=message):
            open_artifact(signed, public_key=PUBLIC)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="a text file in the format of minisign"):
        open_artifact(signed, public_key=PUBLIC)


@pytest.mark.parametrize("content", ["", "x", "comment\nAAAA\n", f"comment\n{SECRET}\n"])
def test_no_public_key_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(InputError, match="public_key"):
        read_public_key(tmp_path / "key")


@pytest.mark.parametrize(
    "content", ["x", "comment\nAAAA\n", f"comment\n{PUBLIC}\n", f"c\n{SECRET[:-8]}AAAAAAA=\n"]
)
def test_no_secret_key_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    if content.endswith("AAAAAAA=\n"):
        content = f"c\n{base64.b64encode(base64.b64decode(SECRET)[:-1] + bytes([1])).decode()}\n"
        (tmp_path / "key").write_text(content)
    with pytest.raises(InputError, match="sign: got"):
        read_secret_key(tmp_path / "key")


def test_comment_of_two_lines_is_refused(tmp_path: Path, secret: SecretKey) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(InputError, match="trusted_comment"):
        sign_file(tmp_path / "f", secret, "a\nb")
    assert PublicKey(b"12345678", b"").name == "3837363534333231"
