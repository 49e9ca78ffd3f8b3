"""Ed25519 signatures FILE.sig in the format of `openssl pkeyutl -sign -rawin`; keys are PEM files."""

from __future__ import annotations

from pathlib import Path

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.shell.files import atomic_file, existing_file

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
except ImportError as error:
    raise MissingExtraError("cryptography", "sign") from error


def read_private_key(path: str | Path, password: str | None = None) -> Ed25519PrivateKey:
    """Reads a private key from a PEM file; InputError if it is invalid or its password is wrong."""
    data = existing_file(path, "sign").read_bytes()
    try:
        key = load_pem_private_key(data, None if password is None else password.encode())
    except (ValueError, TypeError) as error:
        raise InputError("sign", str(path), f"a PEM file with an Ed25519 private key ({error})") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError("sign", str(path), "a PEM file with an Ed25519 private key")
    return key


def read_public_key(path: str | Path) -> Ed25519PublicKey:
    """Reads a public key from a PEM file; InputError if it is invalid."""
    try:
        key = load_pem_public_key(existing_file(path, "public_key").read_bytes())
    except ValueError as error:
        raise InputError("public_key", str(path), "a PEM file with an Ed25519 public key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InputError("public_key", str(path), "a PEM file with an Ed25519 public key")
    return key


def sign_file(path: Path, key: Ed25519PrivateKey) -> None:
    """Signs a file: writes the signature FILE.sig."""
    with atomic_file(Path(f"{path}.sig")) as temporary:
        temporary.write_bytes(key.sign(path.read_bytes()))


def verify_file(path: Path, key: Ed25519PublicKey) -> None:
    """Raises InputError unless FILE.sig is a valid signature of the file by the key."""
    signature = Path(f"{path}.sig")
    if not signature.is_file():
        raise InputError(f"signature {signature.name} is missing; public_key requires it")
    try:
        key.verify(signature.read_bytes(), path.read_bytes())
    except InvalidSignature as error:
        reason = f"signature {signature.name} is invalid for {path.name} and the public key"
        raise InputError(reason) from error
