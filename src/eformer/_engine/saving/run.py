"""A save that no longer needs its caller: write, commit. Needs no jax."""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from eformer._engine.formats.find import FOREIGN, find
from eformer._engine.formats.process_records import CARRIED
from eformer._engine.formats.safetensors.names import SUFFIX, base_name, marks
from eformer._engine.record.digests import sha256_of, stamp_digest, xxh3_128
from eformer._engine.record.manifest import (
    DataFile,
    LeafEntry,
    Manifest,
    ProcessRecord,
    Receipt,
    TreeEntry,
    encode_leaves,
    weight_of,
)
from eformer._engine.saving import commit as sealing
from eformer._engine.saving import safetensors_writer as safetensors
from eformer._engine.saving import zarr_writer as tensorstore
from eformer._engine.saving.agreement import Agreed, SaveSummary, agree, commit, require_visible
from eformer._engine.saving.reuse import Earlier, earlier
from eformer._engine.saving.staging import Staging, settled
from eformer._engine.saving.write import elements_of, entry_of, is_all_here, weight
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local import Scratch, logger, make_directories, scratch_for, sweep, sync_directory
from eformer._engine.stores.local_upload import ScratchTree
from eformer._engine.tasks.pool import default_threads, gc_paused, run_all
from eformer._engine.tasks.progress import SILENT, Meter, Progress, is_wanted, metered
from eformer._engine.trees.devices import compile_copies
from eformer.errors import FormatError, ProcessError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.planned import Source
    from eformer._engine.saving.pending import Pending, Turn

Format = Literal["safetensors", "tensorstore"]

_MOST_WRITERS = 8  # threads: with more they wait for each other, and not for the disk

_MOST_SHOWN = 200  # characters of a plain value, where it is described


class Compared(Protocol):
    """What several processes that save one tree compare with each other."""

    def replicas(self) -> list[str]: ...

    def own(self, more: bytes) -> str: ...


