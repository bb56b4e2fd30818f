"""A save whose arrays are written by JAX's own checkpoint manager; all else is as in any other save."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np

from eformer.checkpoint._device import PACKED, is_key
from eformer.checkpoint._formats._zarr import is_known_to_tensorstore
from eformer.checkpoint._tree import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer.checkpoint._formats.tensorstore import Array
    from eformer.checkpoint._save import Job


def serialize_with(manager: Any, job: Job, tree: Any, callback: Callable[[], None] | None) -> None:
    """Returns as soon as the arrays may be changed. The index is written when the manager has committed them.

    What it cannot write (numpy arrays, dtypes that TensorStore does not know) is written at once. An error is
    raised by the manager's `wait_until_finished`, as JAX has it.
    """
    job.turn.end()  # the manager has its own order; should it fail, nobody shall wait for this save
    writer = job.arrays_writer()
    try:
        arrays = job.prepare_arrays(writer)
        leaves = {name: _numbers(leaf) for name, leaf in flatten(tree)[0].items()}
        theirs = [array for array in arrays if _is_theirs(leaves[array.source.name])]
        writer.write([array for array in arrays if not _is_theirs(leaves[array.source.name])])
        specs = [_spec(writer.root, array) for array in theirs]
    except BaseException:
        writer.close()
        raise

    def commit() -> None:
        try:
            writer.adopt(theirs)
            job.seal_arrays(writer, writer.receipt())
        finally:
            writer.close()
        if callback is not None:
            callback()

    given = [leaves[array.source.name] for array in theirs]
    try:
        _in_a_thread(lambda: manager.serialize(given, specs, on_commit_callback=commit))
    except BaseException:  # that of an earlier save of the manager's, perhaps
        writer.close()
        raise


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _is_theirs(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.size:
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
