"""The records of several processes that wrote one tree. Each has the extents that its process wrote.

Tests: tests/engine/formats/test_process_records.py, tests/engine/saving/test_commit.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from eformer._engine.record.check import check_boxes, check_tree
from eformer._engine.record.manifest import (
    DataFile,
    Extent,
    LeafEntry,
    TreeEntry,
    boxed_tree,
    encode_leaves,
)
from eformer._engine.record.values import parse_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.manifest import BoxedTree


class ProcessRecord(Struct, omit_defaults=True):
    """The extents that one of several processes wrote, into the file with this record or into `files` of its own.

    `sha256` has the leaves that the process held whole, if checksums were asked for.
    """

    extents: dict[str, tuple[Extent, ...]] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    files: tuple[DataFile, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, origin: str) -> ProcessRecord:
        return parse_json(data, ProcessRecord, f"{origin} does not contain a readable process record")


def with_records(tree: TreeEntry, records: Mapping[int, ProcessRecord]) -> TreeEntry:
    """Return the tree as if one process had written it. `records` are the records of all its files, by number."""
    entries = tree.listed_leaves()
    files, leaves = _joined(tree, entries, records, entries)
    tree = replace(
        tree, files=files, wholeness=msgspec.UNSET, owners=msgspec.UNSET, raw_leaves=encode_leaves(leaves)
    )
    check_tree(tree)
    return tree


def with_some_records(
    tree: TreeEntry,
    entries: Mapping[str, LeafEntry],
    records: Mapping[int, ProcessRecord],
    wanted: Mapping[str, Sequence[Box] | None],
) -> BoxedTree:
    """Return the tree with the `wanted` leaves alone, and at least their wanted boxes; None is a whole leaf.

    `records` are the records of the files that hold the boxes, by number. Raise a FormatError if a box is missing.
    """
    files, leaves = _joined(tree, entries, records, wanted)
    boxed = boxed_tree(tree, leaves, files=files, wholeness=msgspec.UNSET, owners=msgspec.UNSET)
    check_tree(boxed)
    for name, boxes in wanted.items():
        check_boxes(name, leaves[name], boxes, boxed)
    return boxed


def _joined(
    tree: TreeEntry,
    entries: Mapping[str, LeafEntry],
    records: Mapping[int, ProcessRecord],
    names: Container[str],
) -> tuple[tuple[DataFile, ...], dict[str, LeafEntry]]:
    """Join records: return all files, and the leaves that are in `names` with their extents."""
    leaves = {name: entry for name, entry in entries.items() if name in names}
    extents: dict[str, list[Extent]] = {name: list(entry.extents) for name, entry in leaves.items()}
    sha256: dict[str, str] = {}
    files = list(tree.files)
    for number, record in records.items():
        if unknown := [name for name in record.extents if name not in entries]:
            raise FormatError(
                f"{tree.files[number].name} has leaves that the manifest does not list: {sorted(unknown)[:3]}"
            )
        first = len(files) if record.files else number
        for name, found in record.extents.items():
            if name in extents:
                extents[name] += [replace(extent, file=first + extent.file) for extent in found]
        files += record.files
        sha256 |= record.sha256
    whole = {
        name: replace(entry, extents=tuple(extents[name]), sha256=sha256.get(name))
        for name, entry in leaves.items()
    }
    return tuple(files), whole
