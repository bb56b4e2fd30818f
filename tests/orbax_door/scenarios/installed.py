"""Programs that import Orbax by name, with the door in its place: submodules, aliases, libraries that import it."""

import jax.numpy as jnp

from orbax_door.inputs import small, state, zeros
from orbax_door.scenario import outcome, scenario, there

INSTALLED = True


@scenario
def forms_of_imports(ocp, root):
    import orbax.checkpoint
    import orbax.checkpoint as again
    from orbax import checkpoint

    yield "same", [again is ocp, checkpoint is ocp, orbax.checkpoint is ocp]
    from orbax.checkpoint import CheckpointManager, PyTreeCheckpointer, args, checkpoint_utils

    yield "names", [CheckpointManager is ocp.CheckpointManager, PyTreeCheckpointer is ocp.PyTreeCheckpointer]
    yield "modules", [args is ocp.args, checkpoint_utils is ocp.checkpoint_utils]


_MODULES = (
    "args checkpoint_args checkpoint_manager checkpoint_managers checkpoint_utils checkpointers future handlers logging "
    "metadata multihost options path path.step test_utils transform_utils tree type_handlers utils v1 v1.training "
    "experimental.v1 version aggregate_handlers msgpack_utils serialization "
    "_src.checkpoint_managers.preservation_policy _src.checkpoint_managers.save_decision_policy _src.path.step "
    "_src.metadata.tree _src.multihost.multihost _src.checkpointers.checkpointer _src.handlers.standard_checkpoint_handler"
).split()


@scenario(tail={name: {"name": name} for name in _MODULES})
def submodules(ocp, root, name):
    import importlib

    yield "found", outcome(importlib.import_module, f"orbax.checkpoint.{name}").error is None


@scenario
def names_of_submodules(ocp, root):
    from orbax.checkpoint import checkpoint_manager, checkpointers, handlers, type_handlers

    yield "manager", checkpoint_manager.CheckpointManager is ocp.CheckpointManager
    yield "options", checkpoint_manager.CheckpointManagerOptions is ocp.CheckpointManagerOptions
    yield "checkpointer", checkpointers.StandardCheckpointer is ocp.StandardCheckpointer
    yield "handler", handlers.StandardCheckpointHandler is ocp.StandardCheckpointHandler
    yield "rule", type_handlers.ArrayRestoreArgs is ocp.ArrayRestoreArgs


@scenario
def flax_utilities(ocp, root):
    from flax.training import orbax_utils

    tree = state()
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "a", tree, save_args=orbax_utils.save_args_from_target(tree))
        yield (
            "restored",
            it.restore(root / "a", item=zeros(tree), restore_args=orbax_utils.restore_args_from_target(tree)),
        )


@scenario
def flax_checkpoints(ocp, root):
    import flax
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", True)
    path = checkpoints.save_checkpoint(str(root), {"a": jnp.arange(3.0)}, 1, overwrite=True)
    yield "path", path
    yield "restored", outcome(checkpoints.restore_checkpoint, str(root), None)
    yield "like", outcome(checkpoints.restore_checkpoint, str(root), {"a": jnp.zeros(3)})
    checkpoints.save_checkpoint(str(root), {"a": jnp.arange(3.0) + 1}, 2, keep=1, overwrite=True)
    yield "latest", outcome(checkpoints.restore_checkpoint, str(root), None)
    yield "kept", there(root, "checkpoint_1", "checkpoint_2")


@scenario
def grain_positions(ocp, root):
    import grain

    data = iter(grain.MapDataset.range(10).to_iter_dataset())
    first = [next(data) for _ in range(3)]
    made = outcome(lambda: grain.checkpoint.CheckpointSave(data))
    yield "args", made.error is None
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=args.Composite(data=made.value, state=args.StandardSave(small())))
        it.wait_until_finished()
        other = iter(grain.MapDataset.range(10).to_iter_dataset())
        it.restore(0, args=args.Composite(data=grain.checkpoint.CheckpointRestore(other)))
        yield "goes on", [int(each) for each in (*first, next(other), next(data))]
        yield "files", there(root, "0/data")


@scenario
def lazy_import(ocp, root):
    """Keras imports it by name, at first use."""
    import importlib

    found = importlib.import_module("orbax.checkpoint")
    yield "v1", hasattr(found, "v1")
    yield (
        "names",
        [
            hasattr(found.v1, name)
            for name in ("save_checkpointables", "load_checkpointables", "training", "Context")
        ],
    )
    yield (
        "multihost",
        [
            hasattr(found.multihost, name)
            for name in ("is_jax_distributed_client_initialized", "is_primary_host")
        ],
    )


@scenario
def located_handlers(ocp, root):
    import pydoc

    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(small())))
        it.wait_until_finished()
        name = it.metadata(0).item_handlers["state"]
        yield "is the class", pydoc.locate(name) is ocp.StandardCheckpointHandler
