"""Check the nodes of an OCDBT database before TensorStore allocates the memory that they decompress to.

A node of a few kilobytes may decompress to gigabytes. The check follows the path of a reader of the latest version: the
manifest, and the tree of nodes from its last root on. TensorStore checks checksums and values. The parser here is small
because `tensorstore.ocdbt.dump`, which parses the same nodes, never frees its results.

Tests: tests/engine/formats/test_hostile_arrays.py.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zstandard
from msgspec import Struct

from eformer._engine.record.names import is_inside
from eformer._engine.stores.directory import Closing, open_inside, read_range
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MANIFEST, _NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_HEADER = 4 + 8  # bytes: what it is, and its length with all of this
_CHECKSUM = 4
_NONE = 2**64 - 1  # the offset of a root that is not there

_MOST_DECODED = 2**24  # bytes of a node, of which TensorStore writes at most half
_MOST_INNER = 2**20  # bytes of a node above others, which names 10,000 nodes then
_MOST_TIMES = 100  # as long as it is stored
_MOST_READS = 4  # of the files: nodes may be referred to in several ways, but do not lie within each other


class _Reference(Struct, frozen=True):
    """The place of a node: a range of a file, and the directory that its own references are relative to."""

    base: str
    file: str
    offset: int
    nbytes: int


def require_bounded_nodes(directory: Path, manifests: Iterable[str]) -> None:
    """Refuse a database with a node, or with nodes together, that decode to far more than is stored.

    `manifests` are the names of its manifests, and of the manifests of databases below it. TensorStore reports missing
    files.
    """
    walk = _Walk(directory, set())
    for name in manifests:
        with _understood(directory / name):
            walk.look_through(name)


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OverflowError, zstandard.ZstdError) as error:
        if isinstance(error, (FormatError, CorruptionError)):
            raise
        raise CorruptionError(
            f"{path} is not the manifest of an OCDBT database, or it is damaged: {error}"
        ) from error


class _Walk:
    def __init__(self, directory: Path, seen: set[_Reference]) -> None:
        self._directory, self._seen = directory, seen
        self._stored = self._decoded = 0
        self._sizes: dict[str, int] = {}  # of the files

    def look_through(self, manifest: str) -> None:
        outer = manifest.rpartition("/")[0]
        found = self._read(_Reference("", manifest, 0, _NONE), _MANIFEST)
        todo: list[_Reference] = []
        if found:
            with self._naming(manifest):
                todo = _root(found, f"{outer}/" if outer else "")
        while todo:
            reference = todo.pop()
            if reference not in self._seen:
                self._seen.add(reference)
                if node := self._read(reference, _NODE):
                    with self._naming(reference.file):
                        todo += _children(node, reference.base)

    @contextmanager
    def _naming(self, file: str) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            raise FormatError(f"{self._directory / file} has {error}") from None

    def _read(self, reference: _Reference, kind: bytes) -> _Fields | None:
        """Read and decode a node; None if it is not there, or not a node."""
        if not is_inside(reference.file):
            raise FormatError(f"{reference.file[:200]!r} is not a file of the database {self._directory}")
        try:
            with Closing(open_inside(self._directory, reference.file)) as descriptor:
                size = self._sizes[reference.file] = os.fstat(descriptor).st_size
                data = read_range(descriptor, reference.offset, min(reference.nbytes, size))
        except FileNotFoundError:
            return None
        return self._decode(data, reference.file) if _is_sealed(data, kind) else None

    def _decode(self, data: bytes, file: str) -> _Fields:
        head = _Fields(data[_HEADER:-_CHECKSUM])
        head.number()  # the version
        is_compressed, body = head.number() != 0, head.rest()
        most = max(_MOST_DECODED, _MOST_TIMES * len(data))
        if is_compressed:
            with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as stream:
                body = stream.read(most + 1)
        self._stored, self._decoded = self._stored + len(data), self._decoded + len(body)
        if self._stored > _MOST_READS * sum(self._sizes.values()):
            raise FormatError(f"{self._directory / file} has nodes that lie within each other")
        if data.startswith(_NODE) and body[:1] > b"\0":
            most = _MOST_INNER
        if len(body) > most or self._decoded > _MOST_TIMES * self._stored + 4 * _MOST_DECODED:
            raise FormatError(
                f"{self._directory / file} has a node of {len(data)} bytes that decodes to more than "
                f"{len(body) - 1} bytes, expected at most {most} bytes or {_MOST_TIMES} times the stored bytes"
            )
        return _Fields(body)


def _is_sealed(data: bytes, kind: bytes) -> bool:
    """Tell whether the bytes are of this kind and have the length that they say, which TensorStore requires, too."""
    return data.startswith(kind) and data[len(kind) : _HEADER] == len(data).to_bytes(8, "little")


# --------------------------------------------------------------------------------------------- fields


class _Fields:
    """The numbers and texts of a node, one after the other. Raises EOFError at its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._nbytes = io.BytesIO(data), len(data)

    def take(self, nbytes: int) -> bytes:
        found = self._data.read(nbytes)
        if len(found) < nbytes:
            raise EOFError("it ends early")
        return found

    def rest(self) -> bytes:
        return self._data.read()

    def number(self) -> int:
        """Read a number of seven bits in each byte, the lowest first."""
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def check_files(self) -> None:
        """Check the size of the table of files that follows, without making its paths.

        A path is stored as the number of bytes that it shares with the path before, and the rest: a few bytes may stand
        for gigabytes.
        """
        start, total = self._data.tell(), 0
        for _ in range(
            2 * self.number() - 1
        ):  # the shared bytes of all but the first, and the own bytes of all
            if (nbytes := self.number()) > self._nbytes:
                raise ValueError("a path in it is longer than all of it")
            if (total := total + nbytes) > _MOST_DECODED:
                raise FormatError(
                    f"a node whose table of files takes {total} bytes or more, expected at most {_MOST_DECODED}"
                )
        self._data.seek(start)

    def files(self, above: str) -> list[tuple[str, str]]:
        """Read the table of files: for each file the directory that references in it are relative to, and its path."""
        self.check_files()
        count = self.number()
        shared, own, bases = self.numbers(max(0, count - 1)), self.numbers(count), self.numbers(count)
        found, path = [], b""
        for prefix, suffix, base in zip((0, *shared), own, bases, strict=False):
            path = path[:prefix] + self.take(suffix)
            found.append((above + os.fsdecode(path[:base]), above + os.fsdecode(path)))
        return found

    def references(self, count: int, files: list[tuple[str, str]]) -> list[_Reference]:
        numbers, offsets, lengths = self.numbers(count), self.numbers(count), self.numbers(count)
        if any(number >= len(files) for number in numbers):
            raise ValueError("a reference to a file that is not in the table")
        return [
            _Reference(*files[n], at, nbytes) for n, at, nbytes in zip(numbers, offsets, lengths, strict=True)
        ]


def _root(manifest: _Fields, above: str) -> list[_Reference]:
    """Return the root of the last version; nothing if there is none, or the versions are in other files."""
    manifest.take(16)  # the id of the database
    if manifest.number():  # its versions are in other files, manifest.0000000000000001 and so on
        return []
    manifest.numbers(2)  # the largest value in a node, and the largest node
    manifest.take(1)  # the versions in a node
    if manifest.number():  # compressed by zstd, at some level
        manifest.take(4)
    files = manifest.files(above)
    count = manifest.number()
    manifest.numbers(count)  # generations
    manifest.take(count)  # heights
    return [each for each in manifest.references(count, files)[-1:] if each.offset != _NONE]


def _children(node: _Fields, above: str) -> list[_Reference]:
    """Return the nodes below a node; a leaf has none."""
    (height,) = node.take(1)
    if not height:
        node.check_files()
        return []
    files = node.files(above)
    count = node.number()
    node.numbers(max(0, count - 1))  # the bytes of each key that it shares with the one before
    own = node.numbers(count)
    node.numbers(count)  # the bytes that all keys below share
    node.take(sum(own))
    return node.references(count, files)
