"""Read trees that several processes wrote. Their records are stored with their bytes, the digests in the manifest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.found import Trees, files_of
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.manifest import ProcessRecord, with_process_records
from eformer._engine.record.values import parse_json
from eformer._engine.tasks.pool import default_threads, run_all
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files, Store

_MOST_BYTES = 2**30  # a few hundred bytes for a leaf
CARRIED = "part"  # the key of a record in the metadata of a safetensors file


def joined_trees(
    store: Store,
    ours: Mapping[str, TreeEntry],
    others: Mapping[str, Callable[[], TreeEntry]] | None = None,
    also: Mapping[str, Callable[[], TreeEntry]] | None = None,
) -> Trees:
    """Return trees by prefix; a tree in parts is put together on first use."""
    in_parts = {prefix: partial(_joined, store, tree) for prefix, tree in ours.items() if tree.parts}
    whole = {prefix: tree for prefix, tree in ours.items() if prefix not in in_parts}
    return Trees(whole, {**in_parts, **(others or {})}, also or {})


def _joined(store: Store, tree: TreeEntry) -> TreeEntry:
    files = files_of(store, tree)
    parts = [ProcessRecord() for _ in tree.files]

    def read(number: int) -> None:
        parts[number] = _read(tree, number, files, store.path_to(tree.path_of(number)))

    try:
        run_all([partial(read, number) for number in range(len(parts))], default_threads())
    finally:
        files.close()
    return with_process_records(tree, parts)


def unreadable(store: Store, tree: TreeEntry) -> list[tuple[str, str]]:
    """List the files whose part of the record cannot be read, with the reasons."""
    problems = []
    files = files_of(store, tree)
    try:
        for number in range(len(tree.files)):
            name = tree.path_of(number)
            try:
                _read(tree, number, files, store.path_to(name))
            except (OSError, FormatError) as error:
                problems.append((name, str(error)))
    finally:
        files.close()
    return problems


def _read(tree: TreeEntry, number: int, files: Files, origin: str) -> ProcessRecord:
    file = tree.files[number]
    if file.header_nbytes > _MOST_BYTES:
        raise FormatError(f"{origin}: a record of {file.header_nbytes} bytes is too long")
    header = bytearray(min(file.header_nbytes, files.nbytes(number)))
    found = files.read_into(number, memoryview(header), 0)
    digest = xxh3_128(memoryview(header)[:found])
    if digest != file.header:
        raise CorruptionError(
            f"{origin} is damaged: its first {file.header_nbytes} bytes have digest {digest}, expected {file.header}. "
            "They say where the leaves are; restore the file from a copy, or load an older checkpoint"
        )
    data = bytes(header)
    return ProcessRecord.from_json(_carried(data, origin) if file.name.endswith(SUFFIX) else data, origin)


class _Metadata(msgspec.Struct):
    part: str


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def _carried(header: bytes, origin: str) -> str:
    return parse_json(header[8:], _Header, f"{origin} has no valid record of its process").metadata.part
