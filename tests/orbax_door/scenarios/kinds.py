"""Every kind of leaf, restored for every kind of target by every way to ask: the table of `kinds.toml`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from orbax_door.inputs import Empty, Params, Train, numbers, sharded, spread
from orbax_door.scenario import outcome, scenario

KINDS = {
    "jax sharded": lambda: spread(8, 4, spec=("x", "y")),
    "jax whole": lambda: jnp.arange(8.0),
    "jax on device 3": lambda: jax.device_put(jnp.arange(8.0), jax.devices()[3]),
    "jax bfloat16": lambda: jnp.arange(8, dtype=jnp.bfloat16),
    "jax bool": lambda: jnp.arange(8) % 2 == 0,
    "jax int4": lambda: jnp.arange(8).astype(jnp.int4),
    "jax float8": lambda: jnp.arange(8.0).astype(jnp.float8_e4m3fn),
    "jax number": lambda: jnp.int32(7),
    "jax weak number": lambda: jnp.asarray(1.5),
    "jax empty": lambda: jnp.zeros((0, 4)),
    "numpy": lambda: numbers(8, 4),
    "numpy float64": lambda: numbers(8, dtype="float64"),
    "numpy int64": lambda: numbers(8, dtype="int64"),
    "numpy uint8": lambda: numbers(8, dtype="uint8"),
    "numpy bool": lambda: np.arange(8) % 2 == 0,
    "numpy number": lambda: np.array(3, np.int32),
    "numpy empty": lambda: np.zeros((0,), np.float32),
    "numpy float32 scalar": lambda: np.float32(1.5),
    "numpy int64 scalar": lambda: np.int64(3),
    "numpy bool scalar": lambda: np.bool_(True),
    "numpy strings": lambda: np.array(["a", "bc"]),
    "int": lambda: 3,
    "large int": lambda: 2**40,
    "float": lambda: 1.5,
    "bool": lambda: True,
    "complex": lambda: 1 + 2j,
    "str": lambda: "text",
    "bytes": lambda: b"bytes",
    "typed key": lambda: jax.random.key(7),
    "typed keys rbg": lambda: jax.random.split(jax.random.key(7, impl="rbg"), 2),
    "old key": lambda: jax.random.PRNGKey(7),
    "None": lambda: None,
    "empty dict": dict,
    "empty list": list,
    "empty tuple": tuple,
    "empty namedtuple": Empty,
    "tuple": lambda: (jnp.arange(2), 3),
    "list": lambda: [jnp.arange(2), 3],
    "namedtuple": lambda: Params(jnp.arange(2), 3),
    "dataclass": lambda: Train(3, jnp.arange(2)),
    "nnx State": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    "int keys": lambda: {1: jnp.arange(2), 2: jnp.arange(3)},
}
WAYS = ("standard", "pytree", "pytree item", "v1", "rules")


@scenario(tail={f"{kind} by {way}": {"kind": kind, "way": way} for kind in KINDS for way in WAYS})
def comes_back(ocp, root, kind, way):
    value = KINDS[kind]()
    saved = outcome(save(ocp, way), root / "it", {"x": value, "other": jnp.arange(2)})
    yield f"{way} save", outcome(lambda: "saved") if saved.error is None else saved
    if saved.error is None:
        for name, target in targets(ocp, way, value).items():
            yield f"{way} for {name}", outcome(lambda t=target: restore(ocp, way, root / "it", t, value)["x"])


def save(ocp, way):
    if way == "v1":
        return ocp.v1.save
    if way == "standard":
        return lambda path, tree: _closed(ocp.StandardCheckpointer(), lambda it: it.save(path, tree))
    return lambda path, tree: _closed(ocp.PyTreeCheckpointer(), lambda it: it.save(path, tree))


def restore(ocp, way, path, target, value):
    """Restore by one of the ways; `target` is a function of a leaf, rules of a leaf, or None."""
    item = None if target is None else {"x": jax.tree.map(target, value), "other": jnp.zeros(2, jnp.int32)}
    if way == "v1":
        return ocp.v1.load(path, item)
    if way == "standard":
        return _closed(ocp.StandardCheckpointer(), lambda it: it.restore(path, item))
    args = pytree_args(ocp, way, item)
    return _closed(ocp.PyTreeCheckpointer(), lambda it: it.restore(path, args=args))


def pytree_args(ocp, way, item):
    if item is None:
        return ocp.args.PyTreeRestore()
    if way == "rules":
        rules = {"x": item["x"], "other": ocp.RestoreArgs()}
        return ocp.args.PyTreeRestore(restore_args=rules)
    if way == "pytree item":
        return ocp.args.PyTreeRestore(item)
    return ocp.args.PyTreeRestore(item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))


def targets(ocp, way, value):
    """Return the targets by name: functions that make the target of a leaf."""
    if way == "rules":
        return {**({} if value is None else rules(ocp))}
    same = {"none": None, "the same": lambda x: x}
    if way == "pytree item":
        return {**same, "dots": lambda _: ...}
    return {
        **same,
        "abstract sharded": lambda x: _abstract(x, sharded()),
        "abstract": lambda x: _abstract(x, None),
        "numpy": lambda x: np.zeros(np.shape(x), _dtype(x)),
        "numpy float16": lambda x: np.zeros(np.shape(x), np.float16),
        "jax": lambda x: jnp.zeros(np.shape(x), _dtype(x)),
        "jax sharded float16": lambda x: jax.device_put(jnp.zeros(np.shape(x), jnp.float16), sharded()),
        "int": lambda x: 0,
        "float": lambda x: 0.0,
    }


def rules(ocp):
    """Return rules by name, each a function of a leaf."""
    one = {
        "RestoreArgs": ocp.RestoreArgs(),
        "RestoreArgs numpy": ocp.RestoreArgs(restore_type=np.ndarray),
        "RestoreArgs numpy float16": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16),
        "RestoreArgs float16": ocp.RestoreArgs(dtype=np.float16),
        "RestoreArgs jax": ocp.RestoreArgs(restore_type=jax.Array),
        "RestoreArgs int": ocp.RestoreArgs(restore_type=int),
        "RestoreArgs float": ocp.RestoreArgs(restore_type=float),
        "RestoreArgs str": ocp.RestoreArgs(restore_type=str),
        "ArrayRestoreArgs": ocp.ArrayRestoreArgs(),
        "ArrayRestoreArgs sharded": ocp.ArrayRestoreArgs(sharding=sharded()),
        "ArrayRestoreArgs sharded float16": ocp.ArrayRestoreArgs(sharding=sharded(), dtype=jnp.float16),
        "ArrayRestoreArgs numpy": ocp.ArrayRestoreArgs(restore_type=np.ndarray),
    }
    return {name: (lambda _, rule=rule: rule) for name, rule in one.items()}


def _abstract(leaf, sharding):
    return jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf), sharding=sharding)


def _dtype(leaf):
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _closed(checkpointer, call):
    with checkpointer as it:
        found = call(it)
        if hasattr(it, "wait_until_finished"):
            it.wait_until_finished()
        return found
