"""The document that signs a checkpoint: SHA-256 of every block of every file, in a signed envelope.

docs/format/signature.md describes it for other programs. The envelope follows DSSE: the signed bytes are the bytes that
are parsed, and eformer parses nothing of them before it has checked the signature.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Protocol

import msgspec

from eformer._engine.record.names import is_inside
from eformer._engine.record.text import printable
from eformer._engine.record.values import parse_json
from eformer.errors import FormatError, SignatureError

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Iterable, Mapping  # type: ignore[attr-defined,unused-ignore]  # Python 3.12

SIGNATURE = "eformer.sig"
"""The name of the signature in a directory. The signature of a single file is `<name>.eformer.sig`, beside it."""

SIGNED_BLOCK_BYTES = 8 * 2**20

MOST_BYTES = 2**29
"""The longest signature that eformer reads: enough for 40 TB, or 2 million files."""

_TYPE = "application/vnd.eformer.signature.v1+json"
_HEX = re.compile(r"[0-9a-f]{64}")

# Other programs put these files beside the files of a model; the last two belong to running saves of eformer. Readers
# of signed checkpoints do not see them.
_UNSIGNED = re.compile(
    r"\.gitattributes|\.git/.*|\.cache/huggingface/.*|\.eformer-leases/.*|\.eformer-[0-9a-f]{16}\.tmp(/.*)?",
    re.DOTALL,
)


def signature_name(file: str) -> str:
    """Return the name of the signature of a file, or with "" of the signature of a directory."""
    return f"{file}.{SIGNATURE}" if file else SIGNATURE


def is_signed_name(name: str) -> bool:
    """Tell whether the signature of a directory covers a file of this name. The signature does not cover itself."""
    return name != SIGNATURE and not _UNSIGNED.fullmatch(name)


class SignedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its path in the checkpoint, its length, and the SHA-256 of each of its blocks."""

    name: str
    nbytes: int
    sha256: tuple[str, ...]


class _Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signed files. `piece_bytes`, the length of a block, keeps the name that the format has for it."""

    piece_bytes: int
    files: tuple[SignedFile, ...]


class _Signature(msgspec.Struct, frozen=True):
    keyid: str
    sig: str


class Envelope(msgspec.Struct, frozen=True, rename={"payload_type": "payloadType"}):
    """The stored document. Trust nothing in it before its signature is checked."""

    payload_type: str
    payload: str
    signatures: tuple[_Signature, ...]

    @property
    def key_id(self) -> str:
        """The id of the key that has signed, as the document claims."""
        return printable(self.signatures[0].keyid[:64])


class Verifier(Protocol):
    """A public key."""

    @property
    def id(self) -> str: ...

    def has_signed(self, data: bytes, signature: bytes) -> bool: ...


def digest_block(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def count_signed_blocks(nbytes: int) -> int:
    """Return the number of blocks of a file. An empty file has one empty block."""
    return max(1, -(-nbytes // SIGNED_BLOCK_BYTES))


# -------------------------------------------------------------------------------------------- write


def sign_files(files: Iterable[SignedFile], key_id: str, sign: Callable[[bytes], bytes]) -> bytes:
    """Return the document that signs these files with the key `key_id`."""
    payload = msgspec.json.encode(
        _Statement(SIGNED_BLOCK_BYTES, tuple(sorted(files, key=lambda file: file.name)))
    )
    signature = _Signature(key_id, _text(sign(_signed_bytes(payload))))
    return msgspec.json.encode(Envelope(_TYPE, _text(payload), (signature,)))


def _signed_bytes(payload: bytes) -> bytes:
    """Return the bytes to sign: the pre-authentication encoding of DSSE."""
    kind = _TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --------------------------------------------------------------------------------------------- read


def parse_envelope(data: bytes, origin: str) -> Envelope:
    """Read the document without trusting it."""
    try:
        envelope = parse_json(data, Envelope, f"{origin} is not a signature")
    except FormatError as error:
        raise SignatureError(str(error)) from error
    if envelope.payload_type != _TYPE:
        kind = printable(envelope.payload_type[:80])
        raise SignatureError(f"{origin} is a signature of another kind, {kind}; expected {_TYPE}")
    if len(envelope.signatures) != 1:
        raise SignatureError(f"{origin} has {len(envelope.signatures)} signatures, expected 1")
    if msgspec.json.encode(envelope) != data:  # spaces or unknown fields could change unnoticed
        raise SignatureError(f"{origin} was altered, or has spaces or fields that a signature does not have")
    return envelope


def signed_files(data: bytes, verifier: Verifier, origin: str) -> Mapping[str, SignedFile]:
    """Return the files that the owner of the key has signed, sorted by name. Raise SignatureError if the signature is
    wrong."""
    envelope = parse_envelope(data, origin)
    payload = _bytes(envelope.payload, origin)
    if envelope.signatures[0].keyid != verifier.id:
        raise SignatureError(f"{origin} is signed by another key, {envelope.key_id}; expected {verifier.id}")
    if not verifier.has_signed(_signed_bytes(payload), _bytes(envelope.signatures[0].sig, origin)):
        raise SignatureError(f"{origin} was altered: the signature does not match the key {verifier.id}")
    return _checked(payload, origin)


def _bytes(text: str, origin: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SignatureError(f"{origin} is not a signature: {error}") from error
    if _text(data) != text:  # bits after the last byte
        raise SignatureError(f"{origin} was altered, or is not in base64")
    return data


def _checked(payload: bytes, origin: str) -> Mapping[str, SignedFile]:
    """Parse the signed payload, and check it: even the owner of the key may have signed nonsense."""
    try:
        statement = parse_json(payload, _Statement, f"{origin} cannot be read")
    except FormatError as error:
        raise SignatureError(str(error)) from error
    if statement.piece_bytes != SIGNED_BLOCK_BYTES:
        raise SignatureError(
            f"{origin} has pieces of {statement.piece_bytes} bytes, expected {SIGNED_BLOCK_BYTES}"
        )
    for file in statement.files:
        if problem := _problem(file):
            raise SignatureError(f"{origin}: {printable(file.name[:200])!r} {problem}")
    files = {file.name: file for file in sorted(statement.files, key=lambda file: file.name)}
    if len(files) != len(statement.files):
        raise SignatureError(f"{origin} names a file twice")
    return files


def _problem(file: SignedFile) -> str | None:
    if not is_inside(file.name) or not is_signed_name(file.name):
        return "is not the name of a file that can be signed"
    if file.nbytes < 0 or len(file.sha256) != count_signed_blocks(file.nbytes):
        return f"has {len(file.sha256)} digests for {file.nbytes} bytes"
    if not all(map(_HEX.fullmatch, file.sha256)):
        return "has a digest that is not one of SHA-256"
    return None
