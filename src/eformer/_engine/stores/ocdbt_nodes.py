"""Check the nodes of an OCDBT database before TensorStore reads them, because it allocates as much as they decompress
to.

A node of a few kilobytes may decompress to gigabytes. The check covers all nodes that a reader of the latest version
can reach: the manifest, and the tree of nodes from its last root on. TensorStore parses a node only after this check of
its size. Damaged nodes and values are left to their readers.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import zstandard

from eformer._engine.record.names import is_inside
from eformer._engine.stores.directory import Closing, open_inside, read_range
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MANIFEST, _NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_HEADER = 4 + 8 + 2  # bytes: magic number, length of the node with header, version, compression
_CHECKSUM = 4

_MOST_DECODED = 2**24  # bytes of a node; TensorStore writes at most half as many
_MOST_INNER = 2**20  # bytes of an inner node, for 10,000 children; parsed it takes 200 times as many
_MOST_TIMES = 100  # the most times that a decoded node may be longer than it is stored
# Times the bytes of the files: nodes may be referred to several times, but do not lie within each other.
_MOST_READS = 4


def require_bounded_nodes(directory: Path, manifests: Sequence[str]) -> None:
    """Refuse a database if a node, or all nodes together, decode to far more than is stored.

    `manifests` are the names of its manifests and of the manifests of databases below. TensorStore reports missing
    files.
    """
    walk = _Walk(directory, set())
    for look in (walk.read_manifest, walk.look_through):
        for name in manifests:
            try:
                look(name)
            except (FormatError, CorruptionError):
                raise
            except (ValueError, OverflowError, zstandard.ZstdError) as error:
                raise CorruptionError(
                    f"{directory / name} is not the manifest of an OCDBT database, or it is damaged: {error}"
                ) from error


class _Walk:
    def __init__(self, directory: Path, seen: set[tuple[str, str]]) -> None:
        self._directory, self._seen = directory, seen
        self._stored = self._decoded = 0
        self._sizes: dict[str, int] = {}  # of the files

    def read_manifest(self, name: str) -> bool:
        return self._read(name, 0, None, _MANIFEST) is not None

    def look_through(self, manifest: str) -> None:
        """Check all nodes below a manifest that was read. Of numbered manifests, TensorStore finds the last itself."""
        import tensorstore as ts

        above, _, name = manifest.rpartition("/")
        if not name.endswith(".ocdbt") or not self.read_manifest(manifest):
            return
        where = f"{os.path.realpath(self._directory / above)}/"
        base = ts.KvStore.open({"driver": "file", "path": where}).result()
        todo = [version["root"] for version in ts.ocdbt.dump(base).result()["versions"][-1:]]
        while todo:
            location = todo.pop().get("location")  # a missing root has no nodes
            if location is None or (above, location) in self._seen:
                continue
            self._seen.add((above, location))
            if self._is_inner(above, location):
                with suppress(ValueError):  # damaged: no reader reaches the nodes below
                    todo += ts.ocdbt.dump(base, location).result()["entries"]

    def _is_inner(self, above: str, location: str) -> bool:
        """Tell whether a node exists and has children."""
        _, outer, file, offset, nbytes = location.split(":")
        name = f"{above}/{os.fsdecode(unquote_to_bytes(outer + file))}".removeprefix("/")
        node = self._read(name, int(offset), int(nbytes), _NODE)
        return node is not None and node[:1] > b"\0"  # its height

    def _read(self, file: str, offset: int, nbytes: int | None, kind: bytes) -> bytes | None:
        """Read and decode a node. Return None if it is missing, or is not a node."""
        if not is_inside(file):
            raise FormatError(f"{file[:200]!r} is not a file of the database {self._directory}")
        try:
            with Closing(open_inside(self._directory, file)) as descriptor:
                size = self._sizes[file] = os.fstat(descriptor).st_size
                data = read_range(descriptor, offset, size if nbytes is None else min(nbytes, size))
        except FileNotFoundError:
            return None
        # TensorStore checks the length, too.
        is_sealed = data.startswith(kind) and data[4:12] == len(data).to_bytes(8, "little")
        return self._decode(data, file) if is_sealed else None

    def _decode(self, data: bytes, file: str) -> bytes:
        coding, body = data[12:_HEADER], data[_HEADER:-_CHECKSUM]
        if coding not in (b"\0\0", b"\0\1"):
            raise ValueError("it is of another version, or compressed by another program than zstd")
        most = max(_MOST_DECODED, _MOST_TIMES * len(data))
        if coding[1]:
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
                f"{len(body) - 1}, expected at most {most} bytes or {_MOST_TIMES} times as many as are stored"
            )
        if (
            nbytes := _paths_nbytes(body, 1 if data.startswith(_NODE) else _end_of_config(body))
        ) > _MOST_DECODED:
            raise FormatError(
                f"{self._directory / file} has a node whose table of files takes {nbytes} bytes or more, expected at "
                f"most {_MOST_DECODED}"
            )
        return body


def _paths_nbytes(body: bytes, at: int) -> int:
    """Return the length of all paths in a table of files. Each path is stored as the length that it shares with the
    path before, and its rest, so a few bytes may stand for gigabytes."""
    if at >= len(body):  # a manifest with its versions in files of their own
        return 0
    count, at = _varint(body, at)
    total = 0
    # The shared lengths of all paths but the first, and the lengths of the rests.
    for _ in range(2 * count - 1):
        length, at = _varint(body, at)
        if length > len(body):
            raise ValueError("a path in its table of files is longer than the table")
        total += length
        if total > _MOST_DECODED:
            break
    return total


def _end_of_config(body: bytes) -> int:
    """Return the end of the configuration at the beginning of a manifest."""
    at = 16  # its id
    for _ in range(3):  # kind of manifest, and the most bytes of a value and of a node
        _, at = _varint(body, at)
    is_compressed, at = _varint(body, at + 1)  # after the arity
    return at + 4 if is_compressed else at


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body) or shift > 63:
            raise ValueError("it ends within a number")
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
