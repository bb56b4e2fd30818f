"""Leaves as arrays of zarr v2: one directory each, or all of them in one OCDBT database, under one index.

The files are written as they are, without TensorStore, for which opening an array takes longer than writing a small
one. It reads them all the same.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.codecs import zstd_compress
from eformer._engine.formats.markers import ORBAX_TREE
from eformer._engine.formats.safetensors.names import MANIFEST
from eformer._engine.formats.zarr.index import INDEX, Index, Listed, read_index
from eformer._engine.formats.zarr.original_structure import parse_structure
from eformer._engine.formats.zarr.plain_arrays import discover
from eformer._engine.formats.zarr.zarray import (
    ZARRAY,
    check_alike,
    chunk_shape,
    chunks_in,
    chunks_of,
    parse_zarray,
    zarray,
)
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.manifest import Coding, DataFile, Extent, LeafEntry, ProcessRecord, Receipt
from eformer._engine.record.names import escape, is_inside, is_text, name_to_path
from eformer._engine.record.pieces import piece_sizes
from eformer._engine.record.regions import Region
from eformer._engine.saving.staging import Staging, contiguous, released
from eformer._engine.saving.write import (
    NO_DIGEST,
    Counted,
    Slot,
    bytes_of,
    digests_of,
    entry_of,
    in_one_place,
    itemsize_of,
    no_digests,
    own_shapes,
    parts_of,
    piece_tasks,
    small_bytes,
    weight,
)
from eformer._engine.stores.local import list_names, logger, replacing_in, sweep
from eformer._engine.stores.local_upload import Journal, NewFile, ScratchTree, sweep_trees, write_new
from eformer._engine.stores.ocdbt import BRANCH, DatabaseWriter, join_branches
from eformer._engine.stores.removal import DATABASE_MARK, Described, Moved, read_array
from eformer._engine.tasks.pool import gc_paused, run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer.errors import CorruptionError, FormatError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.planned import Source
    from eformer._engine.saving.reuse import Earlier
    from eformer._engine.stores.directory import Directory

# A chunk is the least that others can read. What has to be encoded as a whole, is in memory as a whole.
_CHUNK_BYTES = 2**30
_ENCODED_CHUNK_BYTES = 8 * 2**20

_BATCH = 64  # small arrays to a task

_MOST_ZARRAY = 2**20  # bytes
_MOST_STRUCTURE = 2**29
_MOST_PATH = 4096


@dataclasses.dataclass(slots=True)
class Array:
    """A leaf as an array: its directory, what `.zarray` says, and its chunks."""

    path: str
    source: Source
    zarray: bytes
    chunk_nbytes: int
    chunks: list[Slot]
    is_kept: bool = False

    @property
    def to_write(self) -> Sequence[Slot]:
        """The chunks that are not there already."""
        return [] if self.is_kept else self.chunks

    @property
    def is_small(self) -> bool:
        return not self.chunks or (len(self.chunks) == 1 and in_one_place(self.chunks[0]) is not None)

    @property
    def is_here(self) -> bool:
        """Whether this process writes anything of it."""
        return bool(self.chunks) or self.source.is_first

    def files(self) -> list[str]:
        """What this process writes."""
        names = [ZARRAY] if self.source.is_first else []
        return [f"{self.path}/{name}" for name in (*names, *(chunk.name for chunk in self.chunks))]


# ----------------------------------------------------------------------------------------------- plan


def arrange(sources: Sequence[Source], options: SaveOptions, block: int, mark: str) -> list[Array]:
    """What is written into which files. Arrays are marked as those of a save, so that without an index they are not
    taken for a tree that somebody wrote so."""
    is_encoded = options.ocdbt or options.compression
    limit = options.max_chunk_bytes or (_ENCODED_CHUNK_BYTES if is_encoded else _CHUNK_BYTES)
    return [_array(source, options.compression, limit, block, mark) for source in sources]


def _array(source: Source, compression: str | None, limit: int, block: int, mark: str) -> Array:
    itemsize = itemsize_of(source)
    chunk = chunk_shape(source.shape, source.shard or source.shape, itemsize, limit)
    coding = Coding(compression, chunk) if compression else None
    slots = []
    for name, box in _own_chunks(source, chunk):
        nbytes = itemsize * box.size
        digests = [NO_DIGEST] if coding else no_digests(box.shape, nbytes, itemsize, block)
        region = None if box.shape == source.shape else box
        slots.append(Slot(name, source, region, box.shape, nbytes, False, digests, 0, coding))
    path = "/".join(name_to_path(source.name))
    described = zarray(source.dtype, source.shape, chunk, compression, mark)
    return Array(path, source, described, itemsize * math.prod(chunk), slots)


def own_nbytes(source: Source) -> int:
    """What this process writes of a leaf, if it is not compressed."""
    return itemsize_of(source) * sum(map(math.prod, own_shapes(source)))


def _own_chunks(source: Source, chunk: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
    """Those that this process writes. They are cut so that none reaches over a region."""
    if not math.prod(source.shape):
        return
    whole = [Region.whole(source.shape)] if source.whole is not None else []
    for region in whole or source.regions:
        yield from chunks_in(region, source.shape, chunk)


# ---------------------------------------------------------------------------------------------- write


class ArraysWriter:
    """One tree on its way into a directory of arrays: `prepare`, `write` or `adopt` every array, `seal`, `close`."""

    def __init__(
        self,
        directory: Path,
        prefix: str,
        save_id: str,
        options: SaveOptions,
        *,
        block: int,
        threads: int,
        write_index: bool,
        meter: Meter = SILENT,
    ) -> None:
        self.directory, self.prefix, self.save_id, self.options = directory, prefix, save_id, options
        self.block, self.threads, self.write_index, self.meter = block, threads, write_index, meter
        self.mark = save_id if write_index else ""  # without an index they shall look like anybody's
        self.scratch: ScratchTree | None = None
        self.process, self.count = 0, 1
        self.arrays: list[Array] = []
        self.database: DatabaseWriter | None = None

    def share(self, scratch: ScratchTree, process: int, count: int) -> None:
        """Several processes write into one place, which is none of this one's business to remove."""
        self.scratch, self.process, self.count = scratch, process, count

    @property
    def root(self) -> str:
        """Where TensorStore writes arrays to: it takes no path with dots."""
        assert self.scratch is not None
        return os.path.realpath(self.scratch.data.path)

    @property
    def here(self) -> list[Array]:
        return [array for array in self.arrays if array.is_here]

    def close(self) -> None:
        """Nothing is left but what was sealed."""
        if self.scratch and self.count == 1:
            self.scratch.discard()

    def prepare(self, sources: Sequence[Source]) -> list[Array]:
        """What is to be written, and a place for it that nobody looks for."""
        with gc_paused():
            self.arrays = arrange(sources, self.options, self.block, self.mark)
        self.scratch = self.scratch or ScratchTree(self.directory)
        if not self.options.ocdbt:
            self._require_short_paths()
            _make_parents(self.scratch, self.here)
        return self.here

    def _require_short_paths(self) -> None:
        """Refuses what could be written, by names below an open directory, and not be read again by its path."""
        longest = max((array.path for array in self.arrays), key=len, default="")
        path = f"{self.directory}/{escape(self.prefix)}.{self.save_id}/{longest}/{'0' * 20}"
        if len(os.fsencode(path)) >= _MOST_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)

    def keep(self, earlier: Earlier, arrays: Sequence[Array]) -> None:
        """Chunks that an earlier checkpoint has, are linked to; what describes an array is written anew, for it says of
        which save it is."""
        staging = Staging(self.options.staging_bytes)
        leaves = {array.source.name: array.chunks for array in arrays}
        same = earlier.unchanged(leaves, staging, self.threads)
        for array in arrays:
            if extents := same.get(array.source.name):
                array.is_kept = self._link(earlier, array, extents)
                if not array.is_kept:
                    return  # nor will the next one be
                self.meter.add(own_nbytes(array.source))

    def _link(self, earlier: Earlier, array: Array, extents: Sequence[Extent]) -> bool:
        """All chunks of the array; or none, if they are on another file system or in other pieces."""
        assert self.scratch is not None
        with self.scratch.make_folder(array.path) as folder:
            try:
                for chunk, extent in zip(array.chunks, extents, strict=True):
                    if earlier.tree.files[extent.file].nbytes != array.chunk_nbytes:
                        raise FormatError(f"chunk {chunk.name} has another shape")
                    folder.link(chunk.name, earlier.path_of(extent.file), array.chunk_nbytes)
            except (OSError, FormatError) as error:
                logger.warning("%s cannot be linked, and is written again: %s", folder.path, error)
                for chunk in array.chunks:
                    folder.unlink(chunk.name)
                return False
        return True

    def write(self, arrays: Sequence[Array]) -> None:
        """Complete, and on stable storage."""
        assert self.scratch is not None
        staging = Staging(self.options.staging_bytes)
        if self.options.ocdbt:
            self._write_database(arrays, staging)
            return
        with ExitStack() as files:
            tasks = _file_tasks(self.scratch, arrays, self.block, staging, files, self.meter)
            run_all(tasks, self.threads)
        self.scratch.sync([name for array in arrays for name in array.files()])

    def _write_database(self, arrays: Sequence[Array], staging: Staging) -> None:
        """Each process has one of its own; the first one's becomes that of all."""
        assert self.scratch is not None
        self.database = DatabaseWriter(self.scratch.data.path / self._branch)
        run_all(_database_tasks(self.database, arrays, self.block, staging, self.meter), self.threads)
        self.database.finish()
        if not self.process and self.arrays:
            self.scratch.write_new(DATABASE_MARK, self.mark.encode())
        self._sync_database()

    @property
    def _branch(self) -> str:
        return f"{BRANCH}{self.process}" if self.process else ""

    def _sync_database(self) -> None:
        assert self.scratch is not None
        names = self.scratch.files(self._branch)
        self.scratch.sync([name for name in names if self._branch or not name.startswith(BRANCH)])

    def digest(self, arrays: Sequence[Array]) -> None:
        """For arrays that somebody else writes as they were prepared: what their digests have to be."""
        staging = Staging(self.options.staging_bytes)
        tasks = (partial(_digest, chunk, self.block, staging) for array in arrays for chunk in array.chunks)
        run_all(tasks, self.threads)
        for array in arrays:
            array.source = released(array.source)

    def adopt(self, arrays: Sequence[Array]) -> None:
        """Arrays that TensorStore has written here, for all processes: if they are what was prepared, they are marked
        as ours."""
        assert self.scratch is not None
        run_all([partial(_adopt, self.scratch, array) for array in arrays], self.threads)
        self.scratch.sync(self.scratch.files())

    def receipt(self, sha256: Mapping[str, str]) -> Receipt:
        """What was written. One of several processes puts it beside its first array, for there may be much of it."""
        with gc_paused():
            receipt = _receipt(self.arrays)
            slots = [chunk for array in self.arrays for chunk in array.chunks]
            receipt.weight = weight(slots)
            if self.count == 1:
                return receipt
            if not self.write_index:
                return Receipt(weight=receipt.weight)
            part = ProcessRecord(
                {name: e.extents for name, e in receipt.leaves.items()}, dict(sha256), tuple(receipt.files)
            )
            files = [self._write_part(part.to_json())] if receipt.files else []
            return Receipt(files, {}, receipt.weight, is_torn=True)

    def _write_part(self, data: bytes) -> DataFile:
        assert self.scratch is not None
        name = f"{self.here[0].path}/{DATABASE_MARK}-{self.process}"
        if self.database:
            self.database.put(name, data)
            self.database.finish()
            self._sync_database()
        else:
            self.scratch.write_new(name, data)
            self.scratch.sync([name])
        return DataFile(name, len(data), len(data), xxh3_128(data))

    # -------------------------------------------------------------------------------------------- seal

    def seal(self, tree: TreeEntry) -> None:
        """The tree is the checkpoint of the prefix: its directories under their names, then the index, then away
        with the old."""
        scratch = self.scratch
        assert scratch is not None
        if self.options.ocdbt and self.count > 1:
            join_branches(scratch.data.path)
            self._sync_database()
        with scratch.place.locked():
            index = read_index(self.directory)
            self._sweep(scratch.place)
            if index is not None and not self.write_index:
                raise ValueError(
                    f"{self.directory / INDEX} is there: beside it, arrays that it does not list would not be found"
                )
            index = index or self._of_what_is_there(scratch.place)
            root, moves = self._final_places(scratch, index)
            new = tuple(self._published(scratch, root, *move) for move in moves)
            journal = Journal(self.save_id, new, tuple(self._replaced(scratch.place, index)))
            try:
                scratch.publish(journal, moves)
                if self.write_index:
                    self._write_index(scratch.place, index, tree, root)
            except BaseException:
                if not self._may_be_sealed():
                    scratch.finish(is_sealed=False)
                raise
            if self.write_index:
                self._tidy_up(scratch, index)
            else:
                scratch.is_finished = True

    def is_sealed(self) -> bool:
        """Whether the index knows of this save; one without an index can be undone as long as it is not finished."""
        return self.write_index and self._may_be_sealed()

    def _may_be_sealed(self) -> bool:
        sealed = _sealed(self.directory)
        return sealed is None or self.save_id in sealed

    def _of_what_is_there(self, place: Directory) -> Index:
        """An index of the arrays that somebody else has put here without one: they stay what they are, a tree without a
        prefix, unless this is one."""
        there = discover(self.directory) if self.write_index and self.prefix else ()
        found = [array for array in there if _is_of_others(place, array.path)]
        for array in found:
            if not is_text(array.path):
                raise FormatError(
                    f"{self.directory} holds the array {array.path!r}, whose name is not UTF-8; no index can list it. "
                    "Rename it, or save to another directory"
                )
        return Index(arrays=found) if found else Index()

    def _sweep(self, place: Directory) -> None:
        """Away with what dead saves have left, while the index still says which of them were committed."""
        if (sealed := _sealed(self.directory)) is not None:
            sweep_trees(place, sealed)
        sweep(place)

    def _final_places(self, scratch: ScratchTree, index: Index) -> tuple[str, list[tuple[str, str]]]:
        """Plain names for a first save; a name that an index ever gave is not given twice."""
        contents, there = list(scratch.data.kinds()), set(scratch.place.kinds())
        base = escape(self.prefix) if self.prefix else "tree"
        is_first = self.prefix not in index.listed()
        if not contents:
            return "", []
        if is_first and not self.prefix and not self.options.ocdbt and there.isdisjoint(contents):
            return "", [(name, name) for name in contents]
        if not self.write_index and (not self.prefix or base in there):
            raise FileExistsError(
                f"{self.directory} has {sorted(there & {base, *contents})[:8]}; without an index nothing could tell "
                "which arrays are the new ones. Save to another directory, or with an index"
            )
        root = f"{base}.ocdbt" if self.options.ocdbt else base
        # Names of leaves have no dots: what has one is never in the way of a later tree.
        if not is_first or root in there or root == "tree":
            root = f"{root}.{self.save_id}"
        return root, [("", root)]

    def _published(self, scratch: ScratchTree, root: str, name: str, final: str) -> Moved:
        """A directory of the data that is about to be at `final`."""
        status = scratch.data.status(name or ".")
        assert status is not None
        if self.mark:
            return Moved(final, status.st_ino, self.mark)
        start = f"{root}/" if root else ""
        paths = [f"{array.path}/{ZARRAY}" for array in self.arrays]
        if self.options.ocdbt:
            paths = [DATABASE_MARK]
        inner = [path for path in paths if not name or path.startswith(f"{name}/")]
        described = (_described(scratch.data, path, start + path) for path in inner)
        return Moved(final, status.st_ino, "", tuple(filter(None, described)))

    def _replaced(self, place: Directory, index: Index) -> Iterator[Moved]:
        """The directories that nobody will look for any more. Of those of others only the arrays that are listed."""
        tops = {prefix: _tops(listed) for prefix, listed in index.listed().items()}
        kept = {name for prefix, names in tops.items() if prefix != self.prefix for name in names}
        mark = self._replaced_id(index)
        unmarked: dict[str, list[Listed]] = {}
        for array in index.listed().get(self.prefix, ()) if not mark else ():
            unmarked.setdefault(array.path.split("/")[0], []).append(array)
        for name in sorted(tops.get(self.prefix, set()) - kept):
            try:
                with place.enter(name) as top:
                    inode = top.inode
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s is replaced, but not removed: %s", place.path / name, error.strerror)
                continue
            described = (_listed(place, array) for array in unmarked.get(name, ()))
            yield Moved(name, inode, mark, tuple(filter(None, described)))

    def _replaced_id(self, index: Index) -> str:
        """The save whose arrays are replaced; somebody else's have none."""
        tree = index.manifest(str(self.directory / INDEX)).trees.get(self.prefix)
        return tree.save_id if tree else ""

    def _write_index(self, place: Directory, index: Index, tree: TreeEntry, root: str) -> None:
        origin = str(self.directory / INDEX)
        tree = msgspec.structs.replace(
            tree, raw_root=root or msgspec.UNSET, ocdbt=True if root and self.options.ocdbt else msgspec.UNSET
        )
        manifest = index.manifest(origin)
        manifest = msgspec.structs.replace(manifest.with_tree(self.prefix, tree), digest=Index().digest)
        start = f"{root}/" if root else ""
        listed = [Listed(start + a.path, a.source.shape, a.source.dtype) for a in self.arrays]
        with replacing_in(place, INDEX) as file:
            file.write(index.with_tree(self.prefix, listed, manifest).to_json())

    def _tidy_up(self, scratch: ScratchTree, before: Index) -> None:
        """The checkpoint is safe by now; what cannot be done is left to the next save."""
        try:
            scratch.finish(is_sealed=True)
            if not before.is_ours and self.prefix in before.prefixes:
                _remove_structure(scratch.place, self.prefix)
        except (OSError, FormatError) as error:
            logger.warning("%s is saved, but could not be tidied up: %s", self.directory, error)


