"""Change a file within its format: what is around the change stays valid, so that readers get to it."""

from __future__ import annotations

import io
import itertools
import pickletools
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from fuzz import mutate
from fuzz.crc import crc32c, resealed
from fuzz.documents import Literal, parse, written

if TYPE_CHECKING:
    from random import Random

    from fuzz.cases import Case

Edit = "Callable[[bytes, Random, list[bytes]], bytes]"

_MOST = 2**19  # bytes; a case shall stay small


def changed(case: Case, rng: Random, others: list[Case]) -> Case:
    """Return a copy of the case with one to four changes."""
    case = case.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        _change(case, rng, others)
    return case


def _change(case: Case, rng: Random, others: list[Case]) -> None:
    names = sorted(case.files)
    if not names:
        return
    described = [name for name in names if is_json(name, case.files[name])]
    name = rng.choice(described if described and rng.random() < 0.5 else names)
    if rng.random() < 0.02:
        _change_names(case, name, rng)
        return
    other = rng.choice(others) if others else case
    alike = [other.files[one] for one in other.files if one.rpartition(".")[2] == name.rpartition(".")[2]][:8]
    data = edited(name, case.files[name], rng, alike)
    if len(data) <= _MOST:
        case.files[name] = data


def _change_names(case: Case, name: str, rng: Random) -> None:
    """Remove a file, or give it the content of another one."""
    if rng.random() < 0.5 and len(case.files) > 1 and name != case.target:
        del case.files[name]
    else:
        case.files[name] = case.files[rng.choice(sorted(case.files))]


