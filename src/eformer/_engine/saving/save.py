"""Carry out a save: prepare the place, write, commit. Needs no jax."""

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
from eformer._engine.record.indexes import Listed
from eformer._engine.record.manifest import Receipt, encode_leaves
from eformer._engine.record.planned import data_files, leaf_entries
from eformer._engine.saving.commit import commit_of
from eformer._engine.saving.reuse import Kept, apart, find_earlier, keep_chunks, keep_files
from eformer._engine.saving.staging import Staging
from eformer._engine.saving.write import compute_sha256, write
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

Format = Literal["safetensors", "tensorstore"]

_MOST_WRITERS = 8  # threads: with more they wait for each other, and not for the disk


def carry_out(save: Save, progress: Progress = None, meter: Meter = SILENT) -> None:
    """Write the tree and commit it. On any error the previous checkpoint is left intact, and all processes hear of
    it."""
    with ExitStack() as stack, told_to_all(save.hosts):
        stack.callback(save.turn.end)
        limit = save.options.timeout
        stack.enter_context(within(limit, f"SaveOptions(timeout={limit})"))
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
    """The values that the processes of one save compare with each other.

    Replicas must be the same: if they differ, the processes are at different steps or have diverged, and the checkpoint
    would be a mixture. Arrays that each process has for itself, which are in the hash `own`, may differ.
    """

    replicas: list[Source]
    own: Hasher


@dataclass(slots=True)
class Save:
    """A save that no longer needs its caller: `sources` hold the arrays until they are planned, and are empty then.

    store, file     where to: a directory, or a file in one
    tree            the record, without files and leaves
    compared        the values that several processes compare with each other
    before          the saves under way, when this one was called, to the place whose leaves it may use again
    has_index       False for arrays that shall look like those of any other program
    overwrite       replace a file even if eformer did not write it
    whole_files     use a file again only if all leaves in it are unchanged, so that other programs can open it
    late            returns more metadata, as JSON, when the save is committed, given the `part` of every process
    part            the metadata that this process adds, such as its place in the data
    fence           is called right before the commit: if it raises, nothing is committed
    """

    store: Store
    file: str
    prefix: str
    kind: Format
    sources: list[Source]
    tree: TreeEntry
    options: SaveOptions
    hosts: Hosts
    turn: Turn
    compared: Compared | None = None
    before: Sequence[threading.Event] = ()
    has_index: bool = True
    overwrite: bool = False
    whole_files: bool = False
    late: Callable[[Sequence[bytes]], Mapping[str, Any]] | None = None
    part: bytes = b""
    fence: Callable[[], None] | None = None
    format: WriteFormat = field(init=False)
    upload: Upload = field(init=False)

    @property
    def threads(self) -> int:
        return self.options.threads or min(default_threads(), _MOST_WRITERS)

    def new_format(self) -> WriteFormat:
        """Make the format of this save, by the id that its tree has."""
        several, process = self.hosts.count > 1, self.hosts.index
        save_id, block = self.tree.save_id, self.tree.block
        if self.kind == "tensorstore":
            arrays = {s.name: Listed(array_path(s.name), s.shape, s.dtype) for s in self.sources}
            return ZarrArrays(
                self.prefix, save_id, block, self.options, arrays, self.has_index, several, process
            )
        tensors = tensor_names(source.name for source in self.sources)
        if self.file:
            return SafetensorsFile(self.file, self.prefix, self.tree, tensors, self.overwrite)
        limit = self.options.max_shard_bytes
        return SafetensorsDirectory(self.prefix, save_id, block, tensors, limit, several, process)

    # -------------------------------------------------------------------------------------- prepare

    def prepare(self, stack: ExitStack) -> None:
        """Begin the upload, which makes the place if it has no checkpoint yet. Refuse to replace files that are not a
        checkpoint."""
        self.upload = self.format.begin(self.store, is_first=not self.format.check_place(self.store))
        stack.callback(self.upload.close)

    # ---------------------------------------------------------------------------------------- write

    def write(self, meter: Meter) -> Receipt:
        """Write the part of the tree that this process has. Return its record: complete, synced, not yet visible."""
        staging = Staging(self.options.staging_bytes)
        sha256 = compute_sha256(self.sources, staging, self.threads) if self.options.checksums else {}
        kept, files = self.plan(staging, sha256, meter)
        # In the order of the tree, with the entries of leaves without elements, which no file may hold.
        with gc_paused():
            leaves = {s.name: s.entry((), sha256.get(s.name)) if 0 in s.shape else None for s in self.sources}
        self.sources.clear()  # from here on only the files hold the arrays, and release each as it is written
        header = partial(self.format.header, sha256=sha256) if self.format.header_needs_digests else None
        write(files, self.upload, self.tree.block, staging, threads=self.threads, meter=meter, header=header)
        receipt = self.receipt(files, kept, leaves, sha256)
        receipt.parts = [self.part]
        return receipt

    def plan(
        self, staging: Staging, sha256: Mapping[str, str], meter: Meter
    ) -> tuple[Kept, list[PlannedFile]]:
        """Decide which files are kept of an earlier save, and which are written."""
        kept, groups = Kept(), [self.sources]
        earlier = self._earlier() if self.options.reuse else None
        if self.kind == "safetensors" and self.options.reuse and self.hosts.count == 1:
            if earlier:
                barred = self.format.read_index(self.store).barred
                kept, groups = keep_files(
                    earlier, self.sources, self.upload, staging, self.threads, barred, whole=self.whole_files
                )
            groups = [some for group in groups for some in apart(group)]
            meter.add(kept.nbytes)
        with gc_paused():
            files = self.format.layout(groups, sha256)
        if self.kind == "tensorstore" and earlier:
            meter.add(keep_chunks(earlier, files, self.upload, staging, self.threads))
        return kept, files

    def _earlier(self) -> Earlier | None:
        """Find the checkpoint that this save may take leaves from, if there is one."""
        reuse = self.options.reuse
        if self.kind == "safetensors" and self.hosts.count > 1:
            logger.warning(
                "reuse: several processes write all leaves to safetensors files: %s", self.store.url
            )
            return None
        turns.wait(self.before)
        place = self.store.url if reuse is True else os.fspath(reuse or "")
        with store_options_of(self.options, self.store.url):
            return find_earlier(place, self.prefix, self.kind, self.tree.block, to=self.store)

    def receipt(
        self,
        files: Sequence[PlannedFile],
        kept: Kept,
        leaves: Mapping[str, LeafEntry | None],
        sha256: Mapping[str, str],
    ) -> Receipt:
        """Record the files that were written, and those that are kept. `leaves` gives the order."""
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
        """Make the tree, whose files are complete and synced, the checkpoint of its prefix."""
        tree = self.recorded(receipt)
        if self.late:
            metadata = {**tree.raw_metadata, **self.late(receipt.parts)}
            tree = msgspec.structs.replace(tree, raw_metadata=metadata)
        self.turn.wait()
        self.upload.commit(commit_of(self, tree))

    def recorded(self, receipt: Receipt) -> TreeEntry:
        """Return the tree as the manifest has it."""
        with gc_paused():
            leaves = encode_leaves(receipt.leaves)
        return msgspec.structs.replace(self.tree, files=tuple(receipt.files), raw_leaves=leaves)