def _remove_structure(place: Directory, prefix: str) -> None:
    """The original's record of the structure of a tree that is gone."""
    name = f"{prefix}_structure.json"
    if not is_inside(name) or "/" in name:
        return
    try:
        if parse_structure(place.read(name, _MOST_STRUCTURE), name).prefix == prefix:
            place.unlink(name)
    except (FileNotFoundError, FormatError, StructureError):  # it is something else
        pass


def _tops(listed: Sequence[Listed]) -> set[str]:
    """The directories beside the index that arrays are in."""
    return {array.path.split("/")[0] for array in listed}


def _described(place: Directory, path: str, final: str) -> Described | None:
    """The file that describes an array or a database, unless a link leads there."""
    outer, _, name = path.rpartition("/")
    if not outer:
        return Described.at(place, name, final)
    try:
        with place.enter(outer) as folder:
            return Described.at(folder, name, final)
    except OSError:
        return None


def _listed(place: Directory, listed: Listed) -> Described | None:
    """The file that describes an array of another program, if it is what the index says. What was only found there, and
    listed by a save of ours, has no shape in the index: that is nobody's to remove."""
    try:
        with place.enter(listed.path) as folder:
            array = read_array(folder, folder.kinds())
            if array is None or listed.shape is None or array.shape != list(listed.shape):
                return None
            return Described.at(folder, ZARRAY, f"{listed.path}/{ZARRAY}")
    except OSError:
        return None


