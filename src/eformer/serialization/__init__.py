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

# The public names by their modules; a test compares them with the imports below.
_NAMES = {
    "async_manager": "AsyncCheckpointManager CheckpointMetadata",
    "checkpointer": "CheckpointInterval Checkpointer find_latest_checkpoint",
    "serialization": "is_array_like join_key leaf_key_paths tree_deserialize_leaves tree_serialize_leaves",
    "utils": "apply_gather_functions broadcast_tensor chunk_tensor_by_memory derive_base_prefix_from_path"
    " estimate_array_nbytes estimate_available_memory flatten_for_broadcast group_keys_by_shard_size index_filename"
    " is_gcs_path optimize_shard_layout parse_gcs_path read_process_array reshard shard_filename to_host",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
_HOME["dry_run"] = "eformer._engine.loading.dry_run"

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
else:
    __all__ = sorted([*_HOME, *_NAMES])  # type checkers go by the imports


def __getattr__(name: str) -> Any:
    # Late, so that importing one submodule does not import the others.
    if name not in _HOME and name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_NAMES])
