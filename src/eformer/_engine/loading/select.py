"""Select the leaves to load, compare them with `like`, and describe what each of them is to become."""

from __future__ import annotations

import fnmatch
import logging
import math
import reprlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.loading.scalars import as_array, fitted, is_scalar, kind_of, kind_of_dtype
from eformer._engine.record.dtypes import is_floating
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.names import with_nearest
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from eformer._engine.loading.request import Request
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.regions import Region

logger = logging.getLogger("eformer")


def select(tree: TreeEntry, keys: Iterable[str] | None) -> dict[str, None]:
    """Return the names of the leaves that `keys` name, match or lie above, in the order of the tree; all for None."""
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
        known = dict.fromkeys(start for name in names for start in (name, name.rpartition(".")[0]) if start)
        problems = [
            f"no leaf is named {key!r}, matches it or lies below it{hint}"
            for key, hint in with_nearest(unknown, known)
        ]
        raise MismatchError(problems, context="keys")
    return {name: None for name in names if name in chosen}


class LeafTarget(msgspec.Struct, gc=False):
    """A leaf on its way: what is stored, what it is to become, and where it goes.

    entry            the record of the stored leaf
    dtype            of the array to load, after a cast
    sharding         where the array goes; None for the default device, or for host memory if `as_numpy`
    is_explicit      an argument asks for the sharding
    transform        function of the caller, from `shardings`, to call on the loaded array
    regions          distinct boxes that this process reads; None for the whole leaf
    devices          pairs of a device of this process and the number of its region
    arrays           host memory of the regions, once they are read
    new_shape        shape to change to, if it is another than the stored one
    read_sharding    sharding to read with before the array is broadcast: no two processes hold the same box
    like_scalar      the leaf of `like`, if the array becomes a plain number in the end
    is_stored        False for a plain value that becomes an array: nothing has to be read
    is_weak          the array is to be weakly typed, as `jnp.asarray(1.0)` is
    """

    name: str
    entry: LeafEntry
    dtype: str
    sharding: Any = None
    as_numpy: bool = False
    is_explicit: bool = False
    transform: Callable[[Any], Any] | None = None
    regions: list[Region] | None = None
    devices: list[Any] = []
    arrays: Sequence[Any] = ()
    new_shape: tuple[int, ...] | None = None
    read_sharding: Any = None
    like_scalar: Any = None
    is_stored: bool = True
    is_weak: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the user sees."""
        return self.entry.logical_shape if self.new_shape is None else self.new_shape


def targets_of(
    tree: TreeEntry, names: Mapping[str, None], request: Request, like: Mapping[str, Any] | None
) -> list[LeafTarget]:
    """Describe the arrays to make: those among the selected leaves, and plain values that are arrays in `like`.

    Raises a MismatchError that lists every difference between the selected leaves and `like`.
    """
    cast = request.cast
    entries = tree.leaves
    targets = []
    for name in names:
        if name in entries:
            entry = entries[name]
            dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
            target = LeafTarget(name, entry, dtype, as_numpy=entry.home == "numpy")
            if entry.home == "weak":
                target.is_weak = dtype == entry.dtype  # a cast makes it strong
            targets.append(target)
    if like is not None:
        if request.reshape:
            for target in targets:
                _reshape(target, like.get(target.name))
        values = {name: value for name, value in tree.values.items() if name in names}
        problems = list(_mismatches(targets, names, values, like, cast))
        if problems:
            raise MismatchError(problems, context=f"the checkpoint does not fit `{request.like_name}`")
        targets += _values_as_arrays(values, like, cast)
        for target in targets:
            _imitate(target, like[target.name])
    return targets


def _reshape(target: LeafTarget, leaf: Any) -> None:
    """Give the target the shape of the leaf of `like`, if that has as many elements."""
    shape = getattr(leaf, "shape", None)
    stored = target.entry.shape
    if not isinstance(shape, tuple) or shape == stored or math.prod(shape) != math.prod(stored):
        return
    if not target.entry.key:
        target.new_shape = shape
        logger.warning("leaf %r is reshaped from %s to %s", target.name, list(stored), list(shape))


def _values_as_arrays(
    values: Mapping[str, Any], like: Mapping[str, Any], cast: str | None
) -> Iterable[LeafTarget]:
    """Yield targets for the plain numbers that are arrays without axes in `like`."""
    for name, value in values.items():
        if _has_shape(leaf := like[name]) and not is_scalar(leaf):
            dtype = _dtype_name(leaf.dtype)
            array = as_array(value, dtype, cast)
            yield LeafTarget(name, LeafEntry(dtype, (), ()), dtype, arrays=[array], is_stored=False)


def _imitate(target: LeafTarget, leaf: Any) -> None:
    """Make the target the kind of array or number that the leaf of `like` is, and place it likewise."""
    if isinstance(leaf, (Sharding, PartitionSpec)):
        target.as_numpy, target.sharding, target.is_explicit = False, leaf, True
    elif is_scalar(leaf):
        target.as_numpy, target.like_scalar = True, leaf
    elif isinstance(leaf, np.ndarray):
        target.as_numpy = True
    else:
        target.as_numpy, target.is_weak = False, bool(getattr(leaf, "weak_type", False))
        if (sharding := getattr(leaf, "sharding", None)) is not None and getattr(leaf, "committed", True):
            target.sharding, target.is_explicit = sharding, True


# ----------------------------------------------------------------------------------------- mismatches


def _mismatches(
    targets: Sequence[LeafTarget],
    names: Mapping[str, None],
    values: Mapping[str, Any],
    like: Mapping[str, Any],
    cast: str | None,
) -> Iterable[str]:
    missing = [name for name in like if name not in names]
    unexpected = [name for name in names if name not in like]
    for name, hint in with_nearest(missing, names):
        yield f"missing leaf {name!r}{hint}: `like` has it, the checkpoint does not"
    for name, hint in with_nearest(unexpected, like):
        yield f"unexpected leaf {name!r}{hint}: the checkpoint has it, `like` does not"
    for target in targets:
        if target.name in like:
            yield from _array_mismatch(target, like[target.name])
    for name, value in values.items():
        if name in like:
            yield from _value_mismatch(name, value, like[name], cast)


def _array_mismatch(target: LeafTarget, leaf: Any) -> Iterable[str]:
    if isinstance(leaf, (Sharding, PartitionSpec)):
        return
    found = _array_text(_key_dtype(target.entry.key) if target.entry.key else target.dtype, target.shape)
    if not _has_shape(leaf):
        kind = None if target.shape or target.entry.key else kind_of_dtype(target.dtype)
        if kind is None or kind is not kind_of(leaf):
            yield f"leaf {target.name!r}: expected {_plain_text(leaf)}, found {found}"
        return
    expected = _array_text(_dtype_name(leaf.dtype), tuple(leaf.shape))
    same_shape = tuple(leaf.shape) == target.shape
    if expected != found:
        cast = "; dtype= casts" if is_floating(expected) and is_floating(found) else ""
        yield f"leaf {target.name!r}: expected {expected}, found {found}{cast if same_shape else ''}"


def _value_mismatch(name: str, value: Any, leaf: Any, cast: str | None) -> Iterable[str]:
    found = f"found the {type(value).__name__} {_short_repr(value)}"
    if isinstance(leaf, (Sharding, PartitionSpec)):
        yield f"leaf {name!r}: expected an array, {found}; pass a ShapeDtypeStruct to give its dtype"
    elif not _has_shape(leaf):
        if fitted(value, leaf) is None:
            yield f"leaf {name!r}: expected {_plain_text(leaf)}, {found}"
    elif leaf.shape or as_array(value, _dtype_name(leaf.dtype), cast) is None:
        dtype, is_python = _dtype_name(leaf.dtype), not isinstance(value, np.generic)
        expected = _array_text(dtype, leaf.shape)
        same_kind = kind_of(value) is kind_of_dtype(dtype) is not None
        why = f", which {dtype} cannot hold exactly" if same_kind and is_python and not leaf.shape else ""
        how = "; dtype= casts" if same_kind and is_floating(dtype) and not leaf.shape else ""
        yield f"leaf {name!r}: expected {expected}, {found}{why}{how}"


def _plain_text(leaf: Any) -> str:
    return f"a plain {type(leaf).__name__} such as {_short_repr(leaf)}"


def _short_repr(value: Any) -> str:
    return reprlib.repr(value.item() if isinstance(value, np.generic) else value)


def _array_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _has_shape(leaf: Any) -> bool:
    """Tell arrays, descriptions of arrays and numpy scalars from other leaves."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


@lru_cache
def _key_dtype(impl: str) -> str:
    """Return JAX's name for the dtype of PRNG keys of this implementation."""
    return str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)