def _is_of_others(place: Directory, path: str) -> bool:
    """Whether a directory is an array without the mark of one of our saves."""
    try:
        with place.enter(path) as folder:
            array = read_array(folder, folder.kinds())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return True  # it is mounted there
    return array is not None and not array.eformer


def _sealed(directory: Path) -> set[str] | None:
    """The saves that the index knows of; None if it cannot be read."""
    try:
        index = read_index(directory)
        trees = index.manifest(str(directory)).trees if index else {}
    except (OSError, FormatError):
        return None
    return {tree.save_id for tree in trees.values()}


def check_place(directory: Path) -> bool:
    """Whether there is an index; refuses, before anything is written, a checkpoint of another format."""
    index = read_index(directory)
    names = list_names(directory) if index is None else []
    if MANIFEST in names:
        raise FileExistsError(
            f"{directory / MANIFEST} is there: the directory holds a checkpoint of another format, or something "
            "else. Save to another directory, or with format='safetensors'"
        )
    if ORBAX_TREE in names:
        raise FileExistsError(
            f"{directory / ORBAX_TREE} was not written by eformer; save to another directory"
        )
    return index is not None


# ---------------------------------------------------------------------------------------------- files


def _make_parents(scratch: ScratchTree, arrays: Sequence[Array]) -> None:
    """All directories but those of the arrays, outermost first."""
    parents = {a.path.rpartition("/")[0] for a in arrays}
    for path in list(parents):
        while path := path.rpartition("/")[0]:
            parents.add(path)
    with closing(scratch.make_folders(sorted(parents - {""}))) as folders:
        for _ in folders:
            pass


