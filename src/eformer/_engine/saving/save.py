"""Complete a save: begin its upload, write its files, commit. Needs no jax.

`saving/start.py` takes the arrays from the caller and makes the `Save`. `SaveOfSeveral` (`saving/several.py`) is the
save of several processes: they agree before the write, and the first process commits for all. On a disk:

    prepare   check the place; make a locked scratch directory, which no reader looks at
    write     write the files there, with the digests of their pieces, and sync them
    commit    lock the directory, rename the files to their final names, replace the index, remove replaced files

An error before the index is replaced removes the scratch directory. A killed process leaves it, and the next save to
the directory removes it. A power cut leaves the old index or the new one, and all files that it names. In a bucket,
objects are written under their final names, and no index names them before the commit.

Tests: tests/engine/saving/test_commit.py, tests/engine/saving/test_held_promises.py,
tests/engine/saving/test_interrupted.py.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from eformer._engine.formats.safetensors.names import tensor_names
from eformer._engine.formats.safetensors.write import SafetensorsDirectory, SafetensorsFile
from eformer._engine.formats.zarr.arrays import ZarrArrays
from eformer._engine.formats.zarr.layout import array_path
from eformer._engine.processes.hosts import told_to_all
from eformer._engine.record.indexes import FORMAT, Listed
from eformer._engine.record.manifest import Receipt, encode_leaves
from eformer._engine.record.planned import data_files, leaf_entries
from eformer._engine.saving.commit import commit_of
from eformer._engine.saving.fingerprints import note_fingerprints
from eformer._engine.saving.reuse import Kept, apart, find_earlier, keep_chunks, keep_files
from eformer._engine.saving.staging import Staging
from eformer._engine.saving.write import AtSource, compute_sha256, write
from eformer._engine.stores.store_options import options_of_call
from eformer._engine.stores.urls import is_same_bucket
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.pool import default_threads, gc_paused
from eformer._engine.tasks.progress import SILENT, metered
from eformer._engine.tasks.turns import turns

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from eformer._engine.formats.write_format import WriteFormat
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.digests import Hasher
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.planned import PlannedFile, Source
    from eformer._engine.saving.reuse import Earlier
    from eformer._engine.stores.base import Store, Upload
    from eformer._engine.tasks.progress import Meter, Progress
    from eformer._engine.tasks.turns import Turn

logger = logging.getLogger("eformer")

Format = Literal["safetensors", "zarr", "tensorstore"]
Kind = Literal["safetensors", "zarr"]

ALIASES: dict[str, Kind] = {FORMAT: "zarr"}
"""Names that arguments may use for a format: manifests call zarr arrays "tensorstore"."""

_MOST_WRITERS = 8  # threads: more than these wait for each other instead of the disk


def complete(save: Save, progress: Progress = None, meter: Meter = SILENT) -> None:
    """Write the tree and commit it.

    An error before the index is replaced leaves the previous checkpoint. After a later error, such as a failed sync,
    the new checkpoint is in place. Other processes hear of the error.
    """
    with ExitStack() as stack, told_to_all(save.hosts):
        stack.callback(save.turn.end)  # called last, so that the next save finds the upload closed
        # On a disk this limits only the waits for other saves and for readers; in a bucket, the whole save.
        if (limit := save.options.timeout) is not None:
            stack.enter_context(within(limit, f"SaveOptions(timeout={limit})"))
        if save.begin:
            save.begin(save)
        save.format = save.new_format()
        if progress is not None:
            total = sum(map(save.format.own_nbytes, save.sources))
            meter = stack.enter_context(metered(progress, total, "saving"))
        save.prepare(stack)
        receipt = save.write(meter)
        save.commit(receipt)


def store_options_of(options: SaveOptions, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Apply the store options of a save to its path and, in the same bucket, to the path that `reuse` names."""
    given, reuse = options.store_options, options.reuse
    if given and isinstance(reuse, (str, os.PathLike)) and is_same_bucket(path, reuse):
        return options_of_call(given, path, reuse)
    return options_of_call(given, path)


