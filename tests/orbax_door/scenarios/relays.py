"""Programs in several processes, one after the other, on one root: another number of devices, another library.

With the door there are three passes: the door alone, the door after Orbax, and Orbax after the door in Orbax's layout.
"""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import Params, abstract, mesh, numbers, small, spread, state
from orbax_door.scenario import manager, outcome, scenario

EXITS = True  # a process ends as any program does: asynchronous saves are awaited


def _many():
    """Make a tree of many kinds of leaves."""
    return {
        **state(),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "bits": jnp.arange(8) % 3 == 0,
        "key": jax.random.key(5),
        "pair": (numbers(2), Params(1, jnp.ones(3))),
        "empty": {"a": {}, "b": [], "c": None},
        "names": {"a/b": 1, "c.d": 2.5},
        "text": "words",
        "scalar": np.float32(0.25),
        "int4": jnp.arange(8).astype(jnp.int4),
        "double": numbers(3, dtype="float64"),
        "large": spread(64, 128, spec=("y", "x")),
    }


@scenario(devices=(8, 8))
def every_kind_by_pytree(ocp, root, leg):
    if leg == 0:
        with ocp.PyTreeCheckpointer() as it:
            yield "save", it.save(root / "it", _many(), custom_metadata={"a": 1})
        return
    with ocp.PyTreeCheckpointer() as it:
        yield "restore", it.restore(root / "it")
        rules = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), it.metadata(root / "it").item_metadata.tree
        )
        yield "metadata", it.metadata(root / "it")
        yield "numpy", outcome(it.restore, root / "it", restore_args=rules)


@scenario(devices=(8, 8))
def every_kind_by_standard(ocp, root, leg):
    tree = {key: leaf for key, leaf in _many().items() if key != "text"}
    with ocp.CheckpointManager(root) as it:
        if leg == 0:
            yield "save", it.save(3, args=ocp.args.StandardSave(tree), custom_metadata={"x": [1]})
        else:
            yield "steps", it.all_steps()
            yield "restore", it.restore(3, args=ocp.args.StandardRestore())
            yield "target", outcome(it.restore, 3, args=ocp.args.StandardRestore(abstract(tree)))
            yield "custom", it.metadata(3).custom_metadata


@scenario(devices=(8, 8))
def every_kind_by_v1(ocp, root, leg):
    tree = {key: leaf for key, leaf in _many().items() if key != "scalar"}
    if leg == 0:
        yield (
            "save",
            ocp.v1.save_checkpointables(root / "it", {"state": tree, "config": {"a": "x", "b": {"c": "d"}}}),
        )
    else:
        yield "load", ocp.v1.load_checkpointables(root / "it")
        yield "metadata", ocp.v1.metadata(root / "it")
        yield "old way", outcome(ocp.PyTreeCheckpointer().restore, root / "it" / "state")


@scenario(devices=(8, 8))
def run_of_several_items(ocp, root, leg):
    args = ocp.args
    options = {
        "max_to_keep": 3,
        "step_prefix": "ckpt",
        "best_fn": lambda metrics: metrics["loss"],
        "best_mode": "min",
    }
    given = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(root, options=given, metadata={"version": 1} if leg == 0 else None) as it:
        if leg == 0:
            for step in range(5):
                given = args.Composite(
                    state=args.StandardSave(state()),
                    config=args.JsonSave({"step": step}),
                    rng=args.JaxRandomKeySave(jax.random.key(step)),
                )
                it.save(step, args=given, metrics={"loss": 5.0 - step}, custom_metadata={"step": step})
            return
        yield "steps", it.all_steps()
        yield "best", it.best_step()
        yield "metrics", [it.metrics(step) for step in it.all_steps()]
        yield "root", it.metadata().custom_metadata
        yield "custom", [it.metadata(step).custom_metadata for step in it.all_steps()]
        asked = args.Composite(
            state=args.StandardRestore(abstract(state())),
            config=args.JsonRestore(),
            rng=args.JaxRandomKeyRestore(),
        )
        yield "restore", it.restore(it.latest_step(), args=asked)
        yield (
            "goes on",
            it.save(7, args=args.Composite(state=args.StandardSave(state())), metrics={"loss": 0.0}),
        )
        it.wait_until_finished()
        yield "steps then", it.all_steps(read=True)