def _file_tasks(
    scratch: ScratchTree,
    arrays: Sequence[Array],
    block: int,
    staging: Staging,
    files: ExitStack,
    meter: Meter,
) -> Iterator[Callable[[], None]]:
    """Small arrays many at a time, large ones piece by piece."""
    small: list[Array] = []
    for array in arrays:
        if array.is_small and array.chunk_nbytes <= block:
            small.append(array)
            if len(small) == _BATCH:
                yield partial(_write_small, scratch, small, meter)
                small = []
        else:
            yield from _array_tasks(scratch, array, block, staging, files, meter)
    yield partial(_write_small, scratch, small, meter)


def _write_small(scratch: ScratchTree, arrays: Sequence[Array], meter: Meter) -> None:
    with closing(scratch.make_folders(array.path for array in arrays)) as folders:
        for array, folder in zip(arrays, folders, strict=True):
            if array.source.is_first:
                write_new(folder, ZARRAY, array.zarray)
            for chunk in array.to_write:
                data = small_bytes(chunk)
                nbytes = len(data)
                if chunk.coding:
                    data = _encoded(chunk, data)
                elif len(data) < array.chunk_nbytes:
                    data = data.ljust(array.chunk_nbytes, b"\0")
                write_new(folder, chunk.name, data)
                meter.add(nbytes)  # those of the leaf, without padding and before compression


