"""Read files from their disk before a save links them, so that no new checkpoint shares a damaged file.

Several checkpoints share one copy of a linked file, and a damaged byte damages all of them. The save still has the
leaves in memory and can write a damaged file anew. The price is one read of the linked files, at most once in
`_TRUSTED_SECONDS`.

Tests: tests/engine/saving/test_reuse.py, tests/engine/runs/test_run.py.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.record.digests import DIGEST_DIGITS, xxh3_128
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import piece_sizes
from eformer._engine.stores.directory import content_of
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.local_files import medium
from eformer._engine.tasks.pool import run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.record.manifest import Extent, TreeEntry
    from eformer._engine.stores.base import Entry, Store
    from eformer._engine.stores.local_files import Medium

GONE = ""
_TRUSTED_SECONDS = 600.0
_READ_BYTES = 4 * 2**20  # one read
_TASK_BYTES = 64 * 2**20  # reads that share an open file and its memory

# When this process last read a leaf, or a shard of one, and found it sound; by the identity of the file's content and
# the offset. A file that is written to has another identity. Other leaves in the file may be damaged.
_sound: dict[tuple[str, int], float] = {}


@dataclass(frozen=True, slots=True)
class Stored:
    """A range of bytes in a file, a piece of a leaf or the header, with its digest from the time of writing."""

    content: str
    offset: int
    nbytes: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def find_damaged(
    store: Store,
    tree: TreeEntry,
    entries: Mapping[int, Entry],
    leaves: Mapping[str, Sequence[Extent]],
    threads: int,
) -> dict[int, str]:
    """Read the bytes of the leaves in these files. Return the damage of each damaged file, GONE for a removed file.

    Objects of a bucket are not read: the server checks an object when it copies it, and each step has its own objects.
    """
    place = on_disk(store)
    if place is None:
        return {}
    _forget_old()
    contents = {number: content_of(entry.version) for number, entry in entries.items()}
    due = {
        leaf: [e for e in extents if e.file in entries and (contents[e.file], e.offset) not in _sound]
        for leaf, extents in leaves.items()
    }
    damages: dict[int, str] = {}
    run_all(
        [
            partial(_check, place, entries[number].name, task, partial(damages.setdefault, number))
            for number, pieces in _pieces(tree, due).items()
            for task in _batches(pieces, _TASK_BYTES)
        ],
        threads,
    )
    now = time.monotonic()
    read = [extent for extents in due.values() for extent in extents if extent.file not in damages]
    _sound.update(((contents[extent.file], extent.offset), now) for extent in read)
    return damages


def _forget_old() -> None:
    now = time.monotonic()
    for part, then in list(_sound.items()):
        if now - then > _TRUSTED_SECONDS:
            _sound.pop(part, None)  # another save may have removed it


def _pieces(tree: TreeEntry, leaves: Mapping[str, Sequence[Extent]]) -> dict[int, list[Stored]]:
    """List the pieces of the leaves in each file, in their order there, and the header of each."""
    found: dict[int, list[Stored]] = {}
    for leaf, extents in leaves.items():
        for extent in extents:
            file = tree.files[extent.file]
            if extent.file not in found:
                header = Stored("the header", 0, file.header_nbytes, file.header)
                found[extent.file] = [header] if file.header else []
            found[extent.file] += _pieces_of(tree, leaf, extent)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.offset)
    return found


def _pieces_of(tree: TreeEntry, leaf: str, extent: Extent) -> Iterator[Stored]:
    entry = tree.leaves[leaf]
    offset = tree.files[extent.file].header_nbytes + extent.offset
    sizes = piece_sizes(entry.region_of(extent).shape, dtype_from_name(entry.dtype).itemsize, tree.block)
    for number, nbytes in enumerate(sizes):
        yield Stored(
            f"leaf {leaf!r}", offset, nbytes, extent.digests[DIGEST_DIGITS * number :][:DIGEST_DIGITS]
        )
        offset += nbytes


def _batches(pieces: Sequence[Stored], most: int) -> Iterator[list[Stored]]:
    """Group pieces that lie within `most` bytes. A larger piece is alone."""
    batch: list[Stored] = []
    for piece in pieces:
        if batch and piece.end - batch[0].offset > most:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _check(place: Path, name: str, pieces: Sequence[Stored], report: Callable[[str], object]) -> None:
    """Compare pieces of a file with their digests, and report the first that differs or cannot be read."""
    reads = list(_batches(pieces, _READ_BYTES))
    try:
        with medium(place, name, max(read[-1].end - read[0].offset for read in reads)) as file:
            for read in reads:
                _compare(file, read)
    except FileNotFoundError:
        report(GONE)
    except (OSError, FormatError) as error:
        report(str(error))


def _compare(file: Medium, pieces: Sequence[Stored]) -> None:
    start = pieces[0].offset
    data = file.read(start, pieces[-1].end - start)
    for piece in pieces:
        digest = xxh3_128(data[piece.offset - start : piece.end - start])
        if digest != piece.digest:
            raise FormatError(
                f"bytes {piece.offset} to {piece.end}, {piece.content}, have the digest {digest}, expected "
                f"{piece.digest}"
            )


def places_of(store: Store, entry: Entry, *, but: Store) -> list[str]:
    """List the directories beside this one, and itself, that share a file, as the steps of a run do. Leave out the
    directory of the store `but`. In a bucket no directories share an object."""
    if on_disk(store) is None:
        return []
    around, _ = store.parent()
    content = content_of(entry.version)
    with suppress(OSError):  # the directory may be entered, but not listed
        kinds = around.kinds().items()
        names = [name for name, kind in kinds if kind == "directory" and not name.startswith(".")]
        return [
            name for name in names if around.at(name).key != but.key and _has(around, name, entry, content)
        ]
    return []


def _has(around: Store, directory: str, entry: Entry, content: str) -> bool:
    with suppress(OSError, FormatError):
        names = [name for name, nbytes in around.sizes(directory).items() if nbytes == entry.nbytes]
        for name in {entry.name, *names}:
            with suppress(OSError, FormatError):
                if content_of(around.read(f"{directory}/{name}", 0, 0)[1].version) == content:
                    return True
    return False
