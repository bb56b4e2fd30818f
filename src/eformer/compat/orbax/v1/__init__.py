"""The newer generation of Orbax's calls: `save`, `load`, contexts, and `training.Checkpointer`."""

from eformer.compat.orbax.v1 import arrays, errors, handlers, multihost, options, path, training, tree
from eformer.compat.orbax.v1._context import Context
from eformer.compat.orbax.v1._functions import (
    AsyncResponse,
    StatefulCheckpointable,
    checkpointables_metadata,
    delete,
    is_orbax_checkpoint,
    load,
    load_async,
    load_checkpointables,
    load_pytree,
    load_pytree_async,
    metadata,
    pytree_metadata,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)
from eformer.compat.orbax.v1._metadata import CheckpointMetadata, PyTreeMetadata
from eformer.compat.orbax.v1.handlers import CheckpointableHandler

PLACEHOLDER = ...

__all__ = [
    "PLACEHOLDER",
    "AsyncResponse",
    "CheckpointMetadata",
    "CheckpointableHandler",
    "Context",
    "PyTreeMetadata",
    "StatefulCheckpointable",
    "arrays",
    "checkpointables_metadata",
    "delete",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "multihost",
    "options",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
    "tree",
]