@scenario(devices=(8, 2))
def fewer_devices(ocp, root, leg):
    """The saved sharding cannot be had."""
    tree = {"a": None, "n": 3}
    if leg == 0:
        tree["a"] = spread(8, 4)
        with ocp.CheckpointManager(root) as it:
            it.save(0, args=ocp.args.StandardSave(tree))
        return
    two = jax.sharding.NamedSharding(mesh(2, names="z"), jax.sharding.PartitionSpec("z"))
    with ocp.CheckpointManager(root) as it:
        yield "no target", outcome(it.restore, 0, args=ocp.args.StandardRestore())
        yield "fallback", outcome(it.restore, 0, args=ocp.args.StandardRestore(fallback_sharding=two))
        bare = {"a": jax.ShapeDtypeStruct((8, 4), jnp.float32), "n": 0}
        yield "bare", outcome(it.restore, 0, args=ocp.args.StandardRestore(bare))
        asked = {"a": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=two), "n": 0}
        yield "asked", it.restore(0, args=ocp.args.StandardRestore(asked))
    path = root / "0" / "default"
    with ocp.PyTreeCheckpointer() as it:
        yield "pytree, no target", outcome(it.restore, path)
        found = it.metadata(path).item_metadata.tree
        yield "sharding of the metadata", outcome(lambda: found["a"].sharding.to_jax_sharding())
        rules = {"a": ocp.RestoreArgs(restore_type=np.ndarray), "n": ocp.RestoreArgs()}
        yield "numpy", it.restore(path, restore_args=rules)
        rules = {"a": ocp.ArrayRestoreArgs(restore_type=jax.Array), "n": ocp.RestoreArgs()}
        yield "any jax", outcome(it.restore, path, restore_args=rules)
    yield "v1", outcome(ocp.v1.load, root / "0", checkpointable_name="default")


@scenario(devices=(2, 8))
def more_devices(ocp, root, leg):
    if leg == 0:
        two = jax.sharding.NamedSharding(mesh(2, names="z"), jax.sharding.PartitionSpec("z"))
        with ocp.StandardCheckpointer() as it:
            it.save(root / "it", {"a": jax.device_put(numbers(8, 4), two)})
        return
    with ocp.StandardCheckpointer() as it:
        yield "no target", it.restore(root / "it")
        yield "bare", it.restore(root / "it", {"a": jax.ShapeDtypeStruct((8, 4), jnp.float32)})


@scenario(devices=(8, 8))
def exit_without_waiting(ocp, root, leg):
    if leg == 0:
        it = ocp.CheckpointManager(root / "m")
        for step in range(3):
            it.save(step, args=ocp.args.StandardSave(small()))
        ocp.StandardCheckpointer().save(root / "c", small())
        ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()).save(root / "d", small())
        return
    yield "steps", ocp.CheckpointManager(root / "m").all_steps()
    yield "path", outcome(ocp.StandardCheckpointer().restore, root / "c")
    yield "other path", outcome(ocp.PyTreeCheckpointer().restore, root / "d")


@scenario(devices=(8, 8, 8))
def resumed_twice(ocp, root, leg):
    with manager(ocp, root, max_to_keep=2, save_interval_steps=2) as it:
        latest = it.latest_step()
        yield "latest", latest
        start = 0
        if latest is not None:
            found = it.restore(
                latest, args=ocp.args.StandardRestore(abstract({"count": jnp.int32(0), "w": spread(8, 4)}))
            )
            yield "restored", found
            start = int(found["count"]) + 1
        for step in range(start, start + 5):
            it.save(step, args=ocp.args.StandardSave({"count": jnp.int32(step), "w": spread(8, 4)}))
        it.wait_until_finished()
        yield "steps", it.all_steps()


@scenario(devices=(8, 8))
def older_options_of_storage(ocp, root, leg):
    if leg == 0:
        for name, given in {
            "directories": {"use_ocdbt": False},
            "zarr3": {"use_zarr3": True},
            "both": {"use_ocdbt": False, "use_zarr3": True},
        }.items():
            with ocp.PyTreeCheckpointer(**given) as it:
                it.save(root / name, state())
        return
    for name in ("directories", "zarr3", "both"):
        with ocp.PyTreeCheckpointer() as it:
            yield name, it.restore(root / name)


@scenario(devices=(8, 8))
def partial_restores(ocp, root, leg):
    if leg == 0:
        with ocp.PyTreeCheckpointer() as it:
            it.save(root / "it", state())
        return
    with ocp.PyTreeCheckpointer() as it:
        item = {"params": {"w": ...}, "new": jax.ShapeDtypeStruct((2,), jnp.float32)}
        yield "partial", it.restore(root / "it", args=ocp.args.PyTreeRestore(item, partial_restore=True))
        rules = {"params": {"w": ocp.RestoreArgs()}, "new": ocp.RestoreArgs()}
        asked = ocp.args.PyTreeRestore(item, restore_args=rules, transforms={})
        yield "transforms", it.restore(root / "it", args=asked)
