"""The classes of `ocp.args`: their fields, their checks, and the results that come back in a Composite."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import Params, small, state, zeros
from orbax_door.scenario import fields, outcome, scenario, there


def _both(ocp, root, save, restore=None, name="it"):
    """Save and restore an item by a manager, and return the outcome."""

    def call():
        with ocp.CheckpointManager(root / name) as it:
            it.save(0, args=ocp.args.Composite(x=save))
            it.wait_until_finished()
            return it.restore(0, args=None if restore is None else ocp.args.Composite(x=restore)).x

    return outcome(call)


@scenario
def composite(ocp, root):
    it = ocp.args.Composite(a=1, b=ocp.args.Composite(c=2))
    yield "attribute", it.a
    yield "item", it["a"]
    yield "nested", it.b.c
    yield "absent attribute", outcome(lambda: it.z)
    yield "absent item", outcome(lambda: it["z"])
    yield "hasattr", outcome(hasattr, it, "z")
    yield "getattr", outcome(getattr, it, "z", None)
    yield "get", [it.get("a"), it.get("z"), it.get("z", 5)]
    yield "in", ["a" in it, "z" in it]
    yield "keys", sorted(it.keys())
    yield "values", sorted(map(str, [it.a]))
    yield "items", len(dict(it.items()))
    yield "len", len(it)
    yield "iter", sorted(it)
    yield "dict", sorted(dict(it))
    yield "truth", [bool(it), bool(ocp.args.Composite())]
    yield "equal", [ocp.args.Composite(a=1) == ocp.args.Composite(a=1), ocp.args.Composite(a=1) == {"a": 1}]
    yield "assign", outcome(setattr, it, "a", 2)
    yield "assign item", outcome(lambda: it.__setitem__("a", 2))
    yield "delete", outcome(lambda: it.__delitem__("a"))
    yield "_items", sorted(it._items)
    yield "text", str(ocp.args.Composite(a=1))


@scenario
def composite_names(ocp, root):
    odd = ocp.args.Composite(**{"keys": 1, "items": 2, "with space": 3, "a.b": 4, "get": 5})
    yield "by item", [odd["keys"], odd["items"], odd["with space"], odd["a.b"], odd["get"]]
    yield "a method stays", callable(odd.keys)
    yield "dunder", outcome(ocp.args.Composite, __a=1)
    yield "positional", outcome(ocp.args.Composite, {"a": 1})


@scenario
def composite_operators(ocp, root):
    one, two = ocp.args.Composite(a=1, b=2), ocp.args.Composite(b=2, c=4)
    yield "and", outcome(lambda: one & two)
    yield "and others", outcome(lambda: ocp.args.Composite(a=1, b=2) & ocp.args.Composite(b=3))
    yield "and a set", outcome(lambda: one & {"b"})
    yield "or", outcome(lambda: one | two)
    yield "or other", outcome(lambda: ocp.args.Composite(a=1) | ocp.args.Composite(a=2))
    yield "or nothing", outcome(lambda: one | ocp.args.Composite())
    yield "or a dict", outcome(lambda: one | {"z": 1})
    yield "unpacked", ocp.args.Composite(**one, z=1)


@scenario
def composite_is_a_mapping(ocp, root):
    from collections.abc import Mapping

    from etils import epy

    it = ocp.args.Composite(a=1, b=2)
    yield "mapping", isinstance(it, Mapping)
    yield "zipped", sorted((key, *map(int, pair)) for key, pair in epy.zip_dict(it, {"a": 3, "b": 4}))
    yield "args", isinstance(it, ocp.args.CheckpointArgs)
    yield "leaves", outcome(lambda: len(jax.tree.leaves(it)))


@scenario
def fields_of_args(ocp, root):
    args = ocp.args
    yield "StandardSave", fields(args.StandardSave({"a": 1}), "item", "save_args", "custom_metadata")
    yield (
        "StandardRestore",
        fields(args.StandardRestore({"a": 1}), "item", "strict", "support_layout", "fallback_sharding"),
    )
    yield "StandardRestore empty", fields(args.StandardRestore(), "item", "strict")
    yield (
        "PyTreeSave",
        fields(
            args.PyTreeSave({"a": 1}), "item", "save_args", "ocdbt_target_data_file_size", "custom_metadata"
        ),
    )
    names = (
        "item",
        "restore_args",
        "transforms",
        "transforms_default_to_original",
        "legacy_transform_fn",
        "partial_restore",
    )
    yield "PyTreeRestore", fields(args.PyTreeRestore({"a": 1}, partial_restore=True), *names)
    yield "PyTreeRestore empty", fields(args.PyTreeRestore(), *names)
    yield "JsonSave", fields(args.JsonSave({"a": 1}), "item")
    yield "JsonRestore", fields(args.JsonRestore(), "item")
    yield "ArraySave", fields(args.ArraySave(3), "item", "save_args")
    yield "ArrayRestore", fields(args.ArrayRestore(), "item", "restore_args")
    yield "SaveArgs", fields(ocp.SaveArgs(), "aggregate", "dtype", "chunk_byte_size", "shard_axes")
    yield "RestoreArgs", fields(ocp.RestoreArgs(), "restore_type", "dtype")
    names = ("restore_type", "dtype", "mesh", "mesh_axes", "sharding", "global_shape", "shape", "strict")
    yield "ArrayRestoreArgs", fields(ocp.ArrayRestoreArgs(), *names)
    yield "same class", ocp.type_handlers.ArrayRestoreArgs is ocp.ArrayRestoreArgs
    yield "RestoreArgs base", isinstance(ocp.ArrayRestoreArgs(), ocp.RestoreArgs)


@scenario
def args_are_args(ocp, root):
    names = "StandardSave StandardRestore PyTreeSave PyTreeRestore JsonSave JsonRestore ArraySave ArrayRestore Composite "
    names += "JaxRandomKeySave JaxRandomKeyRestore NumpyRandomKeySave NumpyRandomKeyRestore"
    yield (
        "all",
        {name: issubclass(getattr(ocp.args, name), ocp.args.CheckpointArgs) for name in names.split()},
    )


@scenario(
    tail={
        name: {"name": name}
        for name in (
            "array",
            "number",
            "numpy",
            "None",
            "empty dict",
            "empty list",
            "text",
            "text leaf",
            "object leaf",
        )
    }
)
def standard_save_refuses(ocp, root, name):
    given = {
        "array": jnp.arange(3), "number": 3, "numpy": np.arange(3), "None": None, "empty dict": {}, "empty list": [],
        "text": "x", "text leaf": {"a": {"b": "x"}}, "object leaf": {"a": object()},
    }[name]  # fmt: skip
    words = {"empty dict": "Found empty item"}.get(name)

    def call():
        with ocp.CheckpointManager(root) as it:
            it.save(0, args=ocp.args.StandardSave(given))

    yield "saved", outcome(call, words=words)
    yield "listed", ocp.CheckpointManager(root).all_steps()


@scenario
def objects_with_an_array(ocp, root):
    class Like:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.float32)

    yield "standard", _both(ocp, root, ocp.args.StandardSave({"a": Like()}), name="s")
    yield "pytree", _both(ocp, root, ocp.args.PyTreeSave({"a": Like()}), name="p")


@scenario
def json(ocp, root):
    save = ocp.args.JsonSave
    value = {"text": "ä", "list": [1, 2.5, None, True], "nested": {"a": {}}, "tuple": (1, 2), 3: "int key"}
    yield "restored", _both(ocp, root, save(value), name="a")
    yield "asked", _both(ocp, root, save(value), ocp.args.JsonRestore(), name="b")
    yield "with an item", _both(ocp, root, save(value), ocp.args.JsonRestore({"text": ""}), name="c")
    yield "file", (root / "a" / "0" / "x" / "metadata").read_text()
    for name, other in {"list": [1, 2], "text": "x", "number": 3, "none": None, "empty": {}}.items():
        yield name, _both(ocp, root, save(other), name=name)
    for name, other in {
        "numpy": {"a": np.float32(1)},
        "array": {"a": jnp.zeros(2)},
        "nan": {"a": float("nan")},
    }.items():
        yield name, _both(ocp, root, save(other), name=name)


@scenario
def json_file_name(ocp, root):
    handler = ocp.JsonCheckpointHandler(filename="extra.json")
    with ocp.Checkpointer(handler) as it:
        it.save(root / "a", {"x": [1]})
        yield "files", there(root, "a/extra.json", "a/metadata")
        yield "restored", it.restore(root / "a")
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as it:
        yield "another name", outcome(it.restore, root / "a")
        yield "restored with an item", outcome(it.restore, root / "a", args=ocp.args.JsonRestore())


_ARRAYS = {
    "jax": lambda: jnp.arange(4.0),
    "numpy": lambda: np.arange(4),
    "int": lambda: 3,
    "float": lambda: 1.5,
    "numpy scalar": lambda: np.float32(2.5),
    "text": lambda: "x",
    "dict": lambda: {"a": 1},
}


@scenario(tail={name: {"name": name} for name in _ARRAYS})
def arrays(ocp, root, name):
    value = _ARRAYS[name]()
    yield "bare", _both(ocp, root, ocp.args.ArraySave(value), name="a")
    yield "asked", _both(ocp, root, ocp.args.ArraySave(value), ocp.args.ArrayRestore(), name="b")
    yield (
        "numpy",
        _both(
            ocp,
            root,
            ocp.args.ArraySave(value),
            ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray)),
            name="c",
        ),
    )
    yield "like", _both(ocp, root, ocp.args.ArraySave(value), ocp.args.ArrayRestore(value), name="d")
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as it:
        yield "by a checkpointer", outcome(it.save, root / "e", value)
        yield "restored", outcome(it.restore, root / "e")


@scenario
def random_keys(ocp, root):
    args = ocp.args
    key, old = jax.random.key(3), jax.random.PRNGKey(3)
    yield "typed", _both(ocp, root, args.JaxRandomKeySave(key), args.JaxRandomKeyRestore(), name="a")
    yield "typed, not asked", _both(ocp, root, args.JaxRandomKeySave(key), name="b")
    yield "old", _both(ocp, root, args.JaxRandomKeySave(old), args.JaxRandomKeyRestore(), name="c")
    rbg = jax.random.key(3, impl="rbg")
    yield "other kind", _both(ocp, root, args.JaxRandomKeySave(rbg), args.JaxRandomKeyRestore(), name="d")
    several = jax.random.split(key, 3)
    yield (
        "several",
        _both(ocp, root, args.JaxRandomKeySave(several), args.JaxRandomKeyRestore(several), name="e"),
    )
    np.random.seed(5)
    legacy = np.random.get_state()
    yield "numpy", _both(ocp, root, args.NumpyRandomKeySave(legacy), args.NumpyRandomKeyRestore(), name="f")
    named = np.random.get_state(legacy=False)
    yield (
        "numpy by name",
        _both(ocp, root, args.NumpyRandomKeySave(named), args.NumpyRandomKeyRestore(), name="g"),
    )
    yield "not a key", _both(ocp, root, args.JaxRandomKeySave("x"), name="h")


@scenario
def nested_composite(ocp, root):
    """Some programs give a Composite as an item of a Composite. With several items Orbax has a race, so it may retry."""
    args = ocp.args
    one = args.Composite(jax=args.JaxRandomKeySave(jax.random.key(1)))
    both = args.Composite(jax=args.JaxRandomKeySave(jax.random.key(1)), json=args.JsonSave({}))
    for name, inner in {"one": one, "both": both}.items():
        tries = (_both(ocp, root, inner, name=f"{name}{number}") for number in range(20))
        yield name, next((each for each in tries if each.error is None), None)


@scenario
def save_args_with_a_class_as_dtype(ocp, root):
    rule = {"a": ocp.SaveArgs(dtype=jnp.bfloat16)}
    yield (
        "saved",
        _both(ocp, root, ocp.args.PyTreeSave({"a": jnp.arange(8.0)}, rule), ocp.args.PyTreeRestore()),
    )


@scenario
def pytree_texts(ocp, root):
    tree = {"name": "ä text", "n": 3, "list": ["a", "b"]}
    yield "restored", _both(ocp, root, ocp.args.PyTreeSave(tree), ocp.args.PyTreeRestore(), name="a")
    yield "with an item", _both(ocp, root, ocp.args.PyTreeSave(tree), ocp.args.PyTreeRestore(tree), name="b")


@scenario(tail={name: {"name": name} for name in ("float16", "bfloat16", "int32", "chunks", "all")})
def save_args(ocp, root, name):
    given = {
        "float16": {"dtype": np.dtype("float16")}, "bfloat16": {"dtype": jnp.dtype("bfloat16")},
        "int32": {"dtype": np.dtype("int32")}, "chunks": {"chunk_byte_size": 64},
        "all": {"dtype": np.dtype("float16"), "chunk_byte_size": 64},
    }[name]  # fmt: skip
    tree = {"a": jnp.arange(8.0), "b": np.arange(8.0), "n": 3}
    rule = jax.tree.map(lambda _: ocp.SaveArgs(**given), tree)
    yield (
        "pytree",
        _both(ocp, root, ocp.args.PyTreeSave(tree, save_args=rule), ocp.args.PyTreeRestore(), name="a"),
    )
    yield (
        "standard",
        _both(ocp, root, ocp.args.StandardSave(tree, save_args=rule), ocp.args.StandardRestore(), name="b"),
    )
    some = {"a": ocp.SaveArgs(**given), "b": ocp.SaveArgs(), "n": ocp.SaveArgs()}
    yield (
        "one leaf",
        _both(ocp, root, ocp.args.PyTreeSave(tree, save_args=some), ocp.args.PyTreeRestore(), name="c"),
    )
    fewer = {"a": ocp.SaveArgs(**given)}
    yield "too few", _both(ocp, root, ocp.args.PyTreeSave(tree, fewer), ocp.args.PyTreeRestore(), name="d")
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "e", tree, save_args=rule)
        yield "by a checkpointer", it.restore(root / "e")


@scenario
def custom_metadata_of_an_item(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(
            0,
            args=args.Composite(
                a=args.StandardSave(small(), custom_metadata={"x": 1}), b=args.PyTreeSave(small())
            ),
        )
        it.wait_until_finished()
        found = it.item_metadata(0)
        yield "standard", outcome(lambda: found.a.custom_metadata)
        yield "pytree", outcome(lambda: found.b.custom_metadata)


@scenario
def own_args_and_handler(ocp, root):
    import dataclasses

    class MyHandler(ocp.CheckpointHandler):
        def save(self, directory, args):
            (directory / "own.txt").write_text(args.text)

        def restore(self, directory, args=None):
            return (directory / "own.txt").read_text() + (args.more if args else "")

    @ocp.args.register_with_handler(MyHandler, for_save=True)
    @dataclasses.dataclass
    class MySave(ocp.args.CheckpointArgs):
        text: str

    @ocp.args.register_with_handler(MyHandler, for_restore=True)
    @dataclasses.dataclass
    class MyRestore(ocp.args.CheckpointArgs):
        more: str = ""

    args = ocp.args
    with ocp.CheckpointManager(root / "a") as it:
        it.save(0, args=args.Composite(own=MySave("hello"), state=args.StandardSave(small())))
        it.wait_until_finished()
        yield "file", there(root, "a/0/own/own.txt")
        yield "restored", it.restore(0, args=args.Composite(own=MyRestore("!")))
        yield "all", outcome(it.restore, 0)
    with ocp.CheckpointManager(root / "a") as it:
        yield "by a new manager", it.restore(0, args=args.Composite(own=MyRestore("?")))
    with ocp.Checkpointer(MyHandler()) as it:
        it.save(root / "b", "direct")
        yield "by a checkpointer", outcome(it.restore, root / "b")
        yield "with args", it.restore(root / "b", args=MyRestore("+"))
        yield "metadata", outcome(it.metadata, root / "b")


@scenario
def registry_of_args(ocp, root):
    args = ocp.args
    yield "save of standard", args.get_registered_args_cls(ocp.StandardCheckpointHandler)
    yield "save of json", args.get_registered_args_cls(ocp.JsonCheckpointHandler())
    yield "handler of args", args.get_registered_handler_cls(args.StandardSave)
    yield (
        "has",
        [
            args.has_registered_args(ocp.PyTreeCheckpointHandler),
            args.has_registered_args(ocp.CheckpointHandler),
        ],
    )
    yield "unknown", outcome(args.get_registered_handler_cls, args.CheckpointArgs)

    def not_args():
        @args.register_with_handler(ocp.StandardCheckpointHandler, for_save=True)
        class Wrong:
            pass

    yield "not args", outcome(not_args)


@scenario
def namedtuple_item(ocp, root):
    tree = Params(jnp.arange(3), {"c": jnp.ones(2)})
    yield "standard", _both(ocp, root, ocp.args.StandardSave(tree), name="a")
    yield (
        "like",
        _both(ocp, root, ocp.args.StandardSave(tree), ocp.args.StandardRestore(zeros(tree)), name="b"),
    )
    yield "pytree", _both(ocp, root, ocp.args.PyTreeSave(tree), ocp.args.PyTreeRestore(zeros(tree)), name="c")


@scenario
def items_of_state(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=args.Composite(
            state=args.PyTreeSave(state()), step=args.ArraySave(jnp.int32(3)), rng=args.JaxRandomKeySave(jax.random.key(0)),
            data=args.JsonSave({"epoch": 1}),
        ))  # fmt: skip
        it.wait_until_finished()
        found = it.restore(0)
        yield "state", found.state
        yield "step", found.step
        yield "rng", found.rng
        yield "data", found.data
