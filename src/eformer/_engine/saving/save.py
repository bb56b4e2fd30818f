"""Complete a save: prepare the directory, write, commit. Needs no jax."""

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

Format = Literal["safetensors", "zarr", "tensorstore"]
Kind = Literal["safetensors", "zarr"]

ALIASES: dict[str, Kind] = {FORMAT: "zarr"}
"""The word by which manifests call zarr arrays, which arguments may use as well."""

_MOST_WRITERS = 8  # threads: more than these wait for each other instead of the disk


def complete(save: Save, progress: Progress = None, meter: Meter = SILENT) -> None:
    """Write the tree and commit it. On any error the previous checkpoint stays, and all processes hear of the error."""
    with ExitStack() as stack, told_to_all(save.hosts):
        stack.callback(save.turn.end)  # called last, so that the next save finds the upload closed
        if (limit := save.options.timeout) is not None:
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

    Replicas must be equal: otherwise the processes are at different steps or have diverged, and the checkpoint would be
    a mixture. The hash `own` covers the arrays that each process has for itself, which may differ.
    """

    replicas: list[Source]
    own: Hasher


@dataclass(slots=True)
class Save:
    """A save that no longer needs its caller: `sources` hold the arrays until they are planned, and are empty then.

    store, file     the directory to save to, and the name of a single file or ""
    entry           the record, without files and leaves
    compared        the values that several processes compare with each other
    before          events of the saves that were under way to the checkpoint that `reuse` names; set when they are over
    has_index       False writes arrays without an index, as another program would
    overwrite       replace a file even if eformer did not write it
    whole_files     link a file only if all leaves in it are unchanged, so that other programs can open it
    late            called at the commit with the `own_metadata` of every process; returns more metadata, as JSON
    own_metadata    the metadata that this process adds, such as its position in the data
    fence           called right before the commit: if it raises, nothing is committed
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
    late: Callable[[Sequence[bytes]], Mapping[str, Any]] | None = None
    own_metadata: bytes = b""
    fence: Callable[[], None] | None = None
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
        """Begin the upload, which makes the directory of a first checkpoint. Refuse files of other programs."""
        self.upload = self.format.begin(self.store, may_be_new=not self.format.check_place(self.store))
        stack.callback(self.upload.close)

    # ---------------------------------------------------------------------------------------- write

    def write(self, meter: Meter) -> Receipt:
        """Write the leaves and boxes of this process. Return their record: complete, synced, not yet visible."""
        staging = Staging(self.options.staging_bytes)
        sha256 = compute_sha256(self.sources, staging, self.threads) if self.options.checksums else {}
        kept, files, leaves = self.lay_out(staging, sha256, meter)
        # From here on only the planned files hold the arrays, and release each as it is written: a save in the
        # background must not keep copies of all arrays until its end.
        self.sources.clear()
        header = partial(self.format.header, sha256=sha256) if self.format.header_needs_digests else None
        write(files, self.upload, self.entry.block, staging, threads=self.threads, meter=meter, header=header)
        receipt = self.receipt(files, kept, leaves, sha256)
        receipt.own_metadata = [self.own_metadata]
        return receipt

    def lay_out(
        self, staging: Staging, sha256: Mapping[str, str], meter: Meter
    ) -> tuple[Kept, list[PlannedFile], dict[str, LeafEntry | None]]:
        """Decide which files of an earlier save are linked, and which are written.

        Also return the leaves in the order of the tree. Leaves without elements, which no file may hold, have entries.
        """
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
            leaves = {s.name: s.entry((), sha256.get(s.name)) if 0 in s.shape else None for s in self.sources}
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
        """Make the tree, whose files are complete and synced, the checkpoint of its prefix."""
        entry = self.recorded(receipt)
        if self.late:
            metadata = {**entry.raw_metadata, **self.late(receipt.own_metadata)}
            entry = msgspec.structs.replace(entry, raw_metadata=metadata)
        self.turn.wait()
        self.upload.commit(commit_of(self, entry))

    def recorded(self, receipt: Receipt) -> TreeEntry:
        """Return the tree as the manifest records it."""
        raw_leaves = encode_leaves(receipt.leaves)
        return msgspec.structs.replace(self.entry, files=tuple(receipt.files), raw_leaves=raw_leaves)