def _array_tasks(
    scratch: ScratchTree, array: Array, block: int, staging: Staging, files: ExitStack, meter: Meter
) -> Iterator[Callable[[], None]]:
    with scratch.make_folder(array.path) as folder:
        if array.source.is_first:
            write_new(folder, ZARRAY, array.zarray)
    for chunk in array.to_write:
        name = f"{array.path}/{chunk.name}"
        if chunk.coding:
            yield partial(_write_whole, partial(scratch.write_new, name), array, chunk, block, staging, meter)
        else:
            file = NewFile(scratch, name, array.chunk_nbytes)
            files.callback(file.close)  # should the save fail before its last piece is written
            yield from piece_tasks(Counted(file, meter), 0, chunk, block, staging, end=file.close)
    array.source = released(array.source)


def _write_whole(
    put: Callable[[bytes], None], array: Array, chunk: Slot, block: int, staging: Staging, meter: Meter
) -> None:
    """A chunk that is encoded, or goes into a database: both take it as a whole."""
    parts, held = staging.fetch(parts_of(chunk.source), chunk.box)
    try:
        data = bytes(bytes_of(contiguous(parts, chunk.box, chunk.source.dtype)))
    finally:
        staging.release(held)
    chunk.source = released(chunk.source)
    if not chunk.coding:
        _digest_pieces(chunk, data, block)
    padded = data.ljust(array.chunk_nbytes, b"\0")
    put(_encoded(chunk, padded) if chunk.coding else padded)
    meter.add(len(data))


