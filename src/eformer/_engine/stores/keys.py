"""Ed25519 keys in PEM files, through the package cryptography."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.stores.urls import local_path
from eformer._engine.tasks.extras import import_extra
from eformer.errors import SignatureError

if TYPE_CHECKING:
    from collections.abc import Callable

Key = str | os.PathLike[str] | bytes
"""The path of a PEM file, or its content."""

PASSWORD = "EFORMER_KEY_PASSWORD"  # noqa: S105  the name of a variable

_MOST_KEY = 2**16  # bytes
_HOW = (
    "make a pair by `openssl genpkey -algorithm ed25519 -out private.pem` and "
    "`openssl pkey -in private.pem -pubout -out public.pem`"
)
_DER = bytes.fromhex("302a300506032b6570032100")  # DER before the 32 bytes of a public key


def _library(part: str) -> Any:
    return import_extra(f"cryptography.{part}", "sign", "signatures need")


def _ed25519() -> Any:
    return _library("hazmat.primitives.asymmetric.ed25519")


class PublicKey(Struct, frozen=True):
    """A public key: the 32 bytes of RFC 8032."""

    raw: bytes

    @property
    def id(self) -> str:
        """The SHA-256 of the key as a SubjectPublicKeyInfo, as `openssl pkey -pubin -outform DER | sha256sum` says."""
        return hashlib.sha256(_DER + self.raw).hexdigest()

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        key = _ed25519().Ed25519PublicKey.from_public_bytes(self.raw)
        try:
            key.verify(signature, data)
        except _library("exceptions").InvalidSignature:
            return False
        return True


class PrivateKey:
    """A private key."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.id = PublicKey(key.public_key().public_bytes_raw()).id

    def sign(self, data: bytes) -> bytes:
        return bytes(self._key.sign(data))


def public_key(key: Key) -> PublicKey:
    """Read a public key: PEM, SubjectPublicKeyInfo."""
    data, origin = _pem(key)
    serialization = _library("hazmat.primitives.serialization")
    if b"PRIVATE KEY" in data:
        raise SignatureError(f"{origin} is a private key, expected a public key; {_HOW}")
    try:
        found = serialization.load_pem_public_key(data)
    except (ValueError, TypeError, _library("exceptions").UnsupportedAlgorithm) as error:
        raise SignatureError(f"{origin} is not a public key in PEM: {error}; {_HOW}") from error
    if not isinstance(found, _ed25519().Ed25519PublicKey):
        raise SignatureError(f"{origin} is not a key of Ed25519; {_HOW}")
    return PublicKey(found.public_bytes_raw())


def private_key(key: Key, password: str | Callable[[], str] | None = None) -> PrivateKey:
    """Read a private key: PEM, PKCS 8. If the key is encrypted, `password` or its result is the password."""
    data, origin = _pem(key)
    serialization = _library("hazmat.primitives.serialization")
    if b"PUBLIC KEY" in data:
        raise SignatureError(f"{origin} is a public key, expected the private key; {_HOW}")
    secret = _password(password, origin) if b"ENCRYPTED" in data else None
    try:
        found = serialization.load_pem_private_key(data, secret)
    except (ValueError, TypeError, _library("exceptions").UnsupportedAlgorithm) as error:
        wrong = " (or its password is wrong)" if secret is not None else ""
        raise SignatureError(f"{origin} is not a private key in PEM{wrong}: {error}; {_HOW}") from error
    if not isinstance(found, _ed25519().Ed25519PrivateKey):
        raise SignatureError(f"{origin} is not a key of Ed25519; {_HOW}")
    return PrivateKey(found)


def _password(given: str | Callable[[], str] | None, origin: str) -> bytes:
    found = os.environ.get(PASSWORD) if given is None or callable(given) else given
    if found is None and callable(given):
        found = given()
    if found is None:
        raise SignatureError(f"{origin} has a password; pass password= or set {PASSWORD}")
    return found.encode()


def _pem(key: Key) -> tuple[bytes, str]:
    """Return the content of a key, and its name for messages."""
    if isinstance(key, bytes):
        return key, "the key"
    path = Path(local_path(key))
    with path.open("rb") as file:
        return file.read(_MOST_KEY), str(path)