class Compared(Struct):
    """Values that the processes of one save compare.

    `replicas` must be equal: otherwise the processes are at different steps, and the checkpoint would be a mixture.
    `own` is a hash of arrays and metadata that each process has for itself; a difference is only logged.
    """

    replicas: list[Source]
    own: Hasher


@dataclass(slots=True)
class Save:
    """A save, from its snapshot to its commit. `SaveOfSeveral` extends it for several processes.

    store, file     the directory to save to, and the name of a single file or ""
    prefix          the name of the tree in the directory, or ""
    sources         the leaves: in `save` the caller's arrays, in `save_async` copies of all arrays that the caller may
                    change or donate. Emptied when the planned files hold them
    entry           the record, to which the commit adds files and leaves
    hosts           the processes that save together
    turn            the place among the saves of this process to the same path
    compared        the values that several processes compare; a single process ignores them
    before          events of earlier saves to the checkpoint that `reuse` names; the save waits for them before it
                    links
    has_index       False writes arrays without an index, as another program would
    overwrite       replace a file even if eformer did not write it
    whole_files     link a file only if all leaves in it are unchanged, so that other programs can open it
    begin           called first, in the thread of the save; may change `options.reuse`
    late            called in the first process, before the lock, with the `own_metadata` of every process; returns more
                    metadata, as JSON
    own_metadata    the metadata that this process adds, such as its position in the data
    fence           called during the commit: under the lock on a disk, perhaps several times in a bucket. If it raises,
                    nothing is committed
    at_source       makes the digests of planned files that accelerators compute, which need jax
    """

    store: Store
    file: str
    prefix: str
    kind: Kind
    sources: list[Source]
    entry: TreeEntry
    options: SaveOptions
    hosts: Hosts
    turn: Turn
    compared: Compared | None = None
    before: Sequence[threading.Event] = ()
    has_index: bool = True
    overwrite: bool = False
    whole_files: bool = False
    begin: Callable[[Save], None] | None = None
    late: Callable[[Sequence[bytes]], Mapping[str, Any]] | None = None
    own_metadata: bytes = b""
    fence: Callable[[], None] | None = None
    at_source: Callable[[Sequence[PlannedFile], int], AtSource] | None = None
    format: WriteFormat = field(init=False)
    upload: Upload = field(init=False)

    @property
    def threads(self) -> int:
        return self.options.threads or min(default_threads(), _MOST_WRITERS)

    def new_format(self) -> WriteFormat:
        """Make the format of this save, for the save id of its tree."""
        several, process = self.hosts.count > 1, self.hosts.number
        save_id, block = self.entry.save_id, self.entry.block
        if self.kind == "zarr":
            arrays = {s.name: Listed(array_path(s.name), s.shape, s.dtype) for s in self.sources}
            return ZarrArrays(
                self.prefix, save_id, block, self.options, arrays, self.has_index, several, process
            )
        tensors = tensor_names(source.name for source in self.sources)
        if self.file:
            return SafetensorsFile(self.file, self.prefix, self.entry, tensors, self.overwrite)
        limit = self.options.max_shard_bytes
        return SafetensorsDirectory(self.prefix, save_id, block, tensors, limit, several, process)

    # -------------------------------------------------------------------------------------- prepare

    def prepare(self, stack: ExitStack) -> None:
        """Check the place, and begin the upload. Refuse files of other programs.

        On a disk a new directory appears at the commit.
        """
        self.upload = self.format.begin(self.store, may_be_new=not self.format.check_place(self.store))
        stack.callback(self.upload.close)  # removes the new files if they were not committed

    # ---------------------------------------------------------------------------------------- write

    def write(self, meter: Meter) -> Receipt:
        """Write the leaves and boxes of this process. Return their record.

        The files are complete and synced, and lie where no reader looks.
        """
        staging = Staging(self.options.staging_bytes)
        sha256 = compute_sha256(self.sources, staging, self.threads) if self.options.checksums else {}
        kept, files, leaves = self.lay_out(staging, sha256, meter)
        # From here on only the planned files hold the arrays, and release each as it is written: a save in the
        # background must not keep copies of all arrays until its end.
        self.sources.clear()
        # `write` sets the digests of the planned files, and `receipt` records them. `sha256` has only the optional
        # checksums. A header that contains digests is made when the digests of its file are known.
        header = partial(self.format.header, sha256=sha256) if self.format.header_needs_digests else None
        block = self.entry.block
        at_source = self.at_source(files, block) if self.at_source else None
        write(
            files,
            self.upload,
            block,
            staging,
            threads=self.threads,
            meter=meter,
            header=header,
            at_source=at_source,
        )
        receipt = self.receipt(files, kept, leaves, sha256)
        receipt.own_metadata = [self.own_metadata]
        return receipt

    def lay_out(
        self, staging: Staging, sha256: Mapping[str, str], meter: Meter
    ) -> tuple[Kept, list[PlannedFile], dict[str, LeafEntry | None]]:
        """Link files of an earlier save that hold unchanged leaves, and plan the files of all other leaves.

        Return the linked files, the planned files, and every leaf by name in the order of the tree: the entry of a leaf
        without elements, None for a leaf whose entry comes from the files.
        """
        kept, groups = Kept(), [self.sources]
        earlier = self._earlier() if self.options.reuse else None
        if self.kind == "safetensors" and self.options.reuse and self.hosts.count == 1:
            if earlier:
                barred = self.format.read_index(self.store).barred
                kept, groups = keep_files(
                    earlier, self.sources, self.upload, staging, self.threads, barred, whole=self.whole_files
                )
            # Also without an earlier checkpoint: the next save can then link whole files.
            groups = [some for group in groups for some in apart(group)]
            meter.add(kept.nbytes)
        with gc_paused():
            files = self.format.layout(groups, sha256)
            leaves = {s.name: s.entry((), sha256.get(s.name)) if 0 in s.shape else None for s in self.sources}
        if self.kind == "zarr" and self.has_index and self.hosts.count == 1:
            note_fingerprints(files, self.entry.block, staging, self.threads, costly=self.options.checksums)
        if self.kind == "zarr" and earlier:
            meter.add(keep_chunks(earlier, files, self.upload, staging, self.threads))
        return kept, files, leaves

    def _earlier(self) -> Earlier | None:
        """Find the checkpoint whose files this save may link."""
        reuse = self.options.reuse
        if self.kind == "safetensors" and self.hosts.count > 1:
            logger.warning(
                "reuse: several processes write all leaves to safetensors files: %s", self.store.url
            )
            return None
        turns.wait(self.before)
        place = self.store.url if reuse is True else os.fspath(reuse or "")
        recorded = FORMAT if self.kind == "zarr" else self.kind
        with store_options_of(self.options, self.store.url):
            return find_earlier(place, self.prefix, recorded, self.entry.block, to=self.store)

    def receipt(
        self,
        files: Sequence[PlannedFile],
        kept: Kept,
        leaves: Mapping[str, LeafEntry | None],
        sha256: Mapping[str, str],
    ) -> Receipt:
        """Record the files that were written or linked. `leaves` gives the order."""
        with gc_paused():
            found = leaf_entries(files, sha256)
            if kept.leaves:
                found |= kept.entries(len(files), sha256)
            entries = {
                name: found[name] if entry is None else found.get(name, entry)
                for name, entry in leaves.items()
            }
            return Receipt([*data_files(files), *kept.files], entries)

    # --------------------------------------------------------------------------------------- commit

    def commit(self, receipt: Receipt) -> None:
        """Let readers find the tree, whose files are complete and synced, under its prefix."""
        entry = self.recorded(receipt)
        if self.late:
            metadata = {**entry.raw_metadata, **self.late(receipt.own_metadata)}
            entry = msgspec.structs.replace(entry, raw_metadata=metadata)
        self.turn.wait()  # for earlier saves to this path, and for loads of this process that saves have overtaken
        self.upload.commit(commit_of(self, entry))

    def recorded(self, receipt: Receipt) -> TreeEntry:
        """Return the tree as the manifest records it."""
        raw_leaves = encode_leaves(receipt.leaves)
        return msgspec.structs.replace(self.entry, files=tuple(receipt.files), raw_leaves=raw_leaves)
