"""Read trees that several processes wrote. Each process stored its record beside its bytes; the manifest has the
digests of the records."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.found import Trees, files_of
from eformer._engine.formats.safetensors.header import metadata_in
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.record.by_process import ProcessRecord, with_records, with_some_records
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.manifest import BoxedTree, LeafEntry, TreeEntry
from eformer._engine.record.owners import files_with
from eformer._engine.tasks.pool import run_all
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.stores.base import Files, Store

_MOST_BYTES = 2**30  # a record takes a few hundred bytes for a leaf
_LONG = 2**26
CARRIED = "part"  # the name of a record in the metadata of a safetensors file


def joined_trees(
    store: Store,
    recorded: Mapping[str, TreeEntry],
    described: Mapping[str, Callable[[], TreeEntry]] | None = None,
    also: Mapping[str, Callable[[], TreeEntry]] | None = None,
) -> Mapping[str, TreeEntry]:
    """Return trees by prefix: the trees that a manifest has `recorded`, and trees to be `described` on first use. If
    several processes wrote a recorded tree, their records are read on first use, too."""
    if not described and not any(tree.wholeness for tree in recorded.values()):
        return recorded
    joined = {prefix: partial(_joined, store, tree) for prefix, tree in recorded.items() if tree.wholeness}
    listed = {prefix: partial(_listed, store, tree) for prefix, tree in recorded.items() if tree.wholeness}
    whole = {prefix: tree for prefix, tree in recorded.items() if prefix not in joined}
    return Trees(whole, {**joined, **(described or {})}, also or {}, listed)


def _joined(store: Store, tree: TreeEntry) -> TreeEntry:
    return with_records(tree, _read_all(store, tree, range(len(tree.files))))


# ----------------------------------------------------------------------------------- some of the records


class ListedLeaf(LeafEntry, frozen=True, array_like=True, gc=False):
    """A leaf without extents. `stored_name` is its name in the tree; a load may rename the leaf."""

    stored_name: str = ""


class ListedTree(BoxedTree, frozen=True, kw_only=True, dict=True):
    """A tree of several processes whose leaves have no extents yet: `locate` reads the records with the extents of some
    leaves."""

    store: Store

    def locate(self, wanted: Mapping[str, Sequence[Box] | None]) -> TreeEntry:
        """Return the tree with these leaves alone, and the extents of at least the wanted boxes. None is a whole leaf.

        Only the records of files that hold a wanted box are read; all records, if the manifest has no table of owners.
        """
        records = _read_all(self.store, self, self._holders(wanted))
        return with_some_records(self, self.boxed, records, wanted)

    def _holders(self, wanted: Mapping[str, Sequence[Box] | None]) -> Sequence[int]:
        if not self.owners:
            return range(len(self.files))
        if len(self.owners.files) != len(self.files):
            raise FormatError(
                f"the manifest has the boxes of {len(self.owners.files)} files, but names {len(self.files)} files"
            )
        numbers = {name: number for number, name in enumerate(self.boxed) if name in wanted}
        wants = ((numbers[name], boxes) for name, boxes in wanted.items())
        return files_with(self.owners, len(self.boxed), wants)


def _listed(store: Store, tree: TreeEntry) -> ListedTree:
    leaves: dict[str, LeafEntry] = {
        name: ListedLeaf(e.dtype, e.shape, (), e.home, e.key, e.sharding, stored_name=name)
        for name, e in tree.listed_leaves().items()
    }
    fields = {name: getattr(tree, name) for name in tree.__struct_fields__}
    return ListedTree(**fields, boxed=leaves, store=store)


def _read_all(store: Store, tree: TreeEntry, numbers: Sequence[int]) -> dict[int, ProcessRecord]:
    """Read the records of these files."""
    files = files_of(store, tree)
    records = {number: ProcessRecord() for number in numbers}

    def read(number: int) -> None:
        records[number] = _read(tree, number, files, store.path_to(tree.path_of(number)))

    with closing(files):
        run_all([partial(read, number) for number in numbers], store.read_threads)
    return records


# ------------------------------------------------------------------------------------------------ read


def unreadable(store: Store, tree: TreeEntry) -> list[tuple[str, str]]:
    """List the files whose record cannot be read, with the reasons."""
    problems = []
    with closing(files_of(store, tree)) as files:
        for number in range(len(tree.files)):
            name = tree.path_of(number)
            try:
                _read(tree, number, files, store.path_to(name))
            except (OSError, FormatError) as error:
                problems.append((name, str(error)))
    return problems


def _read(tree: TreeEntry, number: int, files: Files, origin: str) -> ProcessRecord:
    file = tree.files[number]
    if file.header_nbytes > _MOST_BYTES:
        raise FormatError(
            f"{origin}: a record of {file.header_nbytes} bytes is too long, expected at most {_MOST_BYTES}"
        )
    # The file may be shorter than the manifest says. For a record of usual length that is not worth a request.
    is_long = file.header_nbytes > _LONG
    header = bytearray(min(file.header_nbytes, files.nbytes(number)) if is_long else file.header_nbytes)
    found = files.read_into(number, memoryview(header), 0)
    digest = xxh3_128(memoryview(header)[:found])
    if digest != file.header:
        raise CorruptionError(
            f"{origin} is damaged: its first {file.header_nbytes} bytes have digest {digest}, expected {file.header}. "
            "They say where the leaves are; restore the file from a copy, or load an older checkpoint"
        )
    data = bytes(header)
    if not file.name.endswith(SUFFIX):
        return ProcessRecord.from_json(data, origin)
    metadata = metadata_in(data, f"{origin} has no valid record of its process")
    return ProcessRecord.from_json(metadata.get(CARRIED, ""), origin)