def _digest(chunk: Slot, block: int, staging: Staging) -> None:
    chunk.digests[:] = digests_of(chunk, block, staging)
    chunk.source = released(chunk.source)


def _adopt(scratch: ScratchTree, array: Array) -> None:
    with scratch.folder(array.path) as folder:
        origin = str(folder.path / ZARRAY)
        check_alike(folder.read(ZARRAY, _MOST_ZARRAY), array.zarray, origin)
        chunk = parse_zarray(array.zarray, origin).chunks
        for name, _ in chunks_of(array.source.shape, chunk):
            status = folder.status(name)
            nbytes = status.st_size if status else 0
            if nbytes != array.chunk_nbytes:
                raise CorruptionError(
                    f"leaf {array.source.name!r}: TensorStore wrote {nbytes} bytes of chunk {name!r}, expected were "
                    f"{array.chunk_nbytes}"
                )
        folder.unlink(ZARRAY)
        write_new(folder, ZARRAY, array.zarray)  # ours is marked


def _digest_pieces(chunk: Slot, data: bytes, block: int) -> None:
    start, view = 0, memoryview(data)
    for number, nbytes in enumerate(piece_sizes(chunk.shape, itemsize_of(chunk.source), block)):
        chunk.digests[number] = xxh3_128(view[start : start + nbytes])
        start += nbytes


