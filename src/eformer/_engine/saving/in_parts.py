"""Write the planned files of a save in parts, by several processes or independent jobs.

All of them plan the same files. A part is a range of the bytes of all files; its receipt has the digests of its pieces.
When all receipts are there, one process makes the headers from them and commits. The bytes do not depend on the number
of parts.

Tests: tests/engine/tools/test_parts.py, tests/multihost/test_conversions.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import Struct

from eformer._engine.record.digests import DIGEST_DIGITS, NO_DIGEST, xxh3_128
from eformer._engine.record.division import ALL, WHOLE, ByteLine, ByteSpan, Portion
from eformer._engine.record.pieces import piece_sizes
from eformer._engine.record.planned import LazyArray, PlannedExtent, PlannedFile
from eformer._engine.saving.fingerprints import lacks_fingerprint, note_fingerprints
from eformer._engine.saving.reuse import Kept
from eformer._engine.saving.save import Save
from eformer._engine.saving.staging import Staging
from eformer._engine.saving.write import write
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.parts import Parts, written
from eformer._engine.tasks.pool import default_threads, gc_paused, run_all
from eformer._engine.tasks.progress import SILENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from eformer._engine.record.manifest import LeafEntry, Receipt
    from eformer._engine.record.planned import Source
    from eformer._engine.stores.base import Upload
    from eformer._engine.tasks.progress import Meter

_ATOMIC = 40  # a leaf of at most this part of a share is not divided if that would read it twice


class Written(Struct, array_like=True):
    """The pieces of an extent that a part has written, from `first` on: their digests, and the length of the extent,
    which compression may change."""

    tree: int
    file: int
    extent: int
    first: int
    digests: str
    nbytes: int

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_DIGITS


class PlannedTree(Struct):
    """The files of a save, which every part plans alike."""

    save: Save
    files: list[PlannedFile]
    leaves: dict[str, LeafEntry | None]

    @property
    def extents(self) -> Iterator[tuple[int, int, PlannedExtent]]:
        for number, file in enumerate(self.files):
            for at, extent in enumerate(file.extents):
                yield number, at, extent


def planned(save: Save) -> PlannedTree:
    """Plan the files of a save. Nothing is read or written."""
    save.format = save.new_format()
    _, files, leaves = save.lay_out(Staging(save.options.staging_bytes), {}, SILENT)
    return PlannedTree(save, files, leaves)


# ------------------------------------------------------------------------------------------- division


class Own(Struct):
    """The pieces of an extent that a part writes, from `first` to `stop`."""

    tree: int
    file: int
    at: int
    extent: PlannedExtent
    first: int
    stop: int
    block: int

    @property
    def nbytes(self) -> int:
        if self.stop - self.first == len(self.extent.digests):
            return self.extent.nbytes
        ends = _ends(self.extent, self.block)
        return ends[self.stop] - ends[self.first]


class OwnPart(Struct):
    """Everything that a part writes: pieces of extents, and files that are headers alone."""

    pieces: list[Own]
    headers: list[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.pieces)


class Division:
    """The bytes of all files of a conversion on one line, which any part finds its own on. Every process divides the
    same plan, so no message is needed."""

    def __init__(self, trees: Sequence[PlannedTree]) -> None:
        self._trees = trees
        self._places = [(tree, file) for tree, one in enumerate(trees) for file in range(len(one.files))]
        numbers = {place: number for number, place in enumerate(self._places)}
        self._items = sorted(
            (numbers[tree, file], _start(one.files[file], extent), extent.nbytes, tree, file, at)
            for tree, one in enumerate(trees)
            for file, at, extent in one.extents
        )
        self._line = ByteLine((number, start, nbytes) for number, start, nbytes, *_ in self._items)

    def own(self, part: Portion) -> OwnPart:
        """Return everything that a part writes."""
        line, share = self._line, part.share(self._line.nbytes)
        is_all = part == WHOLE or (not line.nbytes and part.is_first)
        span = ALL if is_all else line.span(share.start, share.stop)
        first = 0 if is_all else max(0, bisect_right(line.before, share.start) - 1)
        stop = len(self._items) if is_all else bisect_left(line.before, share.stop)
        pieces = []
        for number, _, _, tree, file, at in self._items[first:stop]:
            one = self._trees[tree]
            extent = one.files[file].extents[at]
            if found := _own(tree, file, at, extent, number, one, span, len(share)):
                pieces.append(found)
        start, end = span.start[0], min(span.stop[0] + 1, len(self._places))
        headers = [
            self._places[number]
            for number in range(start, end)
            if (number, 0) in span and not self._file(number).extents
        ]
        return OwnPart(pieces, headers)

    def own_files(self, part: Portion) -> OwnPart:
        """Return the files of a part, each whole: an object in a bucket has one writer. Their middle lies in the share
        of the part."""
        weights = [max(1, self._file(number).nbytes) for number in range(len(self._places))]
        share = part.share(sum(weights))
        starts = accumulate(weights, initial=0)
        own = {
            place
            for place, weight, start in zip(self._places, weights, starts, strict=False)
            if start + weight // 2 in share
        }
        pieces = []
        for tree, file in sorted(own):
            one = self._trees[tree]
            for at, extent in enumerate(one.files[file].extents):
                block = one.save.entry.block
                pieces.append(Own(tree, file, at, extent, 0, len(extent.digests), block))
        headers = [(tree, file) for tree, file in own if not self._trees[tree].files[file].extents]
        return OwnPart(pieces, sorted(headers))

    def _file(self, number: int) -> PlannedFile:
        tree, file = self._places[number]
        return self._trees[tree].files[file]


def _start(file: PlannedFile, extent: PlannedExtent) -> int:
    return len(file.header) + extent.offset


def _own(
    tree: int,
    file: int,
    at: int,
    extent: PlannedExtent,
    number: int,
    one: PlannedTree,
    span: ByteSpan,
    share: int,
) -> Own | None:
    """Return the pieces of an extent that begin in a span; None without any."""
    start, block = _start(one.files[file], extent), one.save.entry.block
    count = len(extent.digests)
    if not span.touches(number, start, max(1, extent.nbytes)):
        return None
    if (number, start) in span and (number, start + extent.nbytes) in span:
        first, stop = 0, count
    elif count == 1 or extent.coding or _is_read_as_a_whole(extent, share):
        first, stop = (0, count) if (number, start) in span else (0, 0)
    else:
        starts = _ends(extent, block)[:-1]
        first = bisect_left(starts, True, key=lambda byte: (number, start + byte) >= span.start)
        stop = bisect_left(starts, True, key=lambda byte: (number, start + byte) >= span.stop)
    return Own(tree, file, at, extent, first, stop, block) if first < stop else None


def _ends(extent: PlannedExtent, block: int) -> list[int]:
    """Return the byte where each piece of an extent begins, and the last one ends."""
    return list(accumulate(piece_sizes(extent.shape, extent.source.itemsize, block), initial=0))


def _is_read_as_a_whole(extent: PlannedExtent, share: int) -> bool:
    """Tell whether ranges of a leaf would read it more than once, as the rows of a transposed array do."""
    arrays = [array for _, array in extent.source.parts]
    is_slow = any(isinstance(array, LazyArray) and not array.in_order for array in arrays)
    return is_slow and extent.nbytes * _ATOMIC <= share


# ----------------------------------------------------------------------------------------------- write


def write_part(
    parts: Parts,
    trees: Sequence[PlannedTree],
    part: Portion,
    own: OwnPart,
    staging: Staging,
    meter: Meter,
    small_leaves: Callable[[Sequence[Source]], Mapping[str, Source]],
) -> None:
    """Write the bytes of a part and its receipt. A part whose digests hold is not written again."""
    if _holds(parts, trees, part, own, meter):
        return
    parts.forget(part.number)
    for number, tree in enumerate(trees):
        with ExitStack() as stack:
            upload = parts.upload(number)
            stack.callback(upload.abandon)
            files = _own_files(number, tree, own, small_leaves)
            if files:
                threads = tree.save.threads
                write(
                    files,
                    cast("Upload", upload),
                    tree.save.entry.block,
                    staging,
                    threads=threads,
                    meter=meter,
                )
    parts.put_receipt(part.number, encode_receipt(own))


def _own_files(
    number: int,
    tree: PlannedTree,
    own: OwnPart,
    small_leaves: Callable[[Sequence[Source]], Mapping[str, Source]],
) -> list[PlannedFile]:
    """Return the files of a tree with the extents of this part alone. Digests are set in the extents of the plan."""
    mine = [one for one in own.pieces if one.tree == number]
    ready = small_leaves([one.extent.source for one in mine])
    by_file: dict[int, list[PlannedExtent]] = {file: [] for tree_, file in own.headers if tree_ == number}
    for one in mine:
        is_whole = one.stop - one.first == len(one.extent.digests)
        extent = one.extent
        extent.source = ready.get(extent.source.name, extent.source)
        extent.written = None if is_whole else (one.first, one.stop)
        by_file.setdefault(one.file, []).append(extent)
    return [
        PlannedFile(tree.files[file].name, extents, tree.files[file].nbytes, tree.files[file].header)
        for file, extents in sorted(by_file.items())
    ]


def encode_receipt(own: OwnPart) -> bytes:
    """Encode the digests of everything that this part has written."""
    return msgspec.msgpack.encode(
        [
            Written(
                one.tree,
                one.file,
                one.at,
                one.first,
                "".join(one.extent.digests[one.first : one.stop]),
                one.extent.nbytes,
            )
            for one in own.pieces
        ]
    )


def decode_receipt(data: bytes) -> list[Written]:
    return msgspec.msgpack.decode(data, type=list[Written])


def _holds(parts: Parts, trees: Sequence[PlannedTree], part: Portion, own: OwnPart, meter: Meter) -> bool:
    """Tell whether the receipt of a part is there and all of its bytes match it."""
    data = parts.receipt(part.number)
    if data is None:
        return False
    try:
        found = decode_receipt(data)
    except msgspec.DecodeError:
        return False
    expected = [(one.tree, one.file, one.at, one.first, one.stop - one.first) for one in own.pieces]
    if [(one.tree, one.file, one.extent, one.first, one.count) for one in found] != expected:
        return False
    headers = (parts.files(tree) / trees[tree].files[file].name for tree, file in own.headers)
    if not all(path.is_file() for path in headers):
        return False
    damaged: list[Written] = []

    def check(one: Written, mine: Own) -> None:
        if not damaged and not _matches(parts, trees[one.tree], one, mine):
            damaged.append(one)

    pairs = zip(found, own.pieces, strict=True)
    run_all([partial(check, one, mine) for one, mine in pairs], default_threads())
    if not damaged:
        meter.add(own.nbytes)
    return not damaged


def _matches(parts: Parts, tree: PlannedTree, one: Written, mine: Own) -> bool:
    """Tell whether the bytes of an extent match its digests."""
    planned_file, extent = tree.files[one.file], mine.extent
    path = parts.files(one.tree) / planned_file.name
    sizes = [one.nbytes] if one.count == len(extent.digests) == 1 else None
    ends = [0, *sizes] if sizes else _ends(extent, tree.save.entry.block)
    start = _start(planned_file, extent)
    try:
        with path.open("rb") as file:
            for number in range(one.first, one.first + one.count):
                file.seek(start + ends[number])
                at = (number - one.first) * DIGEST_DIGITS
                data = file.read(ends[number + 1] - ends[number])
                if xxh3_128(data) != one.digests[at : at + DIGEST_DIGITS]:
                    return False
    except FileNotFoundError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- commit


def take_receipts(trees: Sequence[PlannedTree], receipts: Sequence[bytes]) -> list[str]:
    """Set the digests of all pieces by the receipts of all parts. Return the names of leaves that lack some."""
    for data in receipts:
        for one in decode_receipt(data):
            file = trees[one.tree].files[one.file]
            extent = file.extents[one.extent]
            for number in range(one.count):
                digest = one.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]
                extent.digests[one.first + number] = digest
            if extent.coding:
                file.nbytes = extent.nbytes = one.nbytes
    return [
        extent.source.name
        for tree in trees
        for _, _, extent in tree.extents
        if extent.nbytes and NO_DIGEST in extent.digests
    ]


class SaveOfParts(Save):
    """The save of one process that commits the files of all parts."""

    parts: Parts
    number: int
    tree: PlannedTree
    small_leaves: Callable[[Sequence[Source]], Mapping[str, Source]]

    def join(self, save_id: str, token: str) -> None:
        """Join the upload of the first process to a bucket."""
        self.entry = msgspec.structs.replace(self.entry, save_id=save_id)
        self.format = self.new_format()
        self.upload = self.format.begin(self.store, token)

    def write_objects(self, own: OwnPart, staging: Staging, meter: Meter) -> None:
        """Write whole files of this part to the upload that all processes share. Their digests are set in the plan."""
        files = _own_files(self.number, self.tree, own, self.small_leaves)
        if files:
            write(files, self.upload, self.entry.block, staging, threads=self.threads, meter=meter)

    def commit_objects(self) -> None:
        """Commit the files of all processes, whose receipts have been taken."""
        self._note_fingerprints()
        self.commit(self.receipt(self.tree.files, Kept(), self.tree.leaves, {}))
        self.turn.end()  # the next tree goes to the same path

    def _note_fingerprints(self) -> None:
        """Add the fingerprints that one process adds: of small leaves whose digests do not give them."""
        if self.kind != "zarr":
            return
        extents = [extent for _, _, extent in self.tree.extents]
        lacking = {e.source.name: e.source for e in extents if lacks_fingerprint(e, self.entry.block)}
        ready = self.small_leaves(list(lacking.values()))
        for extent in extents:
            extent.source = ready.get(extent.source.name, extent.source)
        staging = Staging(self.options.staging_bytes)
        note_fingerprints(self.tree.files, self.entry.block, staging, self.threads, costly=False)

    def write(self, meter: Meter) -> Receipt:
        """Link the files of all parts into the upload, with headers that have the digests of all."""
        tree, place = self.tree, self.parts.files(self.number)
        with gc_paused():
            for file in tree.files:
                if self.format.header_needs_digests and file.extents:
                    file.header = self.format.header(file, {})
                    written(place / file.name, file.header)
        store = LocalStore(place)
        for file in tree.files:
            _, entry = store.read(file.name, 0, 0)
            if not self.upload.link(file.name, store, entry):
                raise OSError(
                    f"{place / file.name} cannot be linked to {self.store.url}: the file system has no hard links. "
                    "Convert there by one process"
                )
        self.upload.sync()
        self._note_fingerprints()
        return self.receipt(tree.files, Kept(), tree.leaves, {})
