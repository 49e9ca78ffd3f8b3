"""Signatures of files in the format of minisign, which the tool `minisign -V` verifies too.

A public key file has two lines, a comment and base64 of (algorithm "Ed", key id, Ed25519 key). A signature file has four:
a comment, base64 of (algorithm "ED", key id, Ed25519 signature of the file's BLAKE2b-512), a trusted comment, base64 of
the signature of (signature, trusted comment). Source: https://jedisct1.github.io/minisign/, section "Signature format".
The older algorithm "Ed", which signs the file itself, is refused; minisign has not written it since version 0.10 unless
asked to.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SUFFIX = ".minisig"

_KEY, _HASHED = b"Ed", b"ED"
_SCRYPT, _PLAIN, _BLAKE2 = b"Sc", b"\0\0", b"B2"
_TRUSTED = "trusted comment: "


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Who signs: a key id of 8 bytes and an Ed25519 public key of 32."""

    key_id: bytes
    key: bytes

    @property
    def name(self) -> str:
        """The id as minisign shows it."""
        return self.key_id[::-1].hex().upper()


@dataclass(frozen=True, slots=True, repr=False)
class SecretKey:
    """What signs: a key id of 8 bytes and the 32-byte seed of an Ed25519 key."""

    key_id: bytes
    seed: bytes

    @property
    def public(self) -> PublicKey:
        """What verifies."""
        return PublicKey(self.key_id, self._private().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature, 64 bytes."""
        return self._private().sign(message)

    def _private(self) -> Ed25519PrivateKey:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise MissingExtraError("cryptography", "sign") from error
        return Ed25519PrivateKey.from_private_bytes(self.seed)


def read_public_key(key: str | Path) -> PublicKey:
    """A public key: a file as `minisign -G` writes it, or its base64 line itself.

    Raises:
        InputError: It is neither.
    """
    text = str(key)
    if isinstance(key, Path) or not (len(text) == 56 and text.startswith("RW")):
        lines = _lines(existing_file(key, "public_key"), "public_key")
        text = lines[1] if len(lines) > 1 else ""
    raw = _decode(text, 42, "public_key", str(key), "a minisign public key")
    if raw[:2] != _KEY:
        raise InputError("public_key", str(key), "a minisign public key")
    return PublicKey(raw[2:10], raw[10:])


def read_secret_key(path: str | Path, password: str | None = None) -> SecretKey:
    """A secret key file as `minisign -G` writes it; with `-W` it has no password.

    Args:
        path: The file.
        password: Its password; deriving the key from it takes about 1 GiB of memory, as minisign chose.

    Raises:
        InputError: It is no such file, or the password is missing or wrong.
    """
    lines = _lines(existing_file(path, "sign"), "sign")
    wanted = "a minisign secret key file"
    raw = _decode(lines[1] if len(lines) > 1 else "", 158, "sign", str(path), wanted)
    algorithm, derivation, checksum = raw[:2], raw[2:4], raw[4:6]
    if algorithm != _KEY or checksum != _BLAKE2 or derivation not in (_SCRYPT, _PLAIN):
        raise InputError("sign", str(path), wanted)
    secret = raw[54:]
    if derivation == _SCRYPT:
        if password is None:
            raise InputError("sign", str(path), "a key without password, or its password beside it")
        operations, memory = (int.from_bytes(raw[at : at + 8], "little") for at in (38, 46))
        secret = _xor(secret, _derived(password, raw[6:38], operations, memory))
    key_id, seed, public, stated = secret[:8], secret[8:40], secret[40:72], secret[72:]
    expected = hashlib.blake2b(_KEY + key_id + seed + public, digest_size=32).digest()
    if derivation == _PLAIN and stated == bytes(32):
        expected = stated  # minisign leaves the checksum empty where there is no password to check
    if not hmac.compare_digest(stated, expected):
        raise InputError("sign", str(path), f"{wanted} that is whole, and its right password")
    found = SecretKey(key_id, seed)
    if found.public.key != public:
        raise InputError("sign", str(path), f"{wanted} whose two halves belong together")
    return found


def sign_file(path: str | Path, key: SecretKey, trusted_comment: str) -> Path:
    """Writes the signature of a file beside it, `.minisig` added to its name; returns that path.

    Args:
        path: The file.
        key: Who signs.
        trusted_comment: One line that is signed too.
    """
    if "\n" in trusted_comment or "\r" in trusted_comment:
        raise InputError("trusted_comment", trusted_comment, "one line")
    signature = key.sign(_digest(Path(path)))
    both = key.sign(signature + trusted_comment.encode())
    lines = [
        f"untrusted comment: signature from minisign secret key {key.public.name}",
        base64.b64encode(_HASHED + key.key_id + signature).decode(),
        _TRUSTED + trusted_comment,
        base64.b64encode(both).decode(),
    ]
    target = Path(f"{path}{SUFFIX}")
    with atomic_file(target) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def verify_file(path: Path, key: PublicKey) -> str:
    """Verifies the signature that stands beside a file.

    Returns:
        The trusted comment.

    Raises:
        InputError: There is no signature, it is of another key, or it is not of this content.
    """
    file = Path(f"{path}{SUFFIX}")
    what = f"signature {file.name}"
    if not file.is_file():
        raise InputError(what, str(file), "an existing file, because a public key is configured")
    lines = _lines(file, what)
    if len(lines) < 4 or not lines[2].startswith(_TRUSTED):
        raise InputError(what, str(file), "a minisign signature of four lines")
    raw = _decode(lines[1], 74, what, str(file), "a minisign signature")
    both = _decode(lines[3], 64, what, str(file), "a minisign signature")
    if raw[:2] != _HASHED:
        raise InputError(what, raw[:2].decode("latin-1"), "algorithm ED (signed with minisign 0.10 or newer)")
    if raw[2:10] != key.key_id:
        signer = PublicKey(raw[2:10], b"").name
        raise InputError(what, f"key {signer}", f"key {key.name}, as configured")
    comment = lines[2].removeprefix(_TRUSTED)
    _check(key, raw[10:], _digest(path), what, f"{path.name} as it was signed with key {key.name}")
    _check(key, both, raw[10:] + comment.encode(), what, "a trusted comment as it was signed")
    return comment


def _check(key: PublicKey, signature: bytes, message: bytes, what: str, allowed: str) -> None:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise MissingExtraError("cryptography", "sign") from error
    try:
        Ed25519PublicKey.from_public_bytes(key.key).verify(signature, message)
    except InvalidSignature as error:
        raise InputError(what, "a signature that does not fit", allowed) from error


def _digest(path: Path) -> bytes:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def _derived(password: str, salt: bytes, operations: int, memory: int) -> bytes:
    """scrypt with the parameters that libsodium's pickparams makes of its two limits."""
    operations = max(operations, 32768)
    block = 8
    by_memory = operations >= memory // 32
    limit = memory // (block * 128) if by_memory else operations // (block * 4)
    exponent = max(1, (limit // 2).bit_length())
    parallel = 1
    if by_memory:
        parallel = max(1, min((operations // 4) >> exponent, 0x3FFFFFFF) // block)
    size = 1 << exponent
    most = min(128 * block * (size + parallel) + (1 << 20), (1 << 31) - 2)
    try:
        return hashlib.scrypt(
            password.encode(), salt=salt, n=size, r=block, p=parallel, maxmem=most, dklen=104
        )
    except (ValueError, MemoryError) as error:
        raise InputError(
            "sign", "its scrypt limits", f"a key file that can be opened here ({error})"
        ) from error


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _lines(path: Path, field: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), "a text file in the format of minisign") from error


def _decode(text: str, length: int, field: str, value: str, wanted: str) -> bytes:
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(field, value, wanted) from error
    if len(raw) != length:
        raise InputError(field, value, wanted)
    return raw
