"""Carry out a save: agree, reuse, lay out, write, record, commit. Needs no jax."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from eformer._engine.formats.safetensors.names import tensor_names
from eformer._engine.formats.safetensors.write import SafetensorsDirectory, SafetensorsFile
from eformer._engine.formats.zarr.arrays import ZarrArrays
from eformer._engine.formats.zarr.layout import array_path
from eformer._engine.record.indexes import Listed
from eformer._engine.saving.agreement import Team, gather
from eformer._engine.saving.commit import receipt_of_one, receipt_of_several
from eformer._engine.saving.reuse import Kept, apart, find_earlier, keep_chunks, keep_files
from eformer._engine.saving.staging import Staging
from eformer._engine.saving.write import compute_sha256, write
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.pool import default_threads, gc_paused
from eformer._engine.tasks.progress import is_wanted, metered
from eformer._engine.tasks.turns import turns
from eformer._engine.trees.copies import compile_copies

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from eformer._engine.formats.write_format import WriteFormat
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.manifest import LeafEntry, Receipt, TreeEntry
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.planned import PlannedFile, Source
    from eformer._engine.saving.agreement import Compared
    from eformer._engine.saving.pending import Pending
    from eformer._engine.saving.reuse import Earlier
    from eformer._engine.stores.base import Store, Upload
    from eformer._engine.tasks.progress import Meter, Progress
    from eformer._engine.tasks.turns import Turn

logger = logging.getLogger("eformer")

Format = Literal["safetensors", "tensorstore"]

_MOST_WRITERS = 8  # threads: with more they wait for each other, and not for the disk


@dataclass(frozen=True, slots=True)
class Save:
    """A save that no longer needs its caller: `sources` hold the arrays until they are planned, and are empty then.

    store, file     where to: a directory, or a file in one
    tree            the record, without files and leaves
    has_index       False for arrays that shall look like those of any other program
    overwrite       replace a file even if eformer did not write it
    late            returns more metadata, as JSON, when the save is committed, given the `part` of every process
    part            what this process adds to the metadata, such as its place in the data
    fence           is called right before the commit: if it raises, nothing is committed
    compared        what several processes compare with each other
    before          the saves under way, when this one was called, to the place whose leaves it may use again
    whole_files     use a file again only if all leaves in it are unchanged, so that other programs can open it
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
    whole_files: bool = False
    has_index: bool = True
    overwrite: bool = False
    late: Callable[[Sequence[bytes]], Mapping[str, Any]] | None = None
    part: bytes = b""
    fence: Callable[[], None] | None = None

    @property
    def threads(self) -> int:
        return self.options.threads or min(default_threads(), _MOST_WRITERS)

    def format(self, save_id: str) -> WriteFormat:
        several, process = self.hosts.count > 1, self.hosts.index
        if self.kind == "tensorstore":
            arrays = {s.name: Listed(array_path(s.name), s.shape, s.dtype) for s in self.sources}
            return ZarrArrays(
                self.prefix, save_id, self.tree.block, self.options, arrays, self.has_index, several, process
            )
        tensors = tensor_names(source.name for source in self.sources)
        if self.file:
            return SafetensorsFile(self.file, self.prefix, self.tree, tensors, self.overwrite)
        limit = self.options.max_shard_bytes
        return SafetensorsDirectory(self.prefix, save_id, self.tree.block, tensors, limit, several, process)


def carry_out(save: Save, progress: Progress = None, meter: Meter | None = None) -> None:
    """Write the tree and commit it. On any error the previous checkpoint is left intact, and all processes hear of
    it."""
    with ExitStack() as stack, told_to_all(save.hosts):
        stack.callback(save.turn.end)
        limit = save.options.timeout
        stack.enter_context(within(limit, f"SaveOptions(timeout={limit})"))
        meter = meter or stack.enter_context(_watched(save, progress))
        team = gather(save, stack)
        with team.failing_together():
            receipt = write_tree(team, meter)
        team.commit(receipt)


