"""The documented serialization API, as thin functions over the engine.

async_manager      AsyncCheckpointManager, CheckpointMetadata
checkpointer       Checkpointer, CheckpointInterval, find_latest_checkpoint: save by rule, in a trainer
serialization      tree_serialize_leaves, tree_deserialize_leaves, and the names of leaves
utils              names of files, sizes, shard layouts, gathering and resharding
dry_run            compute how many bytes a load would put on each device

Every name of these modules can be imported from here, too:

    >>> from eformer.serialization import AsyncCheckpointManager
    >>> AsyncCheckpointManager().save(state, "run/step-100")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer._engine.loading.dry_run import dry_run as dry_run
    from eformer.serialization import async_manager as async_manager
    from eformer.serialization import checkpointer as checkpointer
    from eformer.serialization import serialization as serialization
    from eformer.serialization import utils as utils
    from eformer.serialization.async_manager import AsyncCheckpointManager as AsyncCheckpointManager
    from eformer.serialization.async_manager import CheckpointMetadata as CheckpointMetadata
    from eformer.serialization.checkpointer import Checkpointer as Checkpointer
    from eformer.serialization.checkpointer import CheckpointInterval as CheckpointInterval
    from eformer.serialization.checkpointer import find_latest_checkpoint as find_latest_checkpoint
    from eformer.serialization.serialization import is_array_like as is_array_like
    from eformer.serialization.serialization import join_key as join_key
    from eformer.serialization.serialization import leaf_key_paths as leaf_key_paths
    from eformer.serialization.serialization import tree_deserialize_leaves as tree_deserialize_leaves
    from eformer.serialization.serialization import tree_serialize_leaves as tree_serialize_leaves
    from eformer.serialization.utils import apply_gather_functions as apply_gather_functions
    from eformer.serialization.utils import broadcast_tensor as broadcast_tensor
    from eformer.serialization.utils import chunk_tensor_by_memory as chunk_tensor_by_memory
    from eformer.serialization.utils import derive_base_prefix_from_path as derive_base_prefix_from_path
    from eformer.serialization.utils import estimate_array_nbytes as estimate_array_nbytes
    from eformer.serialization.utils import estimate_available_memory as estimate_available_memory
    from eformer.serialization.utils import flatten_for_broadcast as flatten_for_broadcast
    from eformer.serialization.utils import group_keys_by_shard_size as group_keys_by_shard_size
    from eformer.serialization.utils import index_filename as index_filename
    from eformer.serialization.utils import is_gcs_path as is_gcs_path
    from eformer.serialization.utils import optimize_shard_layout as optimize_shard_layout
    from eformer.serialization.utils import parse_gcs_path as parse_gcs_path
    from eformer.serialization.utils import read_process_array as read_process_array
    from eformer.serialization.utils import reshard as reshard
    from eformer.serialization.utils import shard_filename as shard_filename
    from eformer.serialization.utils import to_host as to_host

_HOME = {
    "AsyncCheckpointManager": "eformer.serialization.async_manager",
    "CheckpointInterval": "eformer.serialization.checkpointer",
    "CheckpointMetadata": "eformer.serialization.async_manager",
    "Checkpointer": "eformer.serialization.checkpointer",
    "apply_gather_functions": "eformer.serialization.utils",
    "broadcast_tensor": "eformer.serialization.utils",
    "chunk_tensor_by_memory": "eformer.serialization.utils",
    "derive_base_prefix_from_path": "eformer.serialization.utils",
    "dry_run": "eformer._engine.loading.dry_run",
    "estimate_array_nbytes": "eformer.serialization.utils",
    "estimate_available_memory": "eformer.serialization.utils",
    "find_latest_checkpoint": "eformer.serialization.checkpointer",
    "flatten_for_broadcast": "eformer.serialization.utils",
    "group_keys_by_shard_size": "eformer.serialization.utils",
    "index_filename": "eformer.serialization.utils",
    "is_array_like": "eformer.serialization.serialization",
    "is_gcs_path": "eformer.serialization.utils",
    "join_key": "eformer.serialization.serialization",
    "leaf_key_paths": "eformer.serialization.serialization",
    "optimize_shard_layout": "eformer.serialization.utils",
    "parse_gcs_path": "eformer.serialization.utils",
    "read_process_array": "eformer.serialization.utils",
    "reshard": "eformer.serialization.utils",
    "shard_filename": "eformer.serialization.utils",
    "to_host": "eformer.serialization.utils",
    "tree_deserialize_leaves": "eformer.serialization.serialization",
    "tree_serialize_leaves": "eformer.serialization.serialization",
}

__all__ = [
    "AsyncCheckpointManager",
    "CheckpointInterval",
    "CheckpointMetadata",
    "Checkpointer",
    "apply_gather_functions",
    "async_manager",
    "broadcast_tensor",
    "checkpointer",
    "chunk_tensor_by_memory",
    "derive_base_prefix_from_path",
    "dry_run",
    "estimate_array_nbytes",
    "estimate_available_memory",
    "find_latest_checkpoint",
    "flatten_for_broadcast",
    "group_keys_by_shard_size",
    "index_filename",
    "is_array_like",
    "is_gcs_path",
    "join_key",
    "leaf_key_paths",
    "optimize_shard_layout",
    "parse_gcs_path",
    "read_process_array",
    "reshard",
    "serialization",
    "shard_filename",
    "to_host",
    "tree_deserialize_leaves",
    "tree_serialize_leaves",
    "utils",
]


def __getattr__(name: str) -> Any:
    # Late, so that importing one submodule does not import the others.
    if name not in _HOME and name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(__all__)
