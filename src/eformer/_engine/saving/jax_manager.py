"""A save whose arrays are written by JAX's own checkpoint manager; all else is as in any other save."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np

from eformer._engine.formats.zarr.zarray import is_known_to_tensorstore
from eformer._engine.record.manifest import Receipt
from eformer._engine.record.names import is_text
from eformer._engine.saving.agreement import commit
from eformer._engine.saving.pending import Pending
from eformer._engine.trees.devices import PACKED, is_key
from eformer._engine.trees.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.saving.run import Job
    from eformer._engine.saving.zarr_writer import Array


def serialize_with(manager: Any, job: Job, tree: Any, callback: Callable[[], None] | None) -> None:
    """Returns as soon as the arrays may be changed. The index is written when the manager has committed them.

    What it cannot write (numpy arrays, dtypes that TensorStore does not know, arrays that each process has for itself)
    is written at once. An error is raised by the manager's `wait_until_finished`, as JAX has it.
    """
    job.turn.end()  # the manager has its own order; should it fail, nobody shall wait for this save
    if not is_text(str(job.path)):
        raise ValueError(f"{str(job.path)!r} is not UTF-8, which TensorStore needs")
    stack = ExitStack()
    try:
        job.agree(stack)
        save = _HandedOver(job, stack)
        given, specs = save.write_rest(tree)
        weakref.finalize(
            save, stack.close
        )  # should the manager fail, it calls nobody, and only forgets about us
        _in_a_thread(lambda: manager.serialize(given, specs, on_commit_callback=lambda: save.seal(callback)))
    except BaseException as error:  # that of an earlier save of the manager's, perhaps
        job.hosts.fail(error, after_all=True)
        stack.close()
        raise
    save.digest_in_background(callback)


class _HandedOver:
    """A save between the manager and us. It calls `seal` in the first process alone, when all have written."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self.job, self.stack = job, stack
        self.writer = job.arrays_writer()
        self.digested = Pending(str(job.path))
        stack.callback(self.writer.close)
        self.theirs: list[Array] = []
        self.receipt = Receipt()

    def write_rest(self, tree: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        """What we have to write is written. Returns the arrays for the manager, and where to put them."""
        ours = self.job.prepare_arrays(self.writer, self.stack)
        leaves = {name: _numbers(leaf) for name, leaf in flatten(tree)[0].items()}
        several = self.job.hosts.count > 1
        self.theirs = [a for a in self.writer.arrays if _is_theirs(leaves[a.source.name], several)]
        names = {array.source.name for array in self.theirs}
        self.writer.write([array for array in ours if array.source.name not in names])
        specs = [_spec(self.writer.root, array) for array in self.theirs]
        return [leaves[array.source.name] for array in self.theirs], specs

    def digest_in_background(self, callback: Callable[[], None] | None) -> None:
        """What the manager writes is known by now, and so are its digests. Other processes than the first only have to
        hand theirs in."""

        def digest() -> Receipt:
            self.writer.digest(self.theirs)
            return self.writer.receipt(self.job.checksums)

        def hand_in() -> None:
            with self.stack:
                commit(self.job.hosts, digest, _never, self.writer.is_sealed)
            if callback is not None:
                callback()

        def keep() -> None:
            self.receipt = digest()

        self.digested.start(hand_in if self.job.hosts.index else keep)

    def seal(self, callback: Callable[[], None] | None) -> None:
        def write() -> Receipt:
            self.digested.result()
            self.writer.adopt(self.theirs)
            return self.receipt

        with self.stack:
            seal = partial(self.job.seal_arrays, self.writer)
            commit(self.job.hosts, write, seal, self.writer.is_sealed)
        if callback is not None:
            callback()


def _never(_: Receipt) -> None:
    raise AssertionError("the first process seals")


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _is_theirs(leaf: Any, several: bool) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.size or (several and leaf.is_fully_addressable):
        return False
    return is_known_to_tensorstore(np.dtype(leaf.dtype).name) and leaf.dtype not in PACKED


def _spec(root: str, array: Array) -> dict[str, Any]:
    described = msgspec.json.decode(array.zarray)
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{root}/{array.path}"},
        "metadata": {name: described[name] for name in ("chunks", "compressor", "shape")},
    }


def _in_a_thread(work: Callable[[], None]) -> None:
    """The manager runs an event loop, which it cannot where one is running: in a notebook."""
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
