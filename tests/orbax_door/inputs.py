"""Trees, meshes and classes that the scenarios save and ask for."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Params(NamedTuple):
    """A namedtuple, as optax and Stoix have them."""

    w: Any
    b: Any


class Empty(NamedTuple):
    """A namedtuple without fields, such as optax.EmptyState."""


@flax.struct.dataclass
class Train:
    """A dataclass that is a pytree."""

    step: Any
    params: Any


def mesh(*sizes, names="xy"):
    """Make a mesh over the first devices."""
    sizes = sizes or (2, 4)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]))


def sharded(*spec, on=None):
    """Make a sharding by the specification, over eight devices."""
    return NamedSharding(on or mesh(), PartitionSpec(*spec))


def numbers(*shape, dtype="float32"):
    """Make an array of numbers that differ."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape) + np.asarray(1, dtype)


def spread(*shape, spec=("x",), dtype="float32", on=None):
    """Make a sharded array."""
    return jax.device_put(numbers(*shape, dtype=dtype), sharded(*spec, on=on))


def small():
    """Make a tree of a few leaves, all of JAX."""
    return {"a": jnp.arange(8.0), "b": {"c": jnp.ones((2, 3), jnp.bfloat16)}, "step": jnp.int32(7)}


def state():
    """Make a tree like a training state: sharded and whole arrays, numpy, numbers, a tuple, nothing."""
    return {
        "params": {"w": spread(8, 4, spec=("x", "y")), "b": spread(8, spec=())},
        "opt": [spread(8, 4), {"count": jnp.int32(3), "empty": None}],
        "host": numbers(3, 2, dtype="int64"),
        "step": 5,
        "rate": 0.5,
    }


def zeros(tree):
    """Make a tree of the same structure, shapes, dtypes and shardings, of zeros."""
    return jax.tree.map(lambda x: _zero(x), tree)


def _zero(leaf):
    if isinstance(leaf, jax.Array):
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    return np.zeros_like(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf)()


def abstract(tree, sharding=True):
    """Make `ShapeDtypeStruct` leaves of the arrays of a tree, with their shardings or without; numbers stay."""
    return jax.tree.map(lambda x: _abstract(x, sharding), tree)


def _abstract(leaf, with_sharding):
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if with_sharding else None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf
