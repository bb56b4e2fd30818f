"""Metadata of steps, trees and roots, as programs of both generations read it."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import Params, abstract, small, spread, state
from orbax_door.scenario import fields, json_of, listing, manager, outcome, scenario, there


def _saved(ocp, root, tree, **given):
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "it", tree, **given)
        return it.metadata(root / "it")


@scenario
def of_a_path(ocp, root):
    found = _saved(ocp, root, state(), custom_metadata={"a": 1})
    yield "all", found
    yield "tree", found.item_metadata.tree
    yield "custom", found.custom_metadata
    names = (
        "metrics",
        "performance_metrics",
        "item_handlers",
        "init_timestamp_nsecs",
        "commit_timestamp_nsecs",
    )
    yield "types", {name: type(getattr(found, name)).__name__ for name in names}


@scenario
def of_a_path_as_older_programs_read_it(ocp, root):
    """openpi, penzai, Stoix and others read the metadata of a path as if it were the tree."""
    found = _saved(ocp, root, {"params": small(), "version": 3})
    yield "item", outcome(lambda: found["params"]["a"].shape)
    yield "map", outcome(lambda: sorted({type(each).__name__ for each in jax.tree.leaves(found)}))
    yield "in", outcome(lambda: "params" in found)
    yield "keys", outcome(lambda: sorted(found.keys()))


@scenario
def of_a_tree(ocp, root):
    found = _saved(ocp, root, {"params": small(), "list": [jnp.zeros(2), 3]}).item_metadata
    yield "all", found
    yield "item", found["params"]["a"]
    yield "absent", outcome(lambda: found["absent"])
    yield "in", ["params" in found, "absent" in found]
    yield "get", [found.get("list"), found.get("absent"), found.get("absent", 3)]
    yield "keys", sorted(found.keys())
    yield "values", len(list(found.values()))
    yield "items", sorted(key for key, _ in found.items())
    yield "len", len(found)
    yield "iter", sorted(found)
    yield "leaves", len(jax.tree.leaves(found))
    yield "mapped", outcome(lambda: jax.tree.map(lambda leaf: leaf.shape, found).tree)
    yield "mapped tree", jax.tree.map(lambda leaf: leaf.shape, found.tree)
    yield (
        "paths",
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(found.tree)[0]],
    )


@scenario
def of_leaves(ocp, root):
    tree = {
        "jax": spread(8, 4, spec=("x", "y")), "whole": jnp.zeros(3, jnp.bfloat16), "numpy": np.zeros((2, 2)), "int": 3,
        "float": 0.5, "text": "x", "none": None, "dict": {}, "key": jax.random.key(0), "scalar": np.float32(1),
        "list": [], "tuple": (), "device": jax.device_put(jnp.zeros(2), jax.devices()[3]),
    }  # fmt: skip
    found = _saved(ocp, root, tree).item_metadata.tree
    yield from found.items()
    yield "sharding", found["jax"].sharding.to_jax_sharding()
    yield "is array", {name: isinstance(leaf, ocp.metadata.ArrayMetadata) for name, leaf in found.items()}
    yield "is scalar", {name: isinstance(leaf, ocp.metadata.ScalarMetadata) for name, leaf in found.items()}
    yield "is text", {name: isinstance(leaf, ocp.metadata.StringMetadata) for name, leaf in found.items()}
    yield "is metadata", {name: isinstance(leaf, ocp.metadata.Metadata) for name, leaf in found.items()}
    yield "name", outcome(lambda: found["jax"].name)
    yield "directory", outcome(lambda: found["jax"].directory)
    yield "bytes", int(np.prod(found["jax"].shape)) * found["jax"].dtype.itemsize
    yield "dtype is a dtype", isinstance(found["whole"].dtype, np.dtype)


@scenario
def containers(ocp, root):
    found = _saved(ocp, root, {"t": (jnp.zeros(1), 2), "n": Params(1, {"x": 2}), "l": [1, [2]], "d": {1: 2}})
    yield "tree", found.item_metadata.tree


@scenario
def trees_that_are_no_dict(ocp, root):
    for name, tree in {
        "list": [jnp.zeros(2)],
        "tuple": (jnp.zeros(2), 3),
        "namedtuple": Params(1, 2),
        "nested": [[{"a": 1}]],
    }.items():
        found = _saved(ocp, root / name, tree).item_metadata
        yield name, found.tree
        yield f"{name} len", outcome(len, found)


@scenario
def targets_from_metadata(ocp, root):
    """Programs turn metadata into `ShapeDtypeStruct` leaves, and restore by them."""
    _saved(ocp, root, {"a": spread(8, 4), "b": numbers_of_two()})
    with ocp.PyTreeCheckpointer() as it:
        found = it.metadata(root / "it").item_metadata.tree
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)
        yield "item", item
        rules = ocp.checkpoint_utils.construct_restore_args(item)
        yield "restored", it.restore(root / "it", args=ocp.args.PyTreeRestore(item, restore_args=rules))
        shapes = outcome(jax.tree.map, ocp.tree.to_shape_dtype_struct, found)
        yield "of the library", shapes


def numbers_of_two():
    return {"c": jnp.ones((2, 3), jnp.bfloat16)}


@scenario
def of_a_step(ocp, root):
    args = ocp.args
    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"]) as it:
        given = args.Composite(state=args.StandardSave(small()), config=args.JsonSave({"a": 1}))
        it.save(0, args=given, metrics={"loss": 1.5}, custom_metadata={"lr": 0.1, "names": ["a"]})
        it.wait_until_finished()
        found = it.metadata(0)
        yield "all", found
        yield "item metadata", it.item_metadata(0)
        yield (
            "in",
            [
                "state" in found.item_metadata,
                "config" in found.item_metadata,
                "absent" in found.item_metadata,
            ],
        )
        yield "items", sorted(found.item_metadata.keys())
        yield "none for json", outcome(lambda: found.item_metadata.config)
        yield "handlers", sorted(found.item_handlers)
        yield "custom", found.custom_metadata
        yield "metrics", found.metrics
        yield (
            "times",
            [
                type(getattr(found, name)).__name__
                for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs")
            ],
        )
        yield "order of times", found.init_timestamp_nsecs <= found.commit_timestamp_nsecs


@scenario
def of_one_item(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.StandardSave(state()))
        it.wait_until_finished()
        yield "item metadata", it.item_metadata(0)
        yield "tree", it.item_metadata(0).tree
        yield "step", it.metadata(0).item_metadata.tree["step"]
        yield "handlers", type(it.metadata(0).item_handlers).__name__


@scenario
def of_a_new_manager(ocp, root):
    """A manager that has no handlers yet knows less."""
    args = ocp.args
    with ocp.CheckpointManager(root / "one") as it:
        it.save(0, args=args.StandardSave(small()), custom_metadata={"a": 1})
    with ocp.CheckpointManager(root / "many") as it:
        it.save(0, args=args.Composite(a=args.StandardSave(small()), b=args.JsonSave({})))
    with ocp.CheckpointManager(root / "one") as it:
        yield "one", outcome(it.item_metadata, 0)
        yield "one custom", it.metadata(0).custom_metadata
    with ocp.CheckpointManager(root / "many") as it:
        yield "many", outcome(it.item_metadata, 0)
    with ocp.CheckpointManager(root / "one", item_handlers=ocp.StandardCheckpointHandler()) as it:
        yield "one with a handler", it.item_metadata(0)
    with ocp.CheckpointManager(root / "many", item_names=("a", "b")) as it:
        yield "many with names", outcome(it.item_metadata, 0)
    handlers = {"a": ocp.PyTreeCheckpointHandler(), "b": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root / "many", item_handlers=handlers) as it:
        yield "many with handlers", it.item_metadata(0)
        yield "step", it.metadata(0)


@scenario
def of_absent_steps(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "item metadata", outcome(it.item_metadata, 5)
        yield "metadata", outcome(it.metadata, 5)
        yield "root", it.metadata()


@scenario
def of_a_root(ocp, root):
    with ocp.CheckpointManager(root, metadata={"version": 3, "nested": {"a": [1]}}) as it:
        yield "made", it.metadata()
        yield "custom", it.metadata().custom_metadata
        yield "file", there(root, "metadata", "metadata/_ROOT_METADATA")
        yield "json", json_of(root, "metadata", "_ROOT_METADATA")["custom_metadata"]
        yield "steps", it.all_steps()
    with ocp.CheckpointManager(root, metadata={"version": 4}) as it:
        yield "not replaced", it.metadata().custom_metadata
    with ocp.CheckpointManager(root) as it:
        yield "read", it.metadata().custom_metadata
        yield "as older programs read it", outcome(lambda: it.metadata()["version"])


@scenario
def of_a_root_that_is_not_saved(ocp, root):
    options = ocp.CheckpointManagerOptions(save_root_metadata=False)
    with ocp.CheckpointManager(root, options=options, metadata={"a": 1}) as it:
        yield "metadata", outcome(lambda: it.metadata().custom_metadata)
        yield "root", listing(root)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(root, options=options, metadata={"a": 1}) as it:
        yield "read only", it.metadata().custom_metadata
        yield "root then", listing(root)


@scenario
def of_a_root_that_is_no_json(ocp, root):
    yield "object", outcome(lambda: ocp.CheckpointManager(root, metadata={"a": object()}).close())
    yield "not a dict", outcome(lambda: ocp.CheckpointManager(root / "b", metadata=[1]).close())


@scenario
def of_a_directory_without_a_tree(ocp, root):
    (root / "a").mkdir()
    for kind in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
        with kind() as it:
            yield kind.__name__, outcome(lambda it=it: it.metadata(root / "a").item_metadata)


@scenario
def by_function(ocp, root):
    _saved(ocp, root, small(), custom_metadata={"a": 1})
    yield "absent", outcome(ocp.metadata.get_step_metadata, root / "absent")
    (root / "empty").mkdir()
    yield "empty", outcome(ocp.metadata.get_step_metadata, root / "empty")
    yield "path", outcome(ocp.metadata.get_step_metadata, root / "it")
    with ocp.CheckpointManager(root / "m") as it:
        it.save(0, args=ocp.args.StandardSave(small()))
    yield (
        "step",
        outcome(
            lambda: sorted(
                fields(ocp.metadata.get_step_metadata(root / "m" / "0"), "item_handlers", "metrics")
            )
        ),
    )


@scenario
def restored_by_metadata(ocp, root):
    """maxtext and gemma look at the metadata before they restore."""
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=args.Composite(items=args.PyTreeSave({"params": small(), "opt": small()})))
        it.wait_until_finished()
        found = it.item_metadata(0)
        yield "has items", "items" in found
        tree = found["items"].tree
        rules = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        asked = args.Composite(items=args.PyTreeRestore(tree, restore_args=rules))
        yield "restored", it.restore(0, args=asked)
        part = {"params": tree["params"]}
        rules = {"params": rules["params"]}
        asked = args.Composite(items=args.PyTreeRestore(part, restore_args=rules, partial_restore=True))
        yield "a part", it.restore(0, args=asked)


@scenario
def custom_metadata_that_is_no_json(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield (
            "save",
            outcome(it.save, 0, args=ocp.args.StandardSave(small()), custom_metadata={"a": object()}),
        )
        yield "wait", outcome(it.wait_until_finished)
        yield "steps", it.all_steps(read=True)


@scenario
def equality(ocp, root):
    one = _saved(ocp, root / "a", abstract_free()).item_metadata.tree
    two = _saved(ocp, root / "b", abstract_free()).item_metadata.tree
    yield "leaves", {key: one[key] == two[key] for key in one}
    made = ocp.metadata.ArrayMetadata(
        name="x", directory=None, shape=(3,), sharding=None, dtype=np.dtype("float32")
    )
    yield "made", made
    yield (
        "made equals",
        made
        == ocp.metadata.ArrayMetadata(
            name="x", directory=None, shape=(3,), sharding=None, dtype=np.dtype("float32")
        ),
    )


def abstract_free():
    return {"a": np.zeros(3), "n": 3}


@scenario
def abstract_of_state(ocp, root):
    """The helpers that make abstract trees."""
    arrays = {"params": state()["params"], "host": state()["host"]}
    yield "a tree", outcome(ocp.tree.to_shape_dtype_struct, arrays).error is None
    yield "mapped", outcome(jax.tree.map, ocp.tree.to_shape_dtype_struct, state())
    yield "mapped by utils", outcome(jax.tree.map, ocp.utils.to_shape_dtype_struct, state())
    yield (
        "dtype",
        outcome(jax.tree.map, lambda leaf: ocp.utils.to_shape_dtype_struct(leaf, jnp.bfloat16), arrays),
    )
    yield (
        "scalars",
        outcome(jax.tree.map, lambda leaf: ocp.utils.to_shape_dtype_struct(leaf, None, int), {"step": 5}),
    )
    yield "again", outcome(jax.tree.map, ocp.tree.to_shape_dtype_struct, abstract(state()))
