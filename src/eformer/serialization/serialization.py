"""The documented functions that save and load trees as zarr arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer._engine.loading.load import load_tree
from eformer._engine.loading.preview import placement
from eformer._engine.loading.request import PlacementRequest, Request
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.names import readable as _readable
from eformer._engine.record.options import LoadOptions
from eformer._engine.saving.pending import serialize_with
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import refuse_swapped, start
from eformer._engine.tasks.interrupts import uninterrupted
from eformer.serialization._keys import is_array_like, join_key, leaf_key_paths

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import jax
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
    from jax.sharding import Mesh

    from eformer._engine.loading.preview import Placement
    from eformer._engine.loading.request import Rules

__all__ = [
    "dry_run",
    "is_array_like",
    "join_key",
    "leaf_key_paths",
    "tree_deserialize_leaves",
    "tree_serialize_leaves",
]


@uninterrupted
def tree_serialize_leaves(
    checkpoint_dir: str | os.PathLike[str],
    pytree: Any,
    manager: GlobalAsyncCheckpointManager | None = None,
    *,
    prefix: str | None = None,
    commit_callback: Callable[[], None] | None = None,
    write_index: bool = True,
) -> None:
    """Save `pytree` to the directory `checkpoint_dir` as zarr arrays, atomically and durably.

    All prefixes of a directory share one index.

    With JAX's `manager`, this function returns as soon as the arrays may be donated or changed, and
    `manager.wait_until_finished` waits for the commit and raises its error. The manager gets no arrays, but keeps its
    saves in order. `commit_callback()` is called once, after the commit.
    `write_index=False` writes the arrays alone, without digests and structure.

    Example:

        >>> tree_serialize_leaves("saved", {"w": jnp.ones(2)}, prefix="model")
    """
    refuse_swapped(pytree, checkpoint_dir, "tree_serialize_leaves(checkpoint_dir, pytree)")
    patience = getattr(manager, "_timeout_secs", None)  # a manager has a timeout of its own
    save = start(
        pytree,
        checkpoint_dir,
        prefix=prefix,
        format="tensorstore",
        hosts=_hosts.current("saves", None, patience),
        write_index=write_index,
        detach=manager is not None,
    )
    if manager is not None:
        serialize_with(manager, save, commit_callback)
        return
    complete(save)
    if commit_callback is not None:
        commit_callback()


def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str],
    mesh: Mesh | None,
    manager: GlobalAsyncCheckpointManager | None = None,
    *,
    prefix: str | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    callback: Callable[[jax.Array, str], jax.Array] | None = None,
    chunk_size: int | None = None,
) -> Any:
    """Load the tree with this prefix in `checkpoint_dir`, in its recorded structure, or as nested dicts if it has none.

    Leaves are placed by `shardings`, else by `partition_rules`, else as they were saved. On a mesh of several axes,
    leaves that were not saved on these axes need `shardings` or `partition_rules`.

    Every array goes to the mesh, also an array that was saved from numpy. An array of 64 bits that JAX cannot hold
    without jax_enable_x64 stays a numpy array, which is logged. Without a mesh, the mesh of `jax.set_mesh` is used, and
    leaves that nothing else places are replicated on it.

    `callback(array, key)` returns a replacement for each array. At most `chunk_size` arrays are read at a time. A
    `manager` finishes its pending writes first.

    Example:

        >>> tree_serialize_leaves("saved", {"w": jnp.ones(2)}, prefix="model")
        >>> tree_deserialize_leaves("saved", mesh, prefix="model")
        {'w': Array([1., 1.], dtype=float32)}
    """
    if manager is not None:
        finish: Any = manager.wait_until_finished  # untyped
        finish()
    request = request_of(
        mesh,
        prefix=prefix,
        rules=partition_rules,
        shardings=shardings,
        callback=callback,
        options=LoadOptions(batch=chunk_size),
    )
    return load_tree([checkpoint_dir], request).tree


def dry_run(
    what: Any,
    mesh: Mesh | None = None,
    *,
    rules: Rules | None = None,
    shardings: Any = None,
    prefix: str | None = None,
    dtype: Any = None,
) -> Placement:
    """Compute how many bytes a load would put on each device of the mesh, without reading data.

    what        the path of a checkpoint, or a tree of arrays or `ShapeDtypeStruct`s
    mesh        the mesh to load onto; None for the mesh of `jax.set_mesh`
    rules       where leaves go, by regular expressions
    shardings   where leaves go, by name
    prefix      the tree, if the checkpoint has several
    dtype       the dtype that floating leaves are cast to
    """
    return placement(what, mesh=mesh, rules=rules, shardings=shardings, prefix=prefix, dtype=dtype)


def request_of(
    mesh: Mesh | None,
    *,
    rules: Rules | None,
    shardings: Any,
    callback: Callable[[jax.Array, str], jax.Array] | None,
    every_leaf: bool = False,
    replicate: bool = False,
    **others: Any,
) -> Request:
    """Return the request of a documented load: every array goes to the mesh, and `callback` is given dotted keys."""
    placement = PlacementRequest(
        mesh=mesh,
        rules=rules,
        shardings=shardings,
        every_leaf=every_leaf,
        replicate=replicate,
        moves_numpy=True,
        rules_name="partition_rules",
    )
    by_key = None if callback is None else lambda array, name: callback(array, _readable(name))
    return Request(placement=placement, callback=by_key, **others)