def run_in_background(save: Save, pending: Pending, after: Callable[[], None] | None = None) -> None:
    """Carry out a save in a thread of its own; call `after` when it is committed."""

    def work() -> None:
        carry_out(save)
        if after:
            after()

    try:
        pending.start(work, afterwards=compile_copies)
    except BaseException as error:  # no thread could be started: nobody shall wait for this save
        save.turn.end()
        save.hosts.fail(error)
        raise


def write_tree(team: Team, meter: Meter) -> Receipt:
    """Write what this process has of the tree. Return the record of it: complete, synced, and seen by nobody yet."""
    save, upload = team.save, team.enter(meter)
    staging = Staging(save.options.staging_bytes)
    sha256 = compute_sha256(save.sources, staging, save.threads) if save.options.checksums else {}
    kept, files = plan(team, upload, staging, sha256, meter)
    leaves = take_sources(save, sha256)
    header = partial(team.format.header, sha256=sha256) if team.format.header_needs_digests else None
    write(
        files,
        upload,
        save.tree.block,
        staging,
        threads=save.threads,
        meter=meter,
        header=header,
    )
    if team.is_several:
        receipt = receipt_of_several(files, team.format, upload, sha256, team.numbers)
    else:
        receipt = receipt_of_one(files, kept, leaves, sha256)
    receipt.parts = [save.part]
    return receipt


def plan(
    team: Team, upload: Upload, staging: Staging, sha256: Mapping[str, str], meter: Meter
) -> tuple[Kept, list[PlannedFile]]:
    """Decide which files are kept of an earlier save, and which are written."""
    save, kept, groups = team.save, Kept(), [team.save.sources]
    earlier = _earlier(save)
    if save.kind == "safetensors" and save.options.reuse and not team.is_several:
        if earlier:
            barred = team.format.read_index(save.store).barred
            kept, groups = keep_files(
                earlier, save.sources, upload, staging, save.threads, barred, whole=save.whole_files
            )
        groups = [some for group in groups for some in apart(group)]
        meter.add(kept.nbytes)
    with gc_paused():
        files = team.format.layout(groups, sha256)
    if save.kind == "tensorstore" and earlier:
        meter.add(keep_chunks(earlier, files, upload, staging, save.threads))
    return kept, files


def _earlier(save: Save) -> Earlier | None:
    """Find the checkpoint that this save may take leaves from, if it may and there is one."""
    reuse = save.options.reuse
    if not reuse:
        return None
    if save.kind == "safetensors" and save.hosts.count > 1:
        logger.warning("reuse: several processes write all leaves to safetensors files: %s", save.store.url)
        return None
    turns.wait(save.before)
    place = save.store.url if reuse is True else os.fspath(reuse)
    return find_earlier(place, save.prefix, save.kind, save.tree.block, to=save.store)


def take_sources(save: Save, sha256: Mapping[str, str]) -> dict[str, LeafEntry | None]:
    """Let only the planned files hold the arrays from here on, which release each as it is written.

    Return the leaves in the order of the tree, with the entries of those without elements, which no file may hold.
    """
    with gc_paused():
        leaves = {s.name: s.entry((), sha256.get(s.name)) if 0 in s.shape else None for s in save.sources}
    save.sources.clear()
    return leaves


# ----------------------------------------------------------------------------------------- together


@contextmanager
def told_to_all(hosts: Hosts) -> Iterator[None]:
    """Tell the other processes of an error, so that none waits for this one."""
    try:
        yield
    except BaseException as error:
        hosts.fail(error)
        raise


@contextmanager
def _watched(save: Save, progress: Progress) -> Iterator[Meter]:
    """Report to `progress` what is written."""
    total = sum(map(save.format("").own_nbytes, save.sources)) if is_wanted(progress) else 0
    with metered(progress, total, "saving") as meter:
        yield meter
