"""Helpers that Orbax keeps in `utils`: of trees, of steps, of processes.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from eformer.compat.orbax._stored import describe
from eformer.compat.orbax.multihost import (
    broadcast_one_to_all,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)
from eformer.compat.orbax.step import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    get_save_directory,
    is_checkpoint_finalized,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)
from eformer.compat.orbax.tree import (
    PyTree,
    deserialize_tree,
    from_flat_dict,
    from_flattened_with_keypath,
    get_key_name,
    is_dict_key,
    is_empty_node,
    is_empty_or_leaf,
    is_sequence_key,
    serialize_tree,
    to_flat_dict,
    tuple_path_from_keypath,
)
from eformer.compat.orbax.tree import to_shape_dtype_struct as _struct_of

sync_global_devices = sync_global_processes

__all__ = [
    "TMP_DIR_SUFFIX",
    "PyTree",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "fully_replicated_host_local_array_to_global_array",
    "get_key_name",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_gcs_path",
    "is_pathways_backend",
    "is_primary_host",
    "is_scalar",
    "is_sequence_key",
    "is_tmp_checkpoint",
    "pytree_structure",
    "reached_preemption",
    "record_saved_duration",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "tmp_checkpoints",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
]


def is_gcs_path(path: Any) -> bool:
    """Tell whether a path is in a bucket of Google Cloud Storage."""
    return os.fspath(path).startswith("gs://")


def is_scalar(x: Any) -> bool:
    """Tell whether a value is a plain number."""
    return isinstance(x, (int, float, np.number))


def to_shape_dtype_struct(x: Any, dtype: Any = None, scalar_dtype: Any = None) -> Any:
    """Return the shape, the dtype and the sharding of an array."""
    return _struct_of(x, dtype, scalar_dtype)


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Accept the time of a save, which eformer does not report."""


def pytree_structure(directory: Any) -> Any:
    """Return the tree of a checkpoint with a name in the place of each leaf."""
    return jax.tree.map(lambda leaf: leaf.name, describe(directory).tree)


def fully_replicated_host_local_array_to_global_array(arr: Any) -> Any:
    """Return an array of this process, which all processes have alike, as one array of all processes."""
    if jax.process_count() == 1 and not isinstance(arr, jax.Array):
        arr = jax.numpy.asarray(arr)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    data = np.asarray(arr.addressable_data(0)) if isinstance(arr, jax.Array) else np.asarray(arr)
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
