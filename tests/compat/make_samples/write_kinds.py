"""Write checkpoints of every kind that the installed version of Orbax has, and what it restores from them.

    python write_kinds.py DIRECTORY

Runs in an environment with that Orbax, of Python 3.9 or later; `compare.py` makes those and calls this. DIRECTORY gets
one directory for each kind, called WAY-TREE, and `expected.json`:

    {"WAY-TREE": {item or "": {"/path/of/leaf": description}}}      what Orbax restored
    {"WAY-TREE": "an error"}                                        if this version cannot save it or restore it
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from describe import described_leaves
from flax.training import checkpoints as flax_checkpoints

WAYS = {}
_MOST_SECONDS = 60


def way(write):
    """Register a function that saves a tree, or something of its own, and returns what Orbax restores, by item."""
    WAYS[write.__name__] = write
    return write


# ------------------------------------------------------------------------------------------------------- trees


def base():
    return {
        "params": {
            "dense": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.arange(3, dtype=jnp.bfloat16)},
            "layers": [jnp.ones((2, 2)), np.arange(5)],
        },
        "np_f64": np.linspace(0, 1, 7),
        "zero_d": jnp.float32(2.5),
        "step": 10,
        "lr": 0.5,
        "flag": True,
    }


def optimizer():
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return {"params": params, "opt_state": chain.init(params), "step": jnp.int32(3)}


def empties():
    return {
        "a": jnp.ones(3),
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "deep": {"inner": {}, "b": jnp.ones(1)},
    }


def slashes():
    return {"a/b": jnp.arange(3.0), "a": {"c/d": {"e": jnp.arange(4.0)}}, "f": jnp.ones(2)}


def dots():
    return {"a.b": jnp.arange(3.0), "a": {"c": jnp.arange(4.0)}, "layer 0": jnp.ones(2), "größe": jnp.ones(1)}


def dtypes():
    names = [
        "bool",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "complex64",
    ]
    tree = {name: jnp.ones((2, 3), name) for name in names}
    return tree | {"int64": np.arange(3), "complex128": np.ones(2, complex)}


def nothing():
    return {"nothing": jnp.zeros((0, 3)), "w": jnp.ones(2)}


def fp8():
    return {"a": jnp.asarray(np.arange(4).astype(ml_dtypes.float8_e4m3fn)), "w": jnp.ones(2)}


def int4():
    return {"a": jnp.asarray(np.arange(4).astype(ml_dtypes.int4)), "w": jnp.ones(2)}


def texts():
    return {"name": "model", "w": jnp.ones(3)}


def keys():
    return {"rng": jax.random.key(7), "many": jax.random.split(jax.random.key(1), 3), "w": jnp.ones(3)}


def sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    shard = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    return {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), shard), "step": 4}


TREES = (base, optimizer, empties, slashes, dots, dtypes, nothing, fp8, int4, texts, keys, sharded)

# -------------------------------------------------------------------------------------- one tree, in a directory


def _save(handler, path, tree, **options):
    ocp.Checkpointer(handler).save(path, tree, **options)
    return {"": _restore(ocp.Checkpointer(handler), path, tree)}


def _restore(checkpointer, path, tree):
    """Restore without a target, or with one where 0.3.5 and 0.4.1 need it."""
    try:
        return checkpointer.restore(path)
    except ValueError as error:
        if not any(problem in str(error) for problem in _NEEDS_TARGET):
            raise
    if isinstance(checkpointer, ocp.StandardCheckpointer):
        restored = checkpointer.restore(path, tree)
    else:
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        restored = checkpointer.restore(path, item=tree, restore_args=restore_args)
    # As it is without a target, where an empty tuple is None.
    nested = ocp.utils.serialize_tree(restored, keep_empty_nodes=True)
    return jax.tree_util.tree_map(
        lambda leaf: None if _is_empty_tuple(leaf) else leaf, nested, is_leaf=_is_empty_tuple
    )


_NEEDS_TARGET = ("Unable to deserialize sharding", "Must provide target state")


def _is_empty_tuple(node):
    return isinstance(node, tuple) and not node


def _aggregate(tree, is_aggregated):
    return jax.tree_util.tree_map(lambda leaf: ocp.SaveArgs(aggregate=is_aggregated(leaf)), tree)


@way
def pytree(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(), path, tree)


@way
def pytree_ocdbt(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(use_ocdbt=True), path, tree)


@way
def pytree_plain(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(use_ocdbt=False), path, tree)


@way
def pytree_metadata(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(write_tree_metadata=True), path, tree)


@way
def pytree_zarr3(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True), path, tree)


@way
def pytree_plain_zarr3(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True), path, tree)


@way
def aggregated(path, tree):
    return _save(ocp.PyTreeCheckpointHandler(), path, tree, save_args=_aggregate(tree, lambda leaf: True))


@way
def half_aggregated(path, tree):
    save_args = _aggregate(tree, lambda leaf: np.ndim(leaf) < 2)
    return _save(ocp.PyTreeCheckpointHandler(), path, tree, save_args=save_args)


@way
def half_aggregated_plain(path, tree):
    save_args = _aggregate(tree, lambda leaf: np.ndim(leaf) < 2)
    return _save(ocp.PyTreeCheckpointHandler(use_ocdbt=False), path, tree, save_args=save_args)


@way
def standard(path, tree):
    with contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
        checkpointer.save(path, tree)
        if hasattr(checkpointer, "wait_until_finished"):
            checkpointer.wait_until_finished()
        return {"": _restore(checkpointer, path, tree)}


@way
def version_1(path, tree):
    from orbax.checkpoint import v1

    save, load = (v1.save, v1.load) if hasattr(v1, "load") else (v1.save_pytree, v1.load_pytree)
    save(path, tree)
    return {"": load(path)}


# -------------------------------------------------------------------------------------------- managers of steps


@way
def manager_of_one(path, tree):
    """A manager with one checkpointer, as before 0.5."""
    manager = ocp.CheckpointManager(path, ocp.PyTreeCheckpointer())
    for step in (2, 10):
        manager.save(step, tree | {"at": step})
    return {"": manager.restore(10)}


@way
def manager_of_items(path, tree):
    """A manager with a checkpointer for each item, as before 0.5."""
    checkpointers = {
        "state": ocp.PyTreeCheckpointer(),
        "about": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    options = ocp.CheckpointManagerOptions(step_prefix="run", max_to_keep=2)
    manager = ocp.CheckpointManager(path, checkpointers, options)
    for step in (9, 10):
        manager.save(step, {"state": tree | {"at": step}, "about": {"a": step}}, metrics={"loss": 0.5})
    restored = manager.restore(10)
    return {"state": restored["state"], "about": restored["about"]}


@way
def manager_with_args(path, tree):
    manager = ocp.CheckpointManager(path)
    for step in (2, 10):
        manager.save(step, args=ocp.args.StandardSave(tree | {"at": step}))
    manager.wait_until_finished()
    return {"": manager.restore(10, args=ocp.args.StandardRestore())}


@way
def manager_padded(path, tree):
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=8)
    manager = ocp.CheckpointManager(path, options=options)
    for step in (9, 10):
        manager.save(step, args=ocp.args.PyTreeSave(tree | {"at": step}))
    manager.wait_until_finished()
    return {"": manager.restore(10, args=ocp.args.PyTreeRestore())}


# ------------------------------------------------------------------------------- items that are not trees, once


def _composite(path, saves, restores):
    manager = ocp.CheckpointManager(path, item_names=tuple(saves))
    manager.save(1, args=ocp.args.Composite(**saves))
    manager.wait_until_finished()
    restored = manager.restore(1, args=ocp.args.Composite(**restores))
    return {name: restored[name] for name in saves}


def _state():
    return {"state": ocp.args.StandardSave({"w": jnp.arange(3.0)})}, {"state": ocp.args.StandardRestore()}


@way
def item_array(path):
    saves, restores = _state()
    saves |= {
        "array": ocp.args.ArraySave(jnp.arange(6.0).reshape(2, 3)),
        "number": ocp.args.ArraySave(np.arange(4)),
    }
    return _composite(
        path, saves, restores | {"array": ocp.args.ArrayRestore(), "number": ocp.args.ArrayRestore()}
    )


@way
def item_only_array(path):
    return _composite(
        path, {"array": ocp.args.ArraySave(jnp.arange(3.0))}, {"array": ocp.args.ArrayRestore()}
    )


@way
def item_key(path):
    saves, restores = _state()
    saves |= {
        "typed": ocp.args.JaxRandomKeySave(jax.random.key(3)),
        "raw": ocp.args.JaxRandomKeySave(jax.random.PRNGKey(4)),
    }
    return _composite(
        path,
        saves,
        restores | {"typed": ocp.args.JaxRandomKeyRestore(), "raw": ocp.args.JaxRandomKeyRestore()},
    )


@way
def item_numpy_key(path):
    saves, restores = _state()
    saves["nprng"] = ocp.args.NumpyRandomKeySave(np.random.RandomState(0).get_state())
    return _composite(path, saves, restores | {"nprng": ocp.args.NumpyRandomKeyRestore()})


@way
def item_json(path):
    saves, restores = _state()
    saves |= {"about": ocp.args.JsonSave({"a": [1, {"b": None}]}), "empty": ocp.args.JsonSave({})}
    found = _composite(
        path, saves, restores | {"about": ocp.args.JsonRestore(), "empty": ocp.args.JsonRestore()}
    )
    return {"state": found["state"], "about": found["about"], "empty": found["empty"]}


@way
def item_only_json(path):
    found = _composite(path, {"about": ocp.args.JsonSave({"a": 1})}, {"about": ocp.args.JsonRestore()})
    return {"about": found["about"]}


@way
def array_alone(path):
    return _save(ocp.ArrayCheckpointHandler(), path, jnp.arange(6.0).reshape(2, 3))


@way
def array_aggregated(path):
    array = jnp.arange(6.0).reshape(2, 3)
    return _save(ocp.ArrayCheckpointHandler(), path, array, save_args=ocp.SaveArgs(aggregate=True))


@way
def json_alone(path):
    return _save(ocp.JsonCheckpointHandler(), path, {"a": [1, 2], "b": "text"})


# --------------------------------------------------------------------------------------------------------- flax


@way
def flax_orbax(path, tree):
    """Compared with what Orbax restores: flax makes dicts of the lists when it has no target."""
    flax.config.update("flax_use_orbax_checkpointing", True)
    _flax(path, tree)
    return {"": ocp.PyTreeCheckpointer().restore(path / "checkpoint_10")}


@way
def flax_legacy(path, tree):
    flax.config.update("flax_use_orbax_checkpointing", False)
    return _flax(path, tree)


def _flax(path, tree):
    for step in (9, 10):
        flax_checkpoints.save_checkpoint(path, tree | {"at": step}, step, keep=2)
    return {"": flax_checkpoints.restore_checkpoint(path, None)}


# ------------------------------------------------------------------------------------------------------ the run


def write_way(name, directory):
    """Write the checkpoints of one way, and what Orbax restores from them, into `WAY.json`."""
    signal.signal(signal.SIGALRM, _give_up)
    write = WAYS[name]
    expected = {}
    for tree in TREES if write.__code__.co_argcount == 2 else [None]:
        kind = f"{name}-{tree.__name__}" if tree else name
        signal.alarm(_MOST_SECONDS)
        try:
            restored = write(directory / kind, tree()) if tree else write(directory / kind)
            expected[kind] = {item: described_leaves(value) for item, value in restored.items()}
        except Exception as error:  # noqa: BLE001 - of any kind, in one version or another
            expected[kind] = f"{type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc(file=sys.stderr)
    (directory / f"{name}.json").write_text(json.dumps(expected))


def _give_up(*_):
    raise TimeoutError(f"has not finished after {_MOST_SECONDS} seconds")


def write_all(directory):
    """Write all checkpoints, each way in a process of its own: before 0.4.4 all handlers of a process use databases as
    soon as one of them does."""
    expected = {}
    for name in WAYS:
        process = os.fork()
        if not process:
            write_way(name, directory)
            os._exit(0)  # managers that are still open would wait for their threads
        os.waitpid(process, 0)
        expected |= json.loads((directory / f"{name}.json").read_text())
    return expected


if __name__ == "__main__":
    there = Path(sys.argv[1]).resolve()
    everything = write_all(there)
    (there / "expected.json").write_text(json.dumps(everything))
