"""A plugin of pytest for Orbax's own tests: devices, the coordinator they ask for, and the door in place of its classes.

`EFORMER_ORBAX_GRAFT=1` puts the door's classes and functions into every module of Orbax that has Orbax's own.
"""

import importlib
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.experimental.layout as layout
import portpicker
from absl import flags

# Modules of the package, and the names in them that the door has. Everything else stays Orbax's.
NAMES = {
    "": """CheckpointManager CheckpointManagerOptions Checkpointer AsyncCheckpointer PyTreeCheckpointer StandardCheckpointer
        StandardCheckpointHandler PyTreeCheckpointHandler JsonCheckpointHandler ArrayCheckpointHandler CompositeCheckpointHandler
        JaxRandomKeyCheckpointHandler NumpyRandomKeyCheckpointHandler Transform apply_transformations merge_trees""",
    "args": """Composite StandardSave StandardRestore PyTreeSave PyTreeRestore JsonSave JsonRestore ArraySave ArrayRestore
        JaxRandomKeySave JaxRandomKeyRestore NumpyRandomKeySave NumpyRandomKeyRestore""",
    "checkpoint_managers": """LatestN EveryNSteps EveryNStepsClosest EveryNSeconds BestN CustomSteps LatestDuration
        AnyPreservationPolicy FixedIntervalPolicy SpecificStepsPolicy ContinuousCheckpointingPolicy
        PreemptionCheckpointingPolicy InitialSavePolicy AnySavePolicy""",
    "checkpoint_utils": "construct_restore_args checkpoints_iterator wait_for_new_checkpoint",
    "tree": "to_flat_dict from_flat_dict serialize_tree deserialize_tree to_shape_dtype_struct",
    "path.step": "standard_name_format composite_name_format build_step_path",
    "v1": """save save_async load load_async save_checkpointables save_checkpointables_async load_checkpointables metadata
        checkpointables_metadata""",
    "v1.training": "Checkpointer",
}


def pytest_configure():
    """Start what Orbax's tests expect of their environment, then graft."""
    _older_names()
    jax.distributed.initialize(f"localhost:{portpicker.pick_unused_port()}", 1, 0)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["tests"])
    import orbax.checkpoint

    if os.environ.get("EFORMER_ORBAX_GRAFT"):
        from eformer.compat import orbax as door

        names = {place: found.split() for place, found in NAMES.items()}
        missing = graft(pairs(orbax.checkpoint, door, names), orbax_modules())
        print(f"grafted; the door lacks: {', '.join(missing) or 'nothing'}")


def _older_names():
    """Give JAX the names that Orbax of 2025 imports."""
    if not hasattr(layout, "DeviceLocalLayout"):
        layout.DeviceLocalLayout, layout.Layout = layout.Layout, layout.Format


def pairs(theirs, door, names):
    """List `(name, Orbax's object, the door's object)`; an object that one of them lacks is None."""
    return [
        (f"{place}.{name}".strip("."), _at(theirs, place, name), _at(door, place, name))
        for place, found in names.items()
        for name in found
    ]


def _at(module, place, name):
    for part in filter(None, place.split(".")):
        module = getattr(module, part, None)
    return getattr(module, name, None)


def graft(known, modules):
    """Replace Orbax's objects by the door's in every module that has them; return the names that the door lacks."""
    by_identity = {id(theirs): own for _, theirs, own in known if theirs is not None and own is not None}
    for module in modules:
        for name, found in list(vars(module).items()):
            if id(found) in by_identity:
                setattr(module, name, by_identity[id(found)])
    return [name for name, theirs, own in known if theirs is not None and own is None]


def orbax_modules():
    """Return the modules of Orbax that are loaded, and those that its tests import from."""
    for name in ("checkpoint_manager", "checkpoint_utils", "test_utils", "checkpointers", "args", "v1"):
        try:
            importlib.import_module(f"orbax.checkpoint.{name}")
        except ImportError:  # an older Orbax lacks it
            continue
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("orbax.")]
