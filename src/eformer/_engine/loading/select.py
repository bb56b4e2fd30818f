"""What a load is asked for: which leaves of a tree, and what each of them is to become."""

from __future__ import annotations

import fnmatch
import logging
import math
import reprlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from eformer._engine.loading.rules import PartitionSpec, Rules
from eformer._engine.loading.scalars import as_array, fitted, is_scalar, kind_of, kind_of_dtype
from eformer._engine.processes.hosts import TIMEOUT
from eformer._engine.record.dtypes import floating_dtype, is_floating
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.names import with_nearest
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.regions import Region
    from eformer._engine.tasks.progress import Progress

logger = logging.getLogger("eformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for; beyond what `load` takes,

    every_leaf, replicate, rules_are    see `PlacementRequest`
    like_is        what the caller's argument for `like` is called
    reshape        a leaf may have another shape than in `like` if it has as many elements
    threads        that read; None for one a core, 2 to 16
    sha256         says which leaves of a tree should have which SHA-256, which is checked first
    """

    like: Any = None
    prefix: str | None = None
    keys: tuple[str, ...] | None = None
    mesh: jax.sharding.Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    dtype: Any = None
    callback: Callable[[Any, str], Any] | None = None
    batch: int | None = None
    verify: bool = True
    mmap: bool = False
    progress: Progress = None
    broadcast: bool = False
    timeout: float = TIMEOUT
    every_leaf: bool = False
    replicate: bool = False
    reshape: bool = False
    threads: int | None = None
    sha256: Callable[[TreeEntry], Mapping[str, str]] | None = None
    rules_are: str = "rules"
    like_is: str = "like"

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch <= 0:
            raise ValueError(
                f"a batch of {self.batch} arrays: it has to be positive, or None for all at once"
            )

    @property
    def cast(self) -> str | None:
        """The name of the dtype that floating leaves are cast to."""
        return None if self.dtype is None else floating_dtype(self.dtype)


# -------------------------------------------------------------------------------------------- select


def select(tree: TreeEntry, keys: Iterable[str] | None) -> dict[str, None]:
    """The names of the leaves that `keys` name or match, or that lie below a name."""
    names = dict.fromkeys([*tree.leaves, *tree.raw_values])
    if keys is None:
        return names
    chosen: dict[str, None] = {}
    unknown = []
    for key in keys:
        if key in names:
            chosen[key] = None
            continue
        below = [name for name in names if name.startswith(key + ".") or fnmatch.fnmatchcase(name, key)]
        chosen |= dict.fromkeys(below)
        if not below:
            unknown.append(key)
    if unknown:
        there = dict.fromkeys(start for name in names for start in (name, name.rpartition(".")[0]) if start)
        hints = (
            f"no leaf is named {key!r}, matches it or lies below it{hint}"
            for key, hint in with_nearest(unknown, there)
        )
        raise MismatchError(list(hints), context="keys")
    return {name: None for name in names if name in chosen}


class LeafTarget(msgspec.Struct, gc=False):
    """A leaf on its way: what is stored, what it is to become, and where.

    `spread` is a sharding in which no two processes hold the same, for one that is read so and then broadcast.
    `number` is the leaf of `like` if that is a plain number, which the array becomes in the end. Not `is_stored` is one
    that was a plain number: it has its array already.
    """

    name: str
    entry: LeafEntry
    dtype: str
    sharding: Any = None
    as_numpy: bool = False
    is_explicit: bool = False
    after: Callable[[Any], Any] | None = None
    regions: list[Region] | None = None
    devices: list[Any] = []
    arrays: Sequence[Any] = ()
    new_shape: tuple[int, ...] | None = None
    spread: Any = None
    number: Any = None
    is_stored: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the user sees."""
        return self.entry.logical_shape if self.new_shape is None else self.new_shape


def items_of(
    tree: TreeEntry, selected: Mapping[str, None], request: Request, like: Mapping[str, Any] | None
) -> list[LeafTarget]:
    """The arrays among the selected leaves, and the numbers that are arrays in `like`, if all is what it expects; else
    every difference at once."""
    cast = request.cast
    entries = tree.leaves
    items = []
    for name in selected:
        if name in entries:
            entry = entries[name]
            dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
            items.append(LeafTarget(name, entry, dtype, as_numpy=entry.home == "numpy"))
    if like is not None:
        if request.reshape:
            for item in items:
                _take_shape(item, like.get(item.name))
        values = {name: value for name, value in tree.values.items() if name in selected}
        problems = list(_differences(items, selected, values, like, cast))
        if problems:
            raise MismatchError(problems, context=f"the checkpoint does not fit `{request.like_is}`")
        items += _numbers_as_arrays(values, like, cast)
        for item in items:
            _follow(item, like[item.name])
    return items


def _take_shape(item: LeafTarget, leaf: Any) -> None:
    """Lets the item have the shape that `like` says, if it has as many elements."""
    shape = getattr(leaf, "shape", None)
    stored = item.entry.shape
    if not isinstance(shape, tuple) or shape == stored or math.prod(shape) != math.prod(stored):
        return
    if not item.entry.key:
        item.new_shape = shape
        logger.warning("leaf %r is reshaped from %s to %s", item.name, list(stored), list(shape))


def _differences(
    items: Sequence[LeafTarget],
    selected: Mapping[str, None],
    values: Mapping[str, Any],
    like: Mapping[str, Any],
    cast: str | None,
) -> Iterable[str]:
    missing = [name for name in like if name not in selected]
    unexpected = [name for name in selected if name not in like]
    for name, hint in with_nearest(missing, selected):
        yield f"missing leaf {name!r}{hint}: `like` has it, the checkpoint does not"
    for name, hint in with_nearest(unexpected, like):
        yield f"unexpected leaf {name!r}{hint}: the checkpoint has it, `like` does not"
    for item in items:
        if item.name in like:
            yield from _array_difference(item, like[item.name])
    for name, value in values.items():
        if name in like:
            yield from _value_difference(name, value, like[name], cast)


def _value_difference(name: str, value: Any, leaf: Any, cast: str | None) -> Iterable[str]:
    found = f"found the {type(value).__name__} {_shown(value)}"
    if isinstance(leaf, (Sharding, PartitionSpec)):
        yield f"leaf {name!r}: expected an array, {found}; a ShapeDtypeStruct would say of which dtype"
    elif not _has_shape(leaf):
        if fitted(value, leaf) is None:
            yield f"leaf {name!r}: expected {_plain(leaf)}, {found}"
    elif leaf.shape or as_array(value, _dtype_name(leaf.dtype), cast) is None:
        dtype, is_python = _dtype_name(leaf.dtype), not isinstance(value, np.generic)
        expected, same_kind = (
            _described(dtype, leaf.shape),
            kind_of(value) is kind_of_dtype(dtype) is not None,
        )
        why = f", which {dtype} cannot hold exactly" if same_kind and is_python and not leaf.shape else ""
        how = "; dtype= casts" if same_kind and is_floating(dtype) and not leaf.shape else ""
        yield f"leaf {name!r}: expected {expected}, {found}{why}{how}"


def _plain(leaf: Any) -> str:
    return f"a plain {type(leaf).__name__} such as {_shown(leaf)}"


def _shown(value: Any) -> str:
    return reprlib.repr(value.item() if isinstance(value, np.generic) else value)


def _numbers_as_arrays(
    values: Mapping[str, Any], like: Mapping[str, Any], cast: str | None
) -> Iterable[LeafTarget]:
    """The numbers among the plain values that are arrays without axes in `like`."""
    for name, value in values.items():
        if _has_shape(leaf := like[name]) and not is_scalar(leaf):
            dtype = _dtype_name(leaf.dtype)
            array = as_array(value, dtype, cast)
            yield LeafTarget(name, LeafEntry(dtype, (), ()), dtype, arrays=[array], is_stored=False)


def _has_shape(leaf: Any) -> bool:
    """Whether it is an array, describes one, or is a scalar of numpy."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _array_difference(item: LeafTarget, leaf: Any) -> Iterable[str]:
    if isinstance(leaf, (Sharding, PartitionSpec)):
        return
    found = _described(_key_dtype(item.entry.key) if item.entry.key else item.dtype, item.shape)
    if not _has_shape(leaf):
        kind = None if item.shape or item.entry.key else kind_of_dtype(item.dtype)
        if kind is None or kind is not kind_of(leaf):
            yield f"leaf {item.name!r}: expected {_plain(leaf)}, found {found}"
        return
    expected = _described(_dtype_name(leaf.dtype), tuple(leaf.shape))
    same_shape = tuple(leaf.shape) == item.shape
    if expected != found:
        cast = "; dtype= casts" if is_floating(expected) and is_floating(found) else ""
        yield f"leaf {item.name!r}: expected {expected}, found {found}{cast if same_shape else ''}"


def _described(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


@lru_cache
def _key_dtype(impl: str) -> str:
    """What JAX calls the dtype of the keys of a generator."""
    return str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)


def _follow(item: LeafTarget, leaf: Any) -> None:
    """Makes the item what this leaf of `like` is."""
    if isinstance(leaf, (Sharding, PartitionSpec)):
        item.as_numpy, item.sharding, item.is_explicit = False, leaf, True
    elif is_scalar(leaf):
        item.as_numpy, item.number = True, leaf
    elif isinstance(leaf, np.ndarray):
        item.as_numpy = True
    else:
        item.as_numpy = False
        if (sharding := getattr(leaf, "sharding", None)) is not None and getattr(leaf, "committed", True):
            item.sharding, item.is_explicit = sharding, True
