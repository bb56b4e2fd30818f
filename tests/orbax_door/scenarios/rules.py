"""Rules of a restore: targets, casts, missing and surplus leaves, transformations."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import Params, Train, abstract, mesh, numbers, sharded, small, spread, state, zeros
from orbax_door.scenario import fields, outcome, scenario


def _saved(ocp, root, tree):
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "it", tree)


def _standard(ocp, root, *args, **kwargs):
    with ocp.CheckpointManager(root / "m") as it:
        return outcome(it.restore, 0, args=ocp.args.StandardRestore(*args, **kwargs))


def _kept(ocp, root, tree):
    with ocp.CheckpointManager(root / "m") as it:
        it.save(0, args=ocp.args.StandardSave(tree))


def _pytree(ocp, root, *args, **kwargs):
    with ocp.PyTreeCheckpointer() as it:
        return outcome(it.restore, root / "it", args=ocp.args.PyTreeRestore(*args, **kwargs))


def _rules(ocp, item, **given):
    return ocp.checkpoint_utils.construct_restore_args(item, **given)


_SHAPES = {
    "longer": (12, 4),
    "shorter": (5, 4),
    "wider": (8, 6),
    "mixed": (12, 2),
    "flat": (32,),
    "other rank": (8, 4, 1),
}


@scenario(tail={name: {"shape": shape} for name, shape in _SHAPES.items()})
def another_shape(ocp, root, shape):
    _kept(ocp, root, {"a": spread(8, 4), "b": numbers(8, 4)})
    targets = {
        "abstract": lambda key: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharded()),
        "jax": lambda key: jnp.zeros(shape),
        "numpy": lambda key: np.zeros(shape, np.float32),
    }
    for name, target in targets.items():
        item = {key: target(key) for key in "ab"}
        yield f"{name}", _standard(ocp, root, item)
        yield f"{name} not strict", _standard(ocp, root, item, strict=False)


@scenario(
    tail={
        f"{old} to {new}": {"old": old, "new": new}
        for old in ("float32", "bfloat16", "int32", "bool")
        for new in ("float16", "bfloat16", "float64", "int8", "bool", "complex64")
    }
)
def another_dtype(ocp, root, old, new):
    _kept(ocp, root, {"a": jnp.asarray(numbers(8), dtype=old), "b": numbers(8).astype(old)})
    yield "numpy", _standard(ocp, root, {"a": np.zeros(8, new), "b": np.zeros(8, new)})
    yield "jax", _standard(ocp, root, {"a": jnp.zeros(8, new), "b": jnp.zeros(8, new)})
    it = jax.ShapeDtypeStruct((8,), new, sharding=sharded())
    yield "abstract", _standard(ocp, root, {"a": it, "b": it})


_OTHER = {
    "missing": {"a": jnp.zeros(8), "b": {"c": jnp.zeros((2, 3))}},
    "surplus": {"a": jnp.zeros(8), "b": {"c": jnp.zeros((2, 3))}, "step": jnp.int32(0), "z": jnp.zeros(2)},
    "deeper": {"a": {"x": jnp.zeros(8)}, "b": {"c": jnp.zeros((2, 3))}, "step": jnp.int32(0)},
    "flatter": {"a": jnp.zeros(8), "b": jnp.zeros((2, 3)), "step": jnp.int32(0)},
    "renamed": {"a": jnp.zeros(8), "b": {"d": jnp.zeros((2, 3))}, "step": jnp.int32(0)},
    "list": [jnp.zeros(8), jnp.zeros((2, 3))],
    "empty": {},
    "none leaf": {"a": None, "b": {"c": jnp.zeros((2, 3))}, "step": jnp.int32(0)},
    "empty node": {"a": jnp.zeros(8), "b": {}, "step": jnp.int32(0)},
}


@scenario(tail={name: {"name": name} for name in _OTHER})
def another_structure(ocp, root, name):
    item = _OTHER[name]
    _kept(ocp, root, small())
    _saved(ocp, root, small())
    yield "standard", _standard(ocp, root, item)
    yield "pytree item", _pytree(ocp, root, item)
    yield "pytree item and rules", _pytree(ocp, root, item, restore_args=_rules(ocp, item))
    yield "partial", _pytree(ocp, root, item, restore_args=_rules(ocp, item), partial_restore=True)
    yield "partial without rules", _pytree(ocp, root, item, partial_restore=True)
    yield "transforms", _pytree(ocp, root, item, restore_args=_rules(ocp, item), transforms={})
    yield "transforms without rules", _pytree(ocp, root, item, transforms={})


@scenario
def error_of_structure_has_words(ocp, root):
    _kept(ocp, root, small())
    call = lambda item: _standard(ocp, root, item).error

    def raised(item):
        raise call(item)

    yield "missing", outcome(raised, _OTHER["missing"], words="(?i)structure|match|mismatch")
    _saved(ocp, root, small())
    again = lambda: _raise(_pytree(ocp, root, _OTHER["surplus"]).error)
    yield "pytree", outcome(again, words="User-provided restore item")


def _raise(error):
    raise error


@scenario
def missing_leaves_stay_abstract(ocp, root):
    """Programs build on the leaves that the checkpoint lacks: they come back as they were asked for."""
    _saved(ocp, root, {"a": jnp.arange(4.0), "b": jnp.ones(3)})
    item = {
        "a": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharded()),
        "new": jax.ShapeDtypeStruct((5,), jnp.float32, sharding=sharded()),
        "sub": {"also": jax.ShapeDtypeStruct((2,), jnp.int32), "number": 3},
    }
    yield "partial", _pytree(ocp, root, item, restore_args=_rules(ocp, item), partial_restore=True)
    yield "transforms", _pytree(ocp, root, item, restore_args=_rules(ocp, item), transforms={})
    yield "neither", _pytree(ocp, root, item, restore_args=_rules(ocp, item))


@scenario
def placeholders(ocp, root):
    _saved(ocp, root, small())
    item = {"a": ocp.PLACEHOLDER, "b": {"c": jnp.zeros((2, 3), jnp.bfloat16)}, "step": ocp.PLACEHOLDER}
    yield "value", ocp.PLACEHOLDER
    yield "item", _pytree(ocp, root, item)
    rules = {
        "a": ocp.RestoreArgs(),
        "b": {"c": ocp.ArrayRestoreArgs(sharding=sharded())},
        "step": ocp.RestoreArgs(),
    }
    yield "with rules", _pytree(ocp, root, item, restore_args=rules)
    yield (
        "rules of placeholders",
        outcome(lambda: jax.tree.map(lambda x: type(x).__name__, _rules(ocp, item))),
    )
    _kept(ocp, root, small())
    yield "standard", _standard(ocp, root, item)
    yield "everything", _pytree(ocp, root, jax.tree.map(lambda _: ocp.PLACEHOLDER, small()))


@scenario
def rules_alone(ocp, root):
    _saved(ocp, root, state())
    yield (
        "numpy",
        _pytree(
            ocp, root, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state())
        ),
    )
    one = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=sharded()), state())
    yield "sharded", _pytree(ocp, root, restore_args=one)
    with ocp.PyTreeCheckpointer() as it:
        rules = _rules(ocp, it.metadata(root / "it").item_metadata.tree)
        yield "of the metadata", it.restore(root / "it", args=ocp.args.PyTreeRestore(restore_args=rules))
        yield "legacy keyword", it.restore(root / "it", restore_args=rules)
    fewer = {"step": ocp.RestoreArgs()}
    yield "too few", _pytree(ocp, root, restore_args=fewer)
    yield "too few, partial", _pytree(ocp, root, {"step": 0}, restore_args=fewer, partial_restore=True)
    yield "too few, transforms", _pytree(ocp, root, {"step": 0}, restore_args=fewer, transforms={})


@scenario
def item_gives_structure_only(ocp, root):
    _saved(ocp, root, {"a": Params(jnp.arange(4.0), jnp.ones(2)), "t": (jnp.zeros(2), 1)})
    for name, leaf in {
        "dots": ...,
        "object": object(),
        "zero": 0,
        "shape": jax.ShapeDtypeStruct((9, 9), jnp.int8),
    }.items():
        item = {"a": Params(leaf, leaf), "t": (leaf, leaf)}
        yield name, _pytree(ocp, root, item)


@scenario
def shardings_as_items(ocp, root):
    _saved(ocp, root, {"a": spread(8, 4), "b": spread(8)})
    item = {"a": sharded("y"), "b": sharded()}
    yield "pytree", _pytree(ocp, root, item)
    rules = jax.tree.map(lambda each: ocp.ArrayRestoreArgs(sharding=each), item)
    yield "with rules", _pytree(ocp, root, item, restore_args=rules)


@scenario
def metadata_as_item(ocp, root):
    _saved(ocp, root, state())
    _kept(ocp, root, state())
    with ocp.PyTreeCheckpointer() as it:
        found = it.metadata(root / "it").item_metadata
    yield "item", _pytree(ocp, root, found)
    yield "tree as item", _pytree(ocp, root, found.tree)
    yield "item and rules", _pytree(ocp, root, found.tree, restore_args=_rules(ocp, found.tree))
    yield "standard", _standard(ocp, root, found)
    yield "standard tree", _standard(ocp, root, found.tree)


@scenario
def array_rules(ocp, root):
    _saved(ocp, root, {"a": spread(8, 4, spec=("x", "y"))})
    make = ocp.ArrayRestoreArgs
    here = mesh()
    rules = {
        "mesh and axes": make(mesh=here, mesh_axes=jax.sharding.PartitionSpec("y", "x")),
        "mesh alone": make(mesh=here),
        "sharding beats mesh": make(
            mesh=here, mesh_axes=jax.sharding.PartitionSpec("y"), sharding=sharded("x")
        ),
        "one device": make(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[5])),
        "layout metadata": make(sharding=sharded("x"), dtype=jnp.bfloat16),
        "global shape": make(sharding=sharded(), global_shape=(12, 4)),
        "global shape, not strict": make(sharding=sharded(), global_shape=(12, 4), strict=False),
        "shape": make(sharding=sharded(), shape=(4, 4)),
        "shape, not strict": make(sharding=sharded(), shape=(4, 4), strict=False),
        "same shape": make(sharding=sharded(), global_shape=(8, 4), shape=(8, 4)),
        "restore type": make(restore_type=jax.Array),
        "restore type with a sharding": make(restore_type=jax.Array, sharding=sharded("y")),
        "numpy with a sharding": make(restore_type=np.ndarray, sharding=sharded("y")),
        "subset of devices": make(sharding=sharded("x", on=mesh(2, 2))),
        "does not divide": make(
            sharding=jax.sharding.NamedSharding(mesh(3), jax.sharding.PartitionSpec("x"))
        ),
    }
    for name, rule in rules.items():
        yield name, _pytree(ocp, root, restore_args={"a": rule})


@scenario
def constructed_rules(ocp, root):
    names = ("restore_type", "dtype", "sharding", "global_shape", "shape", "strict", "mesh", "mesh_axes")
    item = {
        "jax": spread(8, 4), "whole": jnp.zeros(3), "numpy": numbers(3), "int": 3, "float": 0.5, "text": "x", "none": None,
        "abstract": jax.ShapeDtypeStruct((8,), jnp.float16, sharding=sharded()), "bare": jax.ShapeDtypeStruct((8,), jnp.int8),
        "key": jax.random.key(0),
    }  # fmt: skip
    view = lambda rules: {
        key: (type(rule).__name__, fields(rule, *names)) for key, rule in rules.items() if rule is not None
    }
    yield "plain", outcome(lambda: view(_rules(ocp, item)))
    yield "numpy scalar", outcome(lambda: view(_rules(ocp, {"scalar": np.float32(1)})))
    yield "no shape", outcome(lambda: view(_rules(ocp, item, set_global_shape=False)))
    yield "not strict", outcome(lambda: view(_rules(ocp, item, strict=False)))
    some = {key: item[key] for key in ("jax", "numpy", "int")}
    trees = {"jax": sharded("y"), "numpy": sharded(), "int": sharded()}
    yield "shardings", outcome(lambda: view(ocp.checkpoint_utils.construct_restore_args(some, trees)))
    yield "shardings=", outcome(lambda: view(_rules(ocp, some, sharding_tree=trees)))


@scenario
def train_state_by_target(ocp, root):
    tree = Train(jnp.int32(3), {"w": spread(8, 4)})
    _kept(ocp, root, tree)
    yield "none", _standard(ocp, root)
    yield "zeros", _standard(ocp, root, zeros(tree))
    yield "abstract", _standard(ocp, root, abstract(tree))
    yield "dict", _standard(ocp, root, {"step": jnp.int32(0), "params": {"w": jnp.zeros((8, 4))}})


@scenario
def other_containers_of_the_same_keys(ocp, root):
    _kept(ocp, root, {"t": (jnp.zeros(2), jnp.ones(2)), "n": Params(jnp.zeros(2), jnp.ones(2))})
    two = lambda kind: kind([jnp.zeros(2), jnp.zeros(2)])
    pair = Params(jnp.zeros(2), jnp.zeros(2))
    yield "list for tuple", _standard(ocp, root, {"t": two(list), "n": pair})
    yield (
        "dict for namedtuple",
        _standard(ocp, root, {"t": two(tuple), "n": {"w": jnp.zeros(2), "b": jnp.zeros(2)}}),
    )
    yield "dict for tuple", _standard(ocp, root, {"t": {"0": jnp.zeros(2), "1": jnp.zeros(2)}, "n": pair})
    yield "tuple for namedtuple", _standard(ocp, root, {"t": two(tuple), "n": two(tuple)})


@scenario
def fallback_sharding(ocp, root):
    _kept(ocp, root, {"a": spread(8, 4), "b": numbers(3), "n": 3})
    yield "without need", _standard(ocp, root, fallback_sharding=sharded())
    yield "support layout", _standard(ocp, root, support_layout=True)


@scenario
def transformations(ocp, root):
    _saved(ocp, root, {"a": jnp.arange(4.0), "b": {"c": jnp.ones(3)}})
    make = ocp.Transform
    item = {"renamed": jnp.zeros(4), "b": {"c": jnp.zeros(3)}}
    rename = {"renamed": make(original_key="a")}
    yield "renamed", _pytree(ocp, root, item, restore_args=_rules(ocp, item), transforms=rename)
    double = {"a": make(value_fn=lambda value: value * 2)}
    item = {"a": jnp.zeros(4), "b": {"c": jnp.zeros(3)}}
    yield "doubled", _pytree(ocp, root, item, restore_args=_rules(ocp, item), transforms=double)
    more = {"a": jnp.zeros(4), "b": {"c": jnp.zeros(3)}, "new": jnp.full(2, 7.0)}
    fallback = {"new": make(use_fallback=True)}
    yield "fallback", _pytree(ocp, root, more, restore_args=_rules(ocp, more), transforms=fallback)
    rules = _rules(ocp, item)
    yield (
        "not original",
        _pytree(ocp, root, item, restore_args=rules, transforms={}, transforms_default_to_original=False),
    )
    merged = {"sum": make(multi_value_fn=lambda tree: tree["a"].sum())}
    rules = {"sum": ocp.RestoreArgs()}
    asked = {"restore_args": rules, "transforms": merged, "transforms_default_to_original": False}
    yield "several", _pytree(ocp, root, {"sum": 0.0}, **asked)
    several = ocp.RestoreTransform(
        multi_value_fn=lambda *given: given[1]["a"].sum(), multi_value_fn_input_args={"a": ocp.RestoreArgs()}
    )
    yield (
        "several by RestoreTransform",
        _pytree(ocp, root, {"sum": 0.0}, **{**asked, "transforms": {"sum": several}}),
    )


@scenario
def apply_transformations(ocp, root):
    tree = {"a": 1, "b": {"c": 2, "d": 3}}
    yield (
        "renamed",
        ocp.apply_transformations(
            tree, {"x": ocp.Transform(original_key="a")}, {"x": 0, "b": {"c": 0, "d": 0}}
        ),
    )
    yield (
        "regex",
        outcome(
            ocp.apply_transformations,
            tree,
            {r"(.*)y": ocp.Transform(original_key=r"\1c")},
            {"a": 0, "b": {"y": 0, "d": 0}},
        ),
    )
    yield "none", ocp.apply_transformations(tree, {}, {"a": 0, "b": {"c": 0, "d": 0}})
    yield "missing", outcome(ocp.apply_transformations, tree, {}, {"z": 0})
    yield "merged", ocp.merge_trees({"a": 1, "b": 2}, {"b": 3, "c": 4})
    yield "intersected", outcome(ocp.transform_utils.intersect_trees, {"a": 1, "b": 2}, {"b": 3, "c": 4})


@scenario
def single_replica(ocp, root):
    """Some programs switch a restore by one replica on, and go on with plain rules."""
    handler = ocp.type_handlers.SingleReplicaArrayHandler(
        replica_axis_index=0, broadcast_memory_limit_bytes=1000
    )
    yield "registered", outcome(ocp.type_handlers.register_type_handler, jax.Array, handler, override=True)
    tree = {"a": spread(8, 4, spec=(None, "y"))}
    _saved(ocp, root, tree)
    one = sharded(None, "y")
    single = jax.sharding.NamedSharding(mesh(1, 4), jax.sharding.PartitionSpec(None, "y"))
    rule = ocp.type_handlers.SingleReplicaArrayRestoreArgs(
        sharding=one, single_replica_sharding=single, global_shape=(8, 4), dtype=jnp.float32
    )
    yield "is a rule", isinstance(rule, ocp.ArrayRestoreArgs)
    yield "restored", _pytree(ocp, root, restore_args={"a": rule})
    yield (
        "plain again",
        outcome(
            ocp.type_handlers.register_type_handler,
            jax.Array,
            ocp.type_handlers.ArrayHandler(),
            override=True,
        ),
    )


@scenario
def other_type_handlers(ocp, root):
    yield (
        "known",
        outcome(ocp.type_handlers.register_type_handler, jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    yield "has", [ocp.type_handlers.has_type_handler(each) for each in (jax.Array, np.ndarray, int, str, set)]