def edited(name: str, data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change a file of this name, most of the time within its format."""
    if rng.random() < 0.2:
        return mutate.damaged(data, rng, others)
    try:
        return editor_of(name, data)(data, rng, others)
    except Exception:  # noqa: BLE001  it is not of that format any more
        return mutate.damaged(data, rng, others)


def editor_of(name: str, data: bytes) -> Any:
    """Tell the format of a file by its name and its first bytes."""
    if is_json(name, data):
        return edit_json
    if name.endswith(".safetensors"):
        return edit_safetensors
    if name.endswith((".msgpack", "/checkpoint")) or name == "checkpoint":
        return edit_msgpack
    if data.startswith(b"\x93NUMPY") or name.endswith(".eqx"):
        return edit_npy
    if data.startswith(b"GGUF"):
        return edit_gguf
    if data.startswith((b"\x80\x02", b"\x80\x04")):
        return edit_pickles
    if data.startswith(b"PK"):
        return edit_zip
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return edit_zstd
    if data.startswith(b"\x1f\x8b"):
        return edit_gzip
    if "ocdbt" in name or "/d/" in name or name.startswith("d/"):
        return edit_ocdbt
    return edit_summed if _summed_at(data) is not None else mutate.damaged


def is_json(name: str, data: bytes) -> bool:
    return data[:1] in (b"{", b"[") and (b'"' in data[:64] or name.endswith((".json", ".zarray")))


def edit_json(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    if rng.random() < 0.1:
        return mutate.damaged(data, rng, others)
    content = parse(data)
    mutate.document(content, rng, _documents(others))
    return written(content).encode(errors="surrogatepass")


def _documents(others: list[bytes]) -> list[Any]:
    found = []
    for data in others[:2]:
        try:
            found.append(parse(data))
        except (ValueError, RecursionError):
            continue
    return found


def edit_safetensors(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change the header, and give it the length that it has then; or change what follows."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        return data[: 8 + length] + mutate.damaged(rest, rng, others)
    return with_header(edit_json(header, rng, []), rest)


def with_header(header: bytes, rest: bytes) -> bytes:
    header += b" " * (-(8 + len(header)) % 64)
    return struct.pack("<Q", len(header)) + header + rest


# ----------------------------------------------------------------------------------------------- msgpack


def edit_msgpack(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    content = [_opened(msgspec.msgpack.decode(data))]
    mutate.document(content, rng, [])
    return msgspec.msgpack.encode(_closed(content[0]))


def _opened(value: Any) -> Any:
    """Replace arrays in extensions by what is in them."""
    if isinstance(value, msgspec.msgpack.Ext):
        return {
            "\x00ext": value.code,
            "data": _opened(msgspec.msgpack.decode(value.data)) if value.data else None,
        }
    if isinstance(value, dict):
        return {key: _opened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    return value


def _closed(value: Any) -> Any:
    if isinstance(value, dict) and "\x00ext" in value:
        code = value["\x00ext"]
        inner = msgspec.msgpack.encode(_closed(value.get("data")))
        return msgspec.msgpack.Ext(code if isinstance(code, int) and -128 <= code < 128 else 1, inner)
    if isinstance(value, dict):
        return {_closed(key): _closed(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_closed(inner) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value % 2**64)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value.text if isinstance(value, Literal) else value


# ------------------------------------------------------------------------------------------------- numpy


def edit_npy(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change the header of one of the arrays, or a byte of its data."""
    starts = [at for at in range(len(data)) if data.startswith(b"\x93NUMPY", at)]
    if not starts or rng.random() < 0.2:
        return mutate.damaged(data, rng, others)
    at = rng.choice(starts)
    size = 2 if data[at + 6] == 1 else 4
    begin = at + 8 + size
    length = int.from_bytes(data[at + 8 : begin], "little")
    header = literal_changed(data[begin : begin + length].decode("latin1"), rng).encode("latin1", "replace")
    header += b" " * (-(len(header) + begin + 1) % 64) + b"\n"
    return data[: at + 8] + len(header).to_bytes(4, "little")[:size] + header + data[begin + length :]


_LITERALS = (
    "()", "(1,)", "(0,)", "(-1,)", "(2, 3)", "(10**9,)", "(99999999999,)", "(1.5,)", "(True,)", "[2]", "None", "True", "'<f4'",
    "'|O'", "'<U3'", "'|V4'", "'>i2'", "[('a','<f4')]", "'<M8[s]'", "'|S0'", "1", "-1", "{}", "('a',)", "(((((1,),),),),)",
    "9" * 5000, "(" * 300 + ")" * 300, "-" * 3000 + "1", "__import__('os')", "f''", "'\\ud800'", "b'<f4'", "2j", "{*()}",
    "(1,) * 9", "'f4'", "'bfloat16'", "'<f2'", "'float8_e5m2'", "'<c8'", "'|b1'", "'<V2'", "'|u1'", "'<f16'", "''", "(2**63,)",
    "(0, 9223372036854775807)", "(4294967296, 4294967296)", "(1,)*65", "'=f4'", "'|f4'", "'V'", "'<4f4'", "'2<f4'",
)  # fmt: skip


def literal_changed(text: str, rng: Random) -> str:
    """Change the literal of Python that a header of npy is."""
    text = text.strip()
    colons = [at for at, char in enumerate(text) if char == ":"]
    kind = rng.randrange(4)
    if kind == 0 or not colons:
        return mutate.damaged(text.encode("latin1", "replace"), rng, []).decode("latin1")
    at = rng.choice(colons) + 1
    stop = text.find(", '", at)
    stop = len(text) - 1 if stop < 0 else stop
    if kind == 1:
        return text[: at - 2] + rng.choice(("", "x", "\\x00")) + text[at - 2 :]
    return f"{text[:at]} {rng.choice(_LITERALS)}{text[stop:]}"


def edit_zip(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change a member, its name or its flags, with a right CRC; or bytes of the archive itself."""
    if rng.random() < 0.3:
        return mutate.damaged(data, rng, others)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info), info.compress_type) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, content, how = members[at]
    kind = rng.randrange(6)
    if kind == 0:
        name = rng.choice((*mutate.TEXTS[:40], name[:-1], name + ".npy", members[0][0]))
        name = name.encode(errors="replace").decode().replace("\x00", "")
    elif kind == 1:
        how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    else:
        content = edited(name, content, rng, [])
    members[at] = (name, content, how)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for each, inner, method in members:
            archive.writestr(zipfile.ZipInfo(each or "x"), inner, method)
    return out.getvalue()


# ------------------------------------------------------------------------------------------ pickles, GGUF


def edit_pickles(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change one operation of one of the pickles that a file begins with: its bytes, its place, or how often it is there."""
    at, begin = rng.choice(_operations(data))
    stop, operation = begin + len(at), at
    kind = rng.randrange(5)
    if kind == 0:
        operation = b""
    elif kind == 1:
        operation = rng.choice(_operations(data))[0]
    elif kind == 2:
        operation = at * rng.choice((2, 3, 50))
    elif kind == 3:
        operation = rng.choice(_OPERATIONS) + at[rng.randrange(2) :]
    else:
        operation = at[:1] + mutate.damaged(at[1:], rng, [])
    return data[:begin] + operation + data[stop:]


_OPERATIONS = [operation.code.encode("latin1") for operation in pickletools.opcodes]


@lru_cache(256)  # inputs begin with the same few files again and again
def _operations(data: bytes) -> list[tuple[bytes, int]]:
    """List the operations of the pickles at the beginning, with where they are."""
    stream, found = io.BytesIO(data), []
    try:
        while True:
            starts = [at for _, _, at in pickletools.genops(stream)] + [stream.tell()]
            found += [(data[at:stop], at) for at, stop in itertools.pairwise(starts)]
    except ValueError:
        return found


def edit_gguf(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change a number of the header: a count, a length, a type, a size or an offset; or any bytes."""
    if rng.random() < 0.3:
        return mutate.damaged(data, rng, others)
    size = rng.choice((4, 8))
    at = rng.choice(_small_numbers(data, size))
    before = int.from_bytes(data[at : at + size], "little")
    number = rng.choice((before + 1, before - 1, before + 32, rng.randrange(45), *mutate.NUMBERS))
    return data[:at] + (number % 256**size).to_bytes(size, "little") + data[at + size :]


@lru_cache(256)
def _small_numbers(data: bytes, size: int) -> list[int]:
    return [at for at in range(4, min(len(data), 4096) - size) if not any(data[at + 2 : at + size])]


# ------------------------------------------------------------------------------------------------ chunks


def edit_summed(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change what a checksum at the end is of, such as the index of a shard of zarr 3, and give it a right one."""
    start = _summed_at(data)
    body = mutate.damaged(data[start:-4], rng, others)
    return data[:start] + body + struct.pack("<I", crc32c(body))


@lru_cache(256)
def _summed_at(data: bytes) -> int | None:
    """Return where the bytes begin whose CRC-32C the last four are; None if there is none."""
    if not 4 < len(data) < 4096:
        return None
    (found,) = struct.unpack("<I", data[-4:])
    starts = [0, *range(len(data) - 20, 0, -16)]
    return next((at for at in starts[:33] if crc32c(data[at:-4]) == found), None)


def edit_zstd(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change what a frame decompresses to, or the frame."""
    if rng.random() < 0.5:
        return mutate.damaged(data, rng, others)
    content = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    content = mutate.damaged(content, rng, [])
    return zstandard.ZstdCompressor(level=1, write_content_size=rng.random() < 0.7).compress(content)


def edit_gzip(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    if rng.random() < 0.4:
        return mutate.damaged(data, rng, others)
    content = zlib.decompress(data, 31)
    content = edited("x.msgpack" if content[:1] > b"\x7f" else "x", content, rng, [])
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(content) + packer.flush()


def edit_ocdbt(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change bytes of a database, and give its nodes the checksums that they have then."""
    return resealed(mutate.damaged(data, rng, others))