def _encoded(chunk: Slot, data: bytes) -> bytes:
    encoded = zstd_compress(data)
    chunk.nbytes, chunk.digests[0] = len(encoded), xxh3_128(encoded)
    return encoded


def _database_tasks(
    database: DatabaseWriter, arrays: Sequence[Array], block: int, staging: Staging, meter: Meter
) -> Iterator[Callable[[], None]]:
    for start in range(0, len(arrays), _BATCH):
        yield partial(_put_descriptions, database, arrays[start : start + _BATCH])
    for array in arrays:
        for chunk in array.chunks:
            put = partial(database.put, f"{array.path}/{chunk.name}")
            yield partial(_write_whole, put, array, chunk, block, staging, meter)
        array.source = released(array.source)


def _put_descriptions(database: DatabaseWriter, arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array.source.is_first:
            database.put(f"{array.path}/{ZARRAY}", array.zarray)


# -------------------------------------------------------------------------------------------- receipt


def _receipt(arrays: Sequence[Array]) -> Receipt:
    """What the manifest says of the files and the leaves. `.zarray` belongs to no leaf: it is all header."""
    files: list[DataFile] = []
    leaves: dict[str, LeafEntry] = {}
    digests: dict[bytes, str] = {}  # most are alike
    for array in arrays:
        if not array.is_here:
            continue
        if array.zarray not in digests:
            digests[array.zarray] = xxh3_128(array.zarray)
        if array.source.is_first:
            nbytes = len(array.zarray)
            files.append(DataFile(f"{array.path}/{ZARRAY}", nbytes, nbytes, digests[array.zarray]))
        extents: list[Extent] = []
        for chunk in array.chunks:
            extents.append(chunk.extent(len(files)))
            stored = chunk.nbytes if chunk.coding else array.chunk_nbytes
            files.append(DataFile(f"{array.path}/{chunk.name}", stored))
        leaves[array.source.name] = entry_of(array.source, extents)
    return Receipt(files, leaves)
