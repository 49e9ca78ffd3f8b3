"""Ed25519 signatures of files: FILE.sig beside FILE, as `openssl pkeyutl -sign -rawin` writes them; keys are PEM files."""

from __future__ import annotations

from pathlib import Path

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, existing_file

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
except ImportError as error:
    raise MissingExtraError("cryptography", "sign") from error


def read_private_key(path: str | Path, password: str | None = None) -> Ed25519PrivateKey:
    """The key of a PEM file; raises InputError if it is none, or its password is missing or wrong."""
    data = existing_file(path, "sign").read_bytes()
    try:
        key = load_pem_private_key(data, None if password is None else password.encode())
    except (ValueError, TypeError) as error:
        raise InputError("sign", str(path), f"a PEM file with an Ed25519 private key ({error})") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError("sign", str(path), "a PEM file with an Ed25519 private key")
    return key


def read_public_key(path: str | Path) -> Ed25519PublicKey:
    """The key of a PEM file; raises InputError if it is none."""
    try:
        key = load_pem_public_key(existing_file(path, "public_key").read_bytes())
    except ValueError as error:
        raise InputError("public_key", str(path), "a PEM file with an Ed25519 public key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InputError("public_key", str(path), "a PEM file with an Ed25519 public key")
    return key


def sign_file(path: Path, key: Ed25519PrivateKey) -> None:
    """Writes the signature beside the file."""
    with atomic_file(Path(f"{path}.sig")) as temporary:
        temporary.write_bytes(key.sign(path.read_bytes()))


def verify_file(path: Path, key: Ed25519PublicKey) -> None:
    """Raises InputError unless a signature of this content by this key stands beside the file."""
    signature = Path(f"{path}.sig")
    if not signature.is_file():
        raise InputError(f"signature {signature.name} is missing: with a public key it must be there")
    try:
        key.verify(signature.read_bytes(), path.read_bytes())
    except InvalidSignature as error:
        reason = f"signature {signature.name} is not of this {path.name} by the public key"
        raise InputError(reason) from error
