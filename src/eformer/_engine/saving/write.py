"""Write planned files into an upload, small files in batches, large files piece by piece, with digests on the way.

Tests: tests/engine/formats/test_safetensors.py, tests/engine/formats/test_zarr.py, tests/engine/saving/test_commit.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eformer._engine.formats.codecs import zstd_compress
from eformer._engine.record.boxes import contiguous, to_bytes
from eformer._engine.record.digests import sha256_of, xxh3_128
from eformer._engine.record.dtypes import pack_nibbles
from eformer._engine.record.pieces import bounding, joined, piece_sizes, pieces, shifted
from eformer._engine.saving.staging import released
from eformer._engine.stores.new_files import NewFiles
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.pool import Countdown, run_all
from eformer._engine.tasks.progress import SILENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.planned import ArrayBox, PlannedExtent, PlannedFile, Source
    from eformer._engine.saving.staging import Staging
    from eformer._engine.stores.base import Sink, Upload
    from eformer._engine.tasks.progress import Meter

    _Write = Callable[[Any, int], None]

# One write: large enough for the disk, small enough to stay in the processor's cache.
_WRITE_BYTES = 4 * 2**20

_BATCH = 128  # small files to a task


class Expected(Protocol):
    """The digests of the pieces of a box where its array is: `source_digests`, which needs jax."""

    def require(self, name: str, first: int, digests: Sequence[str]) -> None:
        """Raise a TransferError if the digests of pieces, from number `first` on, differ."""


class AtSource(Protocol):
    """The digests of a save that accelerators compute."""

    def begin(self, extent: PlannedExtent) -> Expected | None:
        """Begin to digest a box, before its array is released. Return None if the device cannot."""


def write(
    files: Sequence[PlannedFile],
    upload: Upload,
    block: int,
    staging: Staging,
    *,
    threads: int,
    meter: Meter,
    header: Callable[[PlannedFile], bytes] | None = None,
    at_source: AtSource | None = None,
) -> None:
    """Write the files, with the digests of their pieces, and return when they are on stable storage.

    The arrays of a file are released as it is written. With `header`, the header of a file that has extents is made
    when their digests are known. `at_source` has the digests that accelerators compute, which are compared.
    """
    nbytes = sum(file.nbytes for file in files if not file.is_there)
    upload.nbytes = nbytes
    if isinstance(upload, NewFiles) and upload.takes != "files":  # a database may compress them
        upload.require_room(sum(map(_least_bytes, files)))
    if nbytes <= block:
        threads = min(threads, len(files))  # a file of this size is one task
    run_all(_Writer(upload, block, staging, meter, header, at_source).tasks(files), threads)
    upload.sync()


@dataclass(frozen=True, slots=True)
class _Writer:
    upload: Upload
    block: int
    staging: Staging
    meter: Meter
    header: Callable[[PlannedFile], bytes] | None
    at_source: AtSource | None

    def tasks(self, files: Iterable[PlannedFile]) -> Iterator[Callable[[], None]]:
        small: list[PlannedFile] = []
        room = self.block
        for file in files:
            if file.is_there:
                continue
            if _is_small(file, self.block):
                if small and (file.nbytes > room or len(small) == _BATCH):
                    yield partial(self.put_small, small)
                    small, room = [], self.block
                small.append(file)
                room -= file.nbytes
            elif self.upload.takes == "files" or file.extents[0].coding:
                yield partial(self.put_whole, file)
            elif self.upload.takes == "streams":
                yield partial(self.stream, file)
            elif file.nbytes <= self.block:
                yield partial(self.put_extents, file)
            else:
                yield from self.pieces_of(file)
        if small:
            yield partial(self.put_small, small)

    # ---------------------------------------------------------------------------------- whole files

    def put_small(self, files: Sequence[PlannedFile]) -> None:
        """Write files that are all header, or one small box that lies in host memory."""
        data, nbytes = [], 0
        for file in files:
            if not file.extents:
                data.append((file.name, file.header))
                continue
            (extent,) = file.extents
            content = small_bytes(extent)
            nbytes += len(content)  # the bytes of the leaf, without padding and before compression
            if extent.coding:
                content = _encoded(file, content)
            elif len(content) < file.nbytes:
                content = content.ljust(file.nbytes, b"\0")
            data.append((file.name, content))
        self.upload.put(data)
        self.meter.add(nbytes)

    def put_extents(self, file: PlannedFile) -> None:
        """Write a file that is too small to share among threads."""
        sink = self.upload.create(file.name, file.nbytes)
        for task in self.extent_tasks(file, sink.write, self.meter):
            interrupts.check()
            task()
        self.finish(file, sink)

    def put_whole(self, file: PlannedFile) -> None:
        """Write a chunk that is compressed or goes into a database, which both need it whole."""
        (extent,) = file.extents
        with self.staging.reading(extent.source, extent.box) as array:
            data = bytes(bytes_of(array))
        extent.source = released(extent.source)
        if not extent.coding:
            _digest_pieces(extent, data, self.block)
        padded = data.ljust(file.nbytes, b"\0")
        self.upload.put([(file.name, _encoded(file, padded) if extent.coding else padded)])
        self.meter.add(len(data))

    # -------------------------------------------------------------------------------------- streams

    def stream(self, file: PlannedFile) -> None:
        """Write a file from its beginning to its end. If its header needs the digests, read everything twice."""
        if self.header:
            sources = [extent.source for extent in file.extents]
            for _ in self.chunks_of(file, SILENT):
                pass
            for extent, source in zip(file.extents, sources, strict=True):
                extent.source = source
            file.header = self.header(file)
        self.upload.stream(file.name, file.nbytes, self.chunks_of(file, self.meter))

    def chunks_of(self, file: PlannedFile, meter: Meter) -> Iterator[Any]:
        """Yield the bytes of a file in their order, and set their digests on the way."""
        yield file.header
        written: list[tuple[Any, int]] = []
        at = len(file.header)
        for task in self.extent_tasks(file, lambda *call: written.append(call), meter):
            interrupts.check()
            task()
            data, offset = written.pop()
            if offset > at:
                yield bytes(offset - at)
            yield data
            at = offset + len(data)
        if at < file.nbytes:
            yield bytes(file.nbytes - at)

    # --------------------------------------------------------------------------------------- pieces

    def pieces_of(self, file: PlannedFile) -> Iterator[Callable[[], None]]:
        """Write small neighbours together and large boxes piece by piece; the last task closes the file."""
        sink = self.upload.create(file.name, file.nbytes)
        last = Countdown(partial(self.finish, file, sink))
        for task in self.extent_tasks(file, sink.write, self.meter):
            yield last.after(task)
        yield last.close

    def finish(self, file: PlannedFile, sink: Sink) -> None:
        if self.header and file.extents:
            file.header = self.header(file)
        if file.header:
            sink.write(file.header, 0)
        sink.close()

    def extent_tasks(self, file: PlannedFile, write: _Write, meter: Meter) -> Iterator[Callable[[], None]]:
        """Yield tasks that write the extents in their order: small neighbours together, or a batch of pieces."""
        start = len(file.header)
        counted = write if meter is SILENT else _counting(write, meter)
        small: list[PlannedExtent] = []
        room = self.block
        for extent in file.extents:
            nbytes = extent.nbytes
            is_small = nbytes <= self.block and not extent.is_packed and is_in_one_place(extent)
            if small and (not is_small or nbytes > room):
                yield partial(_write_small, counted, start, small)
                small, room = [], self.block
            if is_small:
                small.append(extent)
                room -= nbytes
            elif extent.is_packed:
                yield partial(_write_packed, counted, start, extent, self.staging)
            else:
                yield from _piece_tasks(counted, start, extent, self.block, self.staging, self.at_source)
        if small:
            yield partial(_write_small, counted, start, small)


def _counting(write: _Write, meter: Meter) -> _Write:
    """Report bytes as they are written."""

    def count(data: Any, offset: int) -> None:
        write(data, offset)
        meter.add(len(data))

    return count


def _least_bytes(file: PlannedFile) -> int:
    """Return the bytes that a file adds at least: the length of compressed chunks is not known yet."""
    return 0 if file.is_there or any(extent.coding for extent in file.extents) else file.nbytes


def _is_small(file: PlannedFile, block: int) -> bool:
    if not file.extents:
        return True
    if file.header or len(file.extents) > 1 or file.nbytes > block:
        return False
    return is_in_one_place(file.extents[0])


def is_in_one_place(extent: PlannedExtent) -> bool:
    """Tell whether one array in host memory is the box of the extent."""
    source = extent.source
    if source.whole is not None:  # as for nearly every leaf
        return extent.region is None
    if len(source.parts) != 1:
        return False
    ((box, array),) = source.parts
    return isinstance(array, np.ndarray) and box.shape == extent.shape


def small_bytes(extent: PlannedExtent) -> bytes:
    """Return all of a small box that lies in one place, and set its digest."""
    source = extent.source
    data = source.whole
    if not isinstance(data, bytes):
        data = to_bytes(source.parts[0][1] if data is None else data, source.dtype)
    if data:
        extent.digests[0] = xxh3_128(data)
    return data


def _write_small(write: _Write, start: int, extents: Sequence[PlannedExtent]) -> None:
    write(b"".join(map(small_bytes, extents)), start + extents[0].offset)


def _write_packed(write: _Write, start: int, extent: PlannedExtent, staging: Staging) -> None:
    """Write four-bit numbers, two to a byte."""
    with staging.reading(extent.source, extent.box) as array:
        data = pack_nibbles(array)
        extent.digests[0] = xxh3_128(data)
        write(data, start + extent.offset)
    extent.source = released(extent.source)


def _piece_tasks(
    write: _Write,
    start: int,
    extent: PlannedExtent,
    block: int,
    staging: Staging,
    at_source: AtSource | None,
) -> Iterator[Callable[[], None]]:
    """Write a large box, a few pieces to a task."""
    expected = at_source.begin(extent) if at_source else None
    itemsize = extent.source.itemsize
    number = extent.written[0] if extent.written else 0
    before = islice(piece_sizes(extent.shape, itemsize, block), number)
    offset = start + extent.offset + sum(before)
    for group in _groups(extent, block, staging):
        boxes, held = staging.fetch(extent.source.boxes, bounding(group))
        release = Countdown(partial(staging.release, held), len(group))
        for batch in joined(group, itemsize, max(block, _WRITE_BYTES)):
            yield partial(_write_pieces, write, extent, number, boxes, batch, offset, release, expected)
            offset += itemsize * sum(box.size for box in batch)
            number += len(batch)
    extent.source = released(extent.source)  # each task holds its boxes, until it has written them


def _write_pieces(
    write: _Write,
    extent: PlannedExtent,
    number: int,
    boxes: Sequence[ArrayBox],
    batch: Sequence[Box],
    offset: int,
    release: Countdown,
    expected: Expected | None,
) -> None:
    """Write neighbouring pieces, of which the first has this number."""
    first = number
    try:
        data = bytes_of(contiguous(boxes, bounding(batch), extent.source.dtype))
        at, itemsize = 0, extent.source.itemsize
        for box in batch:
            stop = at + box.size * itemsize
            extent.digests[number] = xxh3_128(data[at:stop])
            at, number = stop, number + 1
        write(data, offset)  # right after the digests, while the bytes are in the cache
        if expected:
            expected.require(extent.source.name, first, extent.digests[first:number])
    finally:
        release.count_down(len(batch))


# ------------------------------------------------------------------------------------------- digests


def digests_of(extent: PlannedExtent, block: int, staging: Staging) -> Iterator[str]:
    """Yield the digests of the pieces of a box, each computed when it is asked for."""
    for group in _groups(extent, block, staging):
        interrupts.check()
        boxes, held = staging.fetch(extent.source.boxes, bounding(group))
        try:
            for box in group:
                yield xxh3_128(bytes_of(contiguous(boxes, box, extent.source.dtype)))
        finally:
            staging.release(held)


def _groups(extent: PlannedExtent, block: int, staging: Staging) -> Iterator[Sequence[Box]]:
    """Group the pieces of a box that are fetched together."""
    itemsize = extent.source.itemsize
    cut = pieces(extent.box.shape, itemsize, block)
    inside = shifted(cut[slice(*extent.written)] if extent.written else cut, extent.box.start)
    return joined(inside, itemsize, max(block, staging.batch_bytes(extent.source.parts)))


def _digest_pieces(extent: PlannedExtent, data: bytes, block: int) -> None:
    start, view = 0, memoryview(data)
    for number, nbytes in enumerate(piece_sizes(extent.shape, extent.source.itemsize, block)):
        extent.digests[number] = xxh3_128(view[start : start + nbytes])
        start += nbytes


def _encoded(file: PlannedFile, data: bytes) -> bytes:
    """Compress a chunk, and set the size of its file, which was unknown before."""
    (extent,) = file.extents
    encoded = zstd_compress(data)
    file.nbytes = extent.nbytes = len(encoded)
    extent.digests[0] = xxh3_128(encoded)
    return encoded


def compute_sha256(sources: Sequence[Source], staging: Staging, threads: int) -> dict[str, str]:
    """Compute the SHA-256 of every leaf that this process holds whole."""
    found: dict[str, str] = {}

    def compute(source: Source) -> None:
        found[source.name] = sha256_of(elements_of(source, staging))

    run_all([partial(compute, source) for source in sources if source.is_all_here], threads)
    return found


def elements_of(source: Source, staging: Staging) -> Iterator[memoryview]:
    """Read the elements of a leaf in their order, as bytes, a little at a time."""
    for box in pieces(source.shape, source.itemsize, staging.batch_bytes(source.parts)):
        interrupts.check()
        with staging.reading(source, box) as array:
            yield bytes_of(array)


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
