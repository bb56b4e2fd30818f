"""List the files of a directory that a reader leaves out although they may hold leaves.

A reader of directories of other programs names the files and directories that it reads. Every other file below the
directory is left out, unless it is hidden, belongs to a checkpoint by eformer in a directory of its own, or has a name
that is known not to hold leaves, such as README.md, config.json or tokenizer.model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.digests import has_own_digest
from eformer._engine.record.indexes import INDEX, MANIFEST
from eformer._engine.record.signature import SIGNATURE
from eformer._engine.record.values import parse_lenient
from eformer._engine.record.zarray import (
    ZARR_JSON,
    ZARRAY,
    ChunkShape,
    Shape,
    chunk_counts,
    is_index,
    parse_zarray,
)
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from eformer._engine.stores.base import Store

MOST_DEPTH = 100  # levels of directories to enter

_CHUNK_DIRECTORY = re.compile(r"c|\d+")

_WITHOUT_LEAVES = (
    "*.json", "*.jsonl", "*.md", "*.rst", "*.txt", "*.text", "*.log", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.ini",
    "*.gin", "*.pbtxt", "*.csv", "*.tsv", "*.html", "*.xml", "*.py", "*.sh", "*.ipynb", "*.jinja", "*.lock", "*.sha256",
    "*.md5", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4",
    "*.out", "*.err", "stdout", "stderr",
    "README", "LICENSE", "LICENSE.*", "LICENCE", "LICENCE.*", "NOTICE", "NOTICE.*", "COPYING", "USE_POLICY*",
    "tokenizer.model*", "spiece.model", "sentencepiece*.model", "*.spm", "*.tiktoken", "vocab", "vocab.*", "merges.*",
    "training_args.bin", "events.out.tfevents.*", "_SUCCESS", SIGNATURE, f"*.{SIGNATURE}",
)  # fmt: skip


def left_out(store: Store, read: AbstractSet[str]) -> tuple[str, ...]:
    """List the paths below the store that are left out. A whole directory, such as an array, is one path that ends in a
    slash.

    read  the paths of the files and directories that the reader reads. A directory covers everything below it, but the
          directory of an array covers only its chunks. "" stands for a store that is one array.
    """
    return tuple(sorted(_strays(store, "") if "" in read else _unread(store, read)))


def holds_leaves(store: Store) -> bool:
    """Tell whether a file below the store may hold leaves and belongs to no checkpoint by eformer. Stop at the first
    such file."""
    return next(_unread(store, frozenset()), None) is not None


def _unread(store: Store, read: AbstractSet[str]) -> Iterator[str]:
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        try:
            kinds = store.kinds(path)
        except OSError:  # its contents are unknown
            yield f"{path}/"
            continue
        if path and is_eformer_checkpoint(store, path):
            continue
        is_array = path and kinds.keys() & {ZARRAY, ZARR_JSON, DATABASE_MANIFEST}
        if is_array and not any(name.startswith(f"{path}/") for name in read):
            yield f"{path}/"
            continue
        for name, kind in kinds.items():
            below = f"{path}/{name}" if path else name
            if name.startswith("."):
                continue
            if below in read:
                yield from _strays(store, below) if kind == "directory" else ()
                continue
            if kind != "directory":
                if may_hold_leaves(name):
                    yield below
            elif depth < MOST_DEPTH:
                todo.append((below, depth + 1))
            else:
                yield f"{below}/"


def _strays(store: Store, array: str) -> Iterator[str]:
    """List the files and directories in the directory of an array that neither describe it nor are its chunks."""
    start = f"{array}/" if array else ""
    chunks = chunk_names(store, array)
    todo = [""] if chunks else []
    while todo and chunks:
        folder = todo.pop()
        for name, kind in store.kinds(f"{start}{folder}".rstrip("/")).items():
            path = f"{folder}{name}"
            if name.startswith(".") or path == ZARR_JSON or chunks.has(path):
                continue
            if kind != "directory":
                if may_hold_leaves(name):
                    yield f"{start}{path}"
            elif path.count("/") <= len(chunks.counts) and _CHUNK_DIRECTORY.fullmatch(name):
                todo.append(f"{path}/")
            else:
                yield f"{start}{path}/"


def may_hold_leaves(name: str) -> bool:
    return name == ZARR_JSON or not any(fnmatchcase(name, pattern) for pattern in _WITHOUT_LEAVES)


def is_eformer_checkpoint(store: Store, path: str) -> bool:
    """Tell whether a directory is a checkpoint of its own: it has an index of arrays, or a manifest by eformer."""
    try:
        if store.exists(f"{path}/{INDEX}"):
            return True
        return has_own_digest(store.read(f"{path}/{MANIFEST}", 0, _BEGINNING)[0])
    except (OSError, FormatError):
        return False


_BEGINNING = 2**10


# ------------------------------------ names of chunks, whichever version of zarr describes the array


class _Grid(msgspec.Struct):
    chunk_shape: ChunkShape


class _ChunkGrid(msgspec.Struct):
    configuration: _Grid


class _Encoding(msgspec.Struct):
    name: str = "default"
    configuration: dict[str, Any] = {}


class _Zarr3(msgspec.Struct):
    shape: Shape
    chunk_grid: _ChunkGrid
    chunk_key_encoding: _Encoding = msgspec.field(default_factory=_Encoding)


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The names of an array's chunks: `first`, then one number for each axis, each less than its entry in `counts`."""

    counts: tuple[int, ...]
    separator: str
    first: str = ""

    def has(self, name: str) -> bool:
        """Tell whether a path in the array's directory is the path of a chunk."""
        if not self.counts:
            return name == (self.first or "0")
        numbers = name.split(self.separator)
        if self.first and numbers.pop(0) != self.first:
            return False
        return is_index(numbers, self.counts)


def chunk_names(store: Store, path: str) -> ChunkNames | None:
    """Read the names of the chunks of the array in a directory. Return None if the directory has no description of an
    array, or an invalid one."""
    for name, parse in ((ZARRAY, _of_zarr2), (ZARR_JSON, _of_zarr3)):
        where = f"{path}/{name}" if path else name
        try:
            return parse(read_whole(store, where)[0], store.path_to(where))
        except FileNotFoundError:
            continue
        except (FormatError, OSError):
            return None
    return None


def _of_zarr2(data: bytes, origin: str) -> ChunkNames:
    array = parse_zarray(data, origin)
    return ChunkNames(array.counts, array.dimension_separator)


def _of_zarr3(data: bytes, origin: str) -> ChunkNames:
    array = parse_lenient(data, _Zarr3, origin)
    counts = chunk_counts(array.shape, array.chunk_grid.configuration.chunk_shape)
    encoding = array.chunk_key_encoding
    is_default = encoding.name == "default"
    separator = encoding.configuration.get("separator") or ("/" if is_default else ".")
    return ChunkNames(counts, str(separator), "c" if is_default else "")
