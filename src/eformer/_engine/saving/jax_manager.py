"""Let JAX's own checkpoint manager write the arrays of a save; all else is as in any other save."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np

from eformer._engine.formats.zarr.layout import array_path
from eformer._engine.formats.zarr.zarray import (
    ZARRAY,
    check_alike,
    chunks_of,
    is_known_to_tensorstore,
    parse_zarray,
)
from eformer._engine.record.manifest import Receipt
from eformer._engine.record.names import is_text
from eformer._engine.saving.agreement import gather
from eformer._engine.saving.commit import commit
from eformer._engine.saving.pending import Pending
from eformer._engine.saving.record import receipt_of_one, receipt_of_several
from eformer._engine.saving.reuse import Kept
from eformer._engine.saving.run import take_sources
from eformer._engine.saving.staging import Staging, released
from eformer._engine.saving.write import compute_sha256, digests_of, write
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.on_disk import on_disk
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT
from eformer._engine.trees.devices import PACKED, is_key
from eformer._engine.trees.flatten import flatten
from eformer.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.record.planned import PlannedExtent, PlannedFile
    from eformer._engine.saving.run import Save

_MOST_ZARRAY = 2**20  # bytes


def serialize_with(manager: Any, save: Save, tree: Any, callback: Callable[[], None] | None) -> None:
    """Return as soon as the arrays may be changed. The index is written when the manager has committed them.

    Leaves that the manager cannot write (numpy arrays, dtypes that TensorStore does not know, arrays that each process
    has for itself) are written at once. An error is raised by the manager's `wait_until_finished`, as JAX has it.
    """
    save.turn.end()  # the manager has its own order; should it fail, nobody shall wait for this save
    if on_disk(save.store) is None:
        raise ValueError(
            f"{save.store.url}: JAX's own manager writes to local directories here; leave out manager= to save to a "
            "bucket"
        )
    if not is_text(save.store.url):
        raise ValueError(f"{save.store.url!r} is not UTF-8, which TensorStore needs")
    stack = ExitStack()
    try:
        handed_over = _HandedOver(save, stack)
        given, specs = handed_over.write_rest(tree)
        weakref.finalize(handed_over, stack.close)  # should the manager fail, it only forgets about us
        _in_a_thread(
            lambda: manager.serialize(given, specs, on_commit_callback=lambda: handed_over.commit(callback))
        )
    except BaseException as error:  # perhaps that of an earlier save of the manager
        save.hosts.fail(error, after_all=True)
        stack.close()
        raise
    handed_over.digest_in_background(callback)


class _HandedOver:
    """A save between the manager and us. It calls `commit` in the first process alone, when all have written."""

    def __init__(self, save: Save, stack: ExitStack) -> None:
        self.save, self.stack = save, stack
        self.team = gather(save, stack)
        self.digested = Pending(save.store.url)
        self.staging = Staging(save.options.staging_bytes)
        self.theirs: list[PlannedFile] = []
        self.receipt = Receipt()

    def write_rest(self, tree: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        """Write what the manager cannot. Return the arrays for it, and where to put them."""
        save, upload = self.save, self.team.enter(SILENT)
        if not isinstance(upload, LocalUpload):
            raise ValueError(f"{save.store.url}: JAX's checkpoint manager writes to local directories only")
        self.upload = upload
        sha256 = compute_sha256(save.sources, self.staging, save.threads) if save.options.checksums else {}
        self.sha256, self.shapes = sha256, {source.name: source.shape for source in save.sources}
        leaves = {name: _numbers(leaf) for name, leaf in flatten(tree)[0].items()}
        several = save.hosts.count > 1
        given = {name: leaves[name] for name in self.shapes if _is_theirs(leaves[name], several)}
        paths = {array_path(name) for name in given}
        # Every process needs the description of an array to hand it over, not only the one that writes it.
        every = [msgspec.structs.replace(source, is_first=True) for source in save.sources]
        self.described = {
            file.name.removesuffix(f"/{ZARRAY}"): file.header
            for file in self.team.format.layout([every], sha256)
            if not file.extents
        }
        self.files = self.team.format.layout([save.sources], sha256)
        self.leaves = take_sources(save, sha256)
        self.theirs = [file for file in self.files if file.name.rpartition("/")[0] in paths]
        ours = [file for file in self.files if file.name.rpartition("/")[0] not in paths]
        write(ours, upload, save.tree.block, self.staging, threads=save.threads, meter=SILENT)
        self.given = list(given)
        root = os.path.realpath(upload.data.path)  # TensorStore takes no path with dots
        return list(given.values()), [self.spec(root, array_path(name)) for name in given]

    def spec(self, root: str, path: str) -> dict[str, Any]:
        described = msgspec.json.decode(self.described[path])
        return {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{root}/{path}"},
            "metadata": {name: described[name] for name in ("chunks", "compressor", "shape")},
        }

    def digest_in_background(self, callback: Callable[[], None] | None) -> None:
        """Compute the digests of what the manager writes, which is known by now. Other processes than the first only
        have to hand theirs in."""

        def hand_in() -> None:
            with self.stack:
                self.team.meet(self.record, _never)
            if callback is not None:
                callback()

        def keep() -> None:
            self.receipt = self.record()

        self.digested.start(hand_in if self.save.hosts.index else keep)

    def record(self) -> Receipt:
        extents = [extent for file in self.theirs for extent in file.extents]
        run_all([partial(self.digest, extent) for extent in extents], self.save.threads)
        if self.team.is_several:
            return receipt_of_several(
                self.files, self.team.format, self.upload, self.sha256, self.team.numbers
            )
        return receipt_of_one(self.files, Kept(), self.leaves, self.sha256)

    def digest(self, extent: PlannedExtent) -> None:
        extent.digests[:] = digests_of(extent, self.save.tree.block, self.staging)
        extent.source = released(extent.source)

    def commit(self, callback: Callable[[], None] | None) -> None:
        def adopted() -> Receipt:
            self.digested.result()
            run_all([partial(self.adopt, name) for name in self.given], self.save.threads)
            self.upload.sync_files(self.upload.files())
            return self.receipt

        with self.stack:
            self.team.meet(adopted, partial(commit, self.team))
        if callback is not None:
            callback()

    def adopt(self, name: str) -> None:
        """Mark an array that TensorStore has written, for all processes, as ours; refuse it if it is not as planned."""
        path, shape = array_path(name), self.shapes[name]
        described = self.described[path]
        file = f"{path}/{ZARRAY}"
        check_alike(self.upload.read_new(file, _MOST_ZARRAY), described, file)
        planned = parse_zarray(described, file)
        chunks = (chunk for chunk, _ in chunks_of(shape, planned.chunks))
        for chunk, nbytes in self.upload.sizes_of_new(path, chunks).items():
            if nbytes != planned.chunk_nbytes:
                raise CorruptionError(
                    f"leaf {name!r}: TensorStore wrote {nbytes} bytes of chunk {chunk!r}, expected "
                    f"{planned.chunk_nbytes}"
                )
        self.upload.rewrite(file, described)


def _never(_: Receipt) -> None:
    raise AssertionError("the first process commits")


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _is_theirs(leaf: Any, several: bool) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.size or (several and leaf.is_fully_addressable):
        return False
    return is_known_to_tensorstore(np.dtype(leaf.dtype).name) and leaf.dtype not in PACKED


def _in_a_thread(work: Callable[[], None]) -> None:
    """Run the manager where no event loop is running, which it needs: a notebook has one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="eformer-jax-manager")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