@dataclasses.dataclass(slots=True)
class Job:
    """A save that no longer needs its caller."""

    path: Path
    prefix: str
    format: Format
    sources: list[Source]
    tree: TreeEntry
    options: SaveOptions
    hosts: Hosts
    turn: Turn
    compared: Compared | None = None  # one process has nobody to compare with
    before: threading.Event | None = None
    names: Sequence[str] = ()
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    write_index: bool = True
    agreed: Agreed | None = None
    shared: ScratchTree | None = None
    bare: dict[str, LeafEntry] = dataclasses.field(default_factory=dict)
    kept: safetensors.Kept = dataclasses.field(default_factory=safetensors.Kept)
    progress: Progress = None
    meter: Meter = SILENT
    place: Directory | None = None

    def carry_out(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.turn.end)
            try:
                self.watch(stack)
                self.agree(stack)
                if self.format == "tensorstore":
                    self.into_arrays(stack)
                elif self.path.suffix == SUFFIX and not self.path.is_dir():
                    self.into_file(stack)
                else:
                    self.into_directory(stack)
            except BaseException as error:
                self.hosts.fail(error)
                raise

    def watch(self, stack: ExitStack) -> None:
        """From here on `progress` hears of what is written."""
        if is_wanted(self.progress):
            total = self.nbytes_of(self.sources)
            self.meter = stack.enter_context(metered(self.progress, total, "saving"))

    def run_in_background(self, pending: Pending, after: Callable[[], None] | None = None) -> None:
        """Carries it out in a thread of its own; `after` is called when it is committed."""

        def work() -> None:
            self.carry_out()
            if after:
                after()

        try:
            pending.start(work, afterwards=compile_copies)
        except BaseException as error:  # no thread was to be had: nobody shall wait for this save
            self.turn.end()
            self.hosts.fail(error)
            raise

    @property
    def threads(self) -> int:
        return self.options.threads or min(default_threads(), _MOST_WRITERS)

    def nbytes_of(self, sources: Iterable[Source]) -> int:
        """What this process writes of them, before compression."""
        own = safetensors.own_nbytes if self.format == "safetensors" else tensorstore.own_nbytes
        return sum(map(own, sources))

    def arranged(
        self, max_bytes: int, groups: Sequence[Sequence[Source]] | None = None
    ) -> list[safetensors.File]:
        """The arrays by file, no two groups in one. From here on only these hold them, and let go of what is
        written."""
        self.names = [source.name for source in self.sources]
        files = []
        with gc_paused():
            for sources in [self.sources] if groups is None else groups:
                files += safetensors.arrange(sources, max_bytes, self.tree.block, has_parts=bool(self.shared))
        self.sources = []
        return files

    def compute_checksums(self) -> None:
        """Of the leaves that this process has whole, if they are wanted."""
        if not self.options.checksums:
            return
        staging = Staging(self.options.staging_bytes)

        def compute(source: Source) -> None:
            self.checksums[source.name] = sha256_of(elements_of(source, staging))

        run_all([partial(compute, s) for s in self.sources if is_all_here(s)], self.threads)

    @property
    def earlier(self) -> Earlier | None:
        """The checkpoint that this save may take leaves from, if it may, and there is one."""
        reuse = self.options.reuse
        if reuse is False:
            return None
        if self.before:  # a save that was under way when this one was called
            self.before.wait()
        place = self.path if reuse is True else Path(reuse)
        return earlier(place, self.prefix, self.format, self.tree.block)

    # ------------------------------------------------------------------------------------ processes

    def agree(self, stack: ExitStack) -> None:
        """All processes save the same tree, under one id, into one place that the first one makes."""
        if self.hosts.count == 1:
            return
        self.agreed = agree(self.hosts, self.plan, lambda: self.propose(stack))
        self.tree = msgspec.structs.replace(self.tree, save_id=self.agreed.save_id)

    def plan(self) -> SaveSummary:
        """What has to be the same in all processes."""
        assert self.compared
        how = {name: getattr(self.options, name) for name in ("max_chunk_bytes", "compression", "ocdbt")}
        what = f"saves the prefix {self.prefix!r} as {self.format} with {how | {'write_index': self.write_index}}"
        lines = [
            f"{s.name}: {s.dtype}{list(s.shape)} of {s.home}"
            + (f", keys of {s.key}" if s.key else "")
            + (f", {s.sharding.spec} on {s.sharding.mesh}" if s.sharding else "")
            for s in self.sources
        ]
        values = [f"{name}: {json}"[:_MOST_SHOWN] for name, json in self.tree.raw_values.items()]
        structure = msgspec.json.encode(msgspec.json.decode(self.tree.structure), order="sorted")
        whole = msgspec.json.encode(self.tree.raw_values, order="sorted")
        metadata = msgspec.json.encode(self.tree.raw_metadata, order="sorted")
        return SaveSummary(
            what, lines + values + self.compared.replicas(), structure + whole, self.compared.own(metadata)
        )

    def propose(self, stack: ExitStack) -> Agreed:
        self.make_place()
        self.shared = ScratchTree(self.path)
        stack.callback(self.shared.discard)
        sync_directory(self.path)
        elsewhere = [number for number, source in enumerate(self.sources) if source.owner > 0]
        return Agreed(self.tree.save_id, str(self.path), self.shared.path.name, elsewhere)

    def enter(self, stack: ExitStack) -> None:
        """The place is there; of several processes, the one that the first has made."""
        if self.agreed is None:
            self.make_place()
            return
        ours = settled(self.sources, self.hosts, self.agreed.elsewhere)
        theirs = (old for old, new in zip(self.sources, ours, strict=True) if old is not new)
        self.meter.add(self.nbytes_of(theirs))  # which the first process writes
        self.sources = ours
        if self.shared is None:
            require_visible(self.path, self.agreed, Path.is_dir)
            self.shared = ScratchTree.join(self.path, self.agreed.scratch)
            stack.callback(self.shared.close)
        else:
            self.bare = {source.name: entry_of(source, ()) for source in self.sources}

    def leave(self) -> None:
        """The place is cleared before the others hear of the end, and perhaps look at the directory."""
        if self.shared:
            self.shared.discard()

    def require_all(self, receipt: Receipt) -> None:
        """Refuses to seal what is not every element of every leaf, once."""
        weights = (weight_of(name, math.prod(entry.shape)) for name, entry in self.bare.items())
        if self.bare and receipt.weight != sum(weights) % 2**64:
            raise ProcessError(
                "the processes have not written every element of every leaf once. Do they all see the same arrays on "
                "the same devices? A leaf may not be in one process's memory for one and on devices for another"
            )

    # --------------------------------------------------------------------------------------- arrays

    def into_arrays(self, stack: ExitStack) -> None:
        writer = self.arrays_writer()
        stack.callback(writer.close)
        commit(
            self.hosts,
            lambda: self.write_arrays(writer, stack),
            lambda receipt: self.seal_arrays(writer, receipt),
            writer.is_sealed,
        )

    def arrays_writer(self) -> tensorstore.ArraysWriter:
        return tensorstore.ArraysWriter(
            self.path,
            self.prefix,
            self.tree.save_id,
            self.options,
            block=self.tree.block,
            threads=self.threads,
            write_index=self.write_index,
            meter=self.meter,
        )

    def write_arrays(self, writer: tensorstore.ArraysWriter, stack: ExitStack) -> Receipt:
        arrays = self.prepare_arrays(writer, stack)
        if found := self.earlier:
            writer.keep(found, arrays)
        writer.write(arrays)
        return writer.receipt(self.checksums)

    def prepare_arrays(self, writer: tensorstore.ArraysWriter, stack: ExitStack) -> list[tensorstore.Array]:
        self.enter(stack)
        if self.shared:
            writer.share(self.shared, self.hosts.index, self.hosts.count)
        self.compute_checksums()
        sources, self.sources = self.sources, []
        self.names = [source.name for source in sources]
        return writer.prepare(sources)

    def seal_arrays(self, writer: tensorstore.ArraysWriter, receipt: Receipt) -> None:
        tree = self.with_leaves(receipt)
        self.turn.wait()
        writer.seal(tree)
        self.leave()

    # ------------------------------------------------------------------------------------ directory

    def make_place(self) -> None:
        make_directories(self.path)
        if self.format == "tensorstore":
            is_there = tensorstore.check_place(self.path)
        else:
            is_there = sealing.check_place(self.path, self.prefix)
        if not is_there:
            sync_directory(self.path.parent)  # perhaps one that died has made it, and not got so far

    def into_directory(self, stack: ExitStack) -> None:
        commit(
            self.hosts,
            lambda: self.write(stack),
            self.seal_directory,
            lambda: sealing.is_sealed(self.path, self.tree.save_id),
        )

    def write(self, stack: ExitStack) -> Receipt:
        """The data of this process, complete and synced in scratch files that stay locked until all is over."""
        self.enter(stack)
        self.place = stack.enter_context(Directory.open(self.path))
        self.compute_checksums()
        files = self.arranged(self.options.max_shard_bytes, self.keep(stack))
        for file in files:
            file.header = self.header_of(file)
            file.scratch = Scratch(self.shared.data if self.shared else self.place)
            stack.callback(file.scratch.discard)
        self.write_data(files)
        if self.shared:
            for file in files:
                file.header = self.header_of(file)  # as long as before, with digests
        safetensors.write_headers(files, self.threads)
        return self.receipt(files)

    def write_data(self, files: Sequence[safetensors.File]) -> None:
        staging = Staging(self.options.staging_bytes)
        safetensors.write_data(files, self.tree.block, staging, self.threads, self.meter)

    def keep(self, stack: ExitStack) -> list[list[Source]]:
        """Leaves that an earlier checkpoint has are taken from there. The others, in groups that need not be in one
        file."""
        if self.options.reuse is False:
            return [self.sources]
        if self.shared:
            logger.warning(
                "%s: of several processes, each writes all that it has: reuse is for one", self.path
            )
            return [self.sources]
        groups = [self.sources]
        if found := self.earlier:
            scratch = ScratchTree(self.path)
            stack.callback(scratch.discard)
            staging = Staging(self.options.staging_bytes)
            self.kept, groups = safetensors.keep(found, self.sources, scratch, staging, self.threads)
            self.meter.add(self.kept.nbytes)
        return [some for group in groups for some in safetensors.apart(group)]

    def header_of(self, file: safetensors.File) -> bytes:
        """Of several processes each puts what it records into its own files."""
        metadata = marks(self.tree.save_id, base_name(self.prefix))
        with gc_paused():
            if self.shared:
                extents = {name: entry.extents for name, entry in safetensors.entries([file]).items()}
                sha256 = {name: self.checksums[name] for name in extents if name in self.checksums}
                metadata[CARRIED] = ProcessRecord(extents, sha256).to_json().decode()
            return safetensors.header_of(file, metadata)

    def receipt(self, files: Sequence[safetensors.File]) -> Receipt:
        written = [
            DataFile(
                str(safetensors.scratch_of(f).path.relative_to(self.path)),
                f.nbytes,
                len(f.header),
                xxh3_128(f.header),
            )
            for f in files
        ]
        with gc_paused():
            if not self.shared:
                leaves = safetensors.entries(files) | self.kept.entries(len(files))
                return Receipt(written + self.kept.files, leaves)
            slots = [slot for file in files for slot in file.slots]
            return Receipt(written, {}, weight(slots), is_torn=any(slot.region for slot in slots))

    def seal_directory(self, receipt: Receipt) -> None:
        tree = self.with_leaves(receipt)
        self.turn.wait()
        assert self.place is not None
        sealing.seal(self.place, self.prefix, tree, [file.name for file in receipt.files], self.kept.finals)
        self.leave()

    def with_leaves(self, receipt: Receipt) -> TreeEntry:
        """In the order of the tree. Those of several processes are in the parts."""
        self.require_all(receipt)
        tree = msgspec.structs.replace(self.tree, files=tuple(receipt.files))
        if self.shared:
            parts: Any = "torn" if receipt.is_torn else "whole"
            return msgspec.structs.replace(tree, parts=parts, raw_leaves=encode_leaves(self.bare))
        with gc_paused():
            ordered = {name: receipt.leaves[name] for name in self.names}
            for name, sha256 in self.checksums.items():
                ordered[name] = msgspec.structs.replace(ordered[name], sha256=sha256)
        return msgspec.structs.replace(tree, raw_leaves=encode_leaves(ordered))

    # ------------------------------------------------------------------------------------- one file

    def into_file(self, stack: ExitStack) -> None:
        """One file that carries its own manifest. Digests have a fixed width, so its header's length is known
        before they are."""
        final = Path(os.path.realpath(self.path.parent)) / self.path.name
        self.check_file(final)
        self.compute_checksums()
        file, *others = self.arranged(2**63) or [safetensors.File([])]
        if others:
            raise FormatError(f"{self.path}: so many leaves need more than one header; save to a directory")
        make_directories(final.parent)
        place = stack.enter_context(Directory.open(final.parent))
        file.scratch = scratch_for(place, final.name)
        stack.callback(file.scratch.discard)
        file.header = self.header_with_manifest(file)
        self.write_data([file])
        file.header = stamp_digest(self.header_with_manifest(file))
        safetensors.write_headers([file], self.threads)
        self.turn.wait()
        place.rename(file.scratch.name, place, final.name)
        place.sync()
        sweep(place)

    def header_with_manifest(self, file: safetensors.File) -> bytes:
        with gc_paused():
            tree = self.with_leaves(Receipt([DataFile("", file.data_nbytes)], safetensors.entries([file])))
            manifest = Manifest(format=sealing.FORMAT).with_tree(self.prefix, tree)
            text = msgspec.json.encode(manifest).decode()
            return safetensors.header_of(file, {"digest": manifest.digest, "format": "pt", "manifest": text})

    def check_file(self, final: Path) -> None:
        """Refuses to replace a file of a checkpoint, or one that holds another tree than this save. Of a link only
        itself is replaced, never what it leads to."""
        if final.is_symlink():
            if sealing.is_named(final.parent, final.name):
                raise ValueError(f"{self.path} belongs to the checkpoint {final.parent}; save there")
            return
        try:
            found = find(final)
        except (FileNotFoundError, FormatError):  # nothing, or nothing of ours: the caller has named it
            return
        if found.path != final:
            raise ValueError(
                f"{self.path} belongs to the checkpoint {found.path}; save there, or to another file"
            )
        others = set(found.trees) - {self.prefix}
        if others and found.manifest.format not in FOREIGN:
            raise ValueError(
                f"{self.path} holds the tree {sorted(others)}, and one file holds one tree; save to a directory "
                "to keep several"
            )
