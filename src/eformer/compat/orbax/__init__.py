"""Save and load by the calls of Orbax, with eformer: its files, its speed, its digests.

    from eformer.compat import orbax as ocp  # was: import orbax.checkpoint as ocp

`install()` puts it into the place of `orbax.checkpoint` for modules that import Orbax themselves, and
`python -m eformer.compat.orbax prog.py` runs an unchanged program so. Names of Orbax that are not here raise an
AttributeError that says so. Nothing here imports Orbax.

Tests: tests/compat_orbax/test_install.py.
"""

import sys
from importlib import import_module
from typing import Any

from eformer.compat.orbax._install import install as install

# The public names by their modules.
_NAMES = {
    "args": "CheckpointArgs",
    "checkpoint_manager": "AbstractCheckpointManager CheckpointManager CheckpointManagerOptions StepAlreadyExistsError",
    "checkpointers": "AbstractCheckpointer AsyncCheckpointer Checkpointer PyTreeCheckpointer StandardCheckpointer",
    "future": "Future",
    "handlers": (
        "ArrayCheckpointHandler AsyncCheckpointHandler BasePyTreeCheckpointHandler CheckpointHandler "
        "CheckpointHandlerRegistry CompositeCheckpointHandler CompositeOptions DefaultCheckpointHandlerRegistry "
        "JaxRandomKeyCheckpointHandler JsonCheckpointHandler NumpyRandomKeyCheckpointHandler ProtoCheckpointHandler "
        "PyTreeCheckpointHandler StandardCheckpointHandler"
    ),
    "options": "AsyncOptions",
    "transform_utils": "RestoreTransform Transform apply_transformations merge_trees",
    "type_handlers": "ArrayRestoreArgs PLACEHOLDER RestoreArgs SaveArgs",
    "version": "__version__",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = (
    *(
        "args",
        "arrays",
        "checkpoint_manager",
        "checkpoint_managers",
        "checkpoint_utils",
        "checkpointers",
        "future",
    ),
    *("handlers", "logging", "metadata", "multihost", "options", "path", "pathways", "step", "test_utils"),
    *("transform_utils", "tree", "type_handlers", "utils", "v1", "version"),
)
_AROUND = {
    "experimental": "v1 is `orbax.v1`; for emergency managers, Run(near=) keeps steps on hosts",
    "msgpack_utils": "use eformer.pytree",
    "aggregate_handlers": "eformer has one format for all trees",
    "serialization": "eformer stores leaves itself",
}

__all__ = sorted((*_HOME, *_MODULES, "install"))


def __getattr__(name: str) -> Any:
    # Late, because most programs use a part of it.
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "checkpoint":  # `from eformer.compat import orbax` for `import orbax.checkpoint`
        return sys.modules[__name__]
    if name == "checkpoint_args":
        return import_module(f"{__name__}.args")
    if name == "abstract_checkpoint_manager":
        return import_module(f"{__name__}.checkpoint_manager")
    around = (
        f": {_AROUND[name]}" if name in _AROUND else "; use it from orbax.checkpoint itself, beside the door"
    )
    raise AttributeError(f"{__name__} has no {name}{around}")


def __dir__() -> list[str]:
    return __all__
