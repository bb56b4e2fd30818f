"""Generate random trees and hostile names, and compare trees down to every bit and type."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

NUMPY_DTYPES = [
    np.dtype(code)
    for code in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]
ML_DTYPES = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
DTYPES = NUMPY_DTYPES + ML_DTYPES

HOSTILE = [
    ".", "..", "...", "", "/", "//", "a/b", "../../etc/passwd", "/abs", "a.b", ".zarray", "\0", "a\0b", "\n", "\\",
    "..\\x", "%", "%%", "%2E", "%2e", "%_", "%-", "%+1", "a%+1", "a%#1", "%uD800", "\ud800", "\udfff", "C:", "~", " ", "é",
    "e\u0301", "🙂", "\u202e", "x" * 300, "é" * 200, "%" * 120, "." * 500, "a" * 199 + "%", "__metadata__", "0", "-1",
]  # fmt: skip

keys = st.sampled_from(HOSTILE) | st.text(st.characters(codec=None), max_size=8)
plain_keys = st.text(st.characters(codec="utf-8"), max_size=8)


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Empty(NamedTuple):
    pass


class Unregistered(NamedTuple):
    """An importable namedtuple that is not registered, so checkpoints may not build it."""

    x: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node whose children JAX knows only by position."""

    def __init__(self, left: Any, right: Any, tag: Any) -> None:
        self.left, self.right, self.tag = left, right, tag

    def tree_flatten(self) -> Any:
        return (self.left, self.right), self.tag

    @classmethod
    def tree_unflatten(cls, tag: Any, children: Any) -> Pair:
        return cls(*children, tag)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    """A node without children, which is its own auxiliary data."""

    size: int
    names: tuple


@st.composite
def arrays(draw: Any, dtypes: list[np.dtype] = DTYPES) -> np.ndarray:
    """Draw arrays of any bits, NaN payloads too, in any layout: straight, transposed, strided or reversed."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype == np.bool_ or dtype.name in ("int1", "int2", "int4", "uint1", "uint2", "uint4"):
        array = array & 1  # other bit patterns are not values of these types
    elif dtype in ML_DTYPES and dtype.itemsize == 1:
        array = array & 7  # values of four-bit and six-bit floats, too
    array = array.view(dtype).reshape(shape)
    layout = draw(st.sampled_from(["straight", "transposed", "reversed", "strided"]))
    if layout == "transposed":
        return np.asfortranarray(array)
    if layout == "reversed" and shape:
        return np.ascontiguousarray(array[::-1])[::-1]
    if layout == "strided" and shape:
        return np.repeat(array, 2, axis=0)[::2]
    return array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.binary(max_size=40),
    st.complex_numbers(),
)
numpy_scalars = arrays().map(lambda a: a.reshape(-1)[0] if a.size else a.dtype.type(0))
leaves = scalars | numpy_scalars | arrays()

# Trees that flax itself can write: dicts with string keys, and lists.
flax_trees = st.recursive(
    leaves,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(plain_keys, children, max_size=4),
    max_leaves=10,
)
state_trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.builds(Moments, children, children),
        st.dictionaries(plain_keys, children, max_size=4),
        st.dictionaries(st.integers(), children, max_size=4),
    ),
    max_leaves=10,
)

sortable_keys = st.sampled_from([keys, st.integers(), st.floats(allow_nan=False), st.binary(), st.booleans()])
key_tuples = st.tuples(st.integers(), st.text(max_size=3))


def _containers(children: Any) -> Any:
    def dicts(some_keys: Any) -> Any:
        return st.dictionaries(some_keys, children, max_size=4)

    mixed = st.dictionaries(keys | st.integers(-2, 2), children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        sortable_keys.flatmap(dicts),
        dicts(key_tuples),
        mixed.map(collections.OrderedDict),
        st.dictionaries(keys, children, max_size=4).map(lambda d: collections.defaultdict(list, d)),
        st.just(Empty()),
        st.builds(Moments, children, children),
        st.builds(Layer, children, children, st.text(max_size=5)),
        st.builds(
            Pair,
            children,
            children,
            st.integers() | st.tuples(st.text(max_size=3), st.floats(allow_nan=False)),
        ),
    )


# Every kind of container; the leaves are numbers, because only their positions matter.
any_trees = st.recursive(st.integers() | st.none(), _containers, max_leaves=25)


def assert_same(a: Any, b: Any, path: str = "root") -> None:
    """Assert that two trees are equal in types, structure and bits."""
    assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
    if isinstance(a, dict):
        assert list(a) == list(b), f"{path}: {list(a)} is not {list(b)}"
        assert [type(k) for k in a] == [type(k) for k in b], path
        if isinstance(a, collections.defaultdict):
            assert a.default_factory is b.default_factory, path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, (Layer, Pair)):
        assert_same(vars(a), vars(b), path)
    else:
        assert bits(a) == bits(b), f"{path}: {a!r} is not {b!r}"


def bits(leaf: Any) -> Any:
    """Return a value that is equal for two leaves exactly if they are the same bit for bit."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (jax.random.key_impl(leaf), bits(np.asarray(jax.random.key_data(leaf))))
    if hasattr(leaf, "dtype"):
        array = np.asarray(leaf)
        return (array.shape, array.dtype.name, array.astype(array.dtype.newbyteorder("<")).tobytes())
    if isinstance(leaf, (float, complex)):
        return np.asarray(leaf).tobytes()
    return (type(leaf), leaf)
