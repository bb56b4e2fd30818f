"""The documented serialization API, as thin functions over the engine.

async_manager      AsyncCheckpointManager, CheckpointMetadata
checkpointer       Checkpointer, CheckpointInterval, find_latest_checkpoint: save by rule, in a trainer
serialization      tree_serialize_leaves, tree_deserialize_leaves, dry_run, and the names of leaves
utils              names of files, sizes, shard layouts, gathering and resharding

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
    "serialization": "dry_run is_array_like join_key leaf_key_paths tree_deserialize_leaves tree_serialize_leaves",
    "utils": "apply_gather_functions broadcast_tensor chunk_tensor_by_memory derive_base_prefix_from_path"
    " estimate_array_nbytes estimate_available_memory flatten_for_broadcast group_keys_by_shard_size index_filename"
    " is_gcs_path optimize_shard_layout parse_gcs_path read_process_array reshard shard_filename to_host",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from eformer.serialization import async_manager as async_manager
    from eformer.serialization import checkpointer as checkpointer
    from eformer.serialization import serialization as serialization
    from eformer.serialization import utils as utils
    from eformer.serialization.async_manager import *  # noqa: F403
    from eformer.serialization.checkpointer import *  # noqa: F403
    from eformer.serialization.serialization import *  # noqa: F403
    from eformer.serialization.utils import *  # noqa: F403
else:
    __all__ = sorted([*_HOME, *_NAMES])  # type checkers go by the imports


def __getattr__(name: str) -> Any:
    # Late, so that the import of one submodule does not import the rest.
    if name not in _HOME and name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *_NAMES])
