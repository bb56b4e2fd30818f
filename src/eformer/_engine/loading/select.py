"""Compare the selected leaves with `like`, and describe the array or value that each becomes."""

from __future__ import annotations

import fnmatch
import logging
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from eformer._engine.loading.read_plan import Want
from eformer._engine.loading.request import LoadReport
from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.record.dtypes import DTYPES, is_floating
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.names import readable, split_name, with_nearest
from eformer._engine.record.text import few
from eformer._engine.record.values import LeftToCode, value_from_json
from eformer._engine.trees.nodes import is_code
from eformer._engine.trees.shardings import AnnotatedShape
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from eformer._engine.loading.contents import Contents
    from eformer._engine.loading.placement import DeviceBoxes
    from eformer._engine.loading.request import Request, Resize

T = TypeVar("T")

_Cast = Callable[[Any], str | None]

_CASTS = '; dtype="like" casts it'  # never wrong: with dtype="like" no dtype of a floating leaf differs

_ARRAYS = (jax.ShapeDtypeStruct, jax.Array, np.ndarray)

logger = logging.getLogger("eformer")


class LeafTarget(Want, gc=False):
    """A leaf on its way from the checkpoint to the tree: its wanted boxes, its final form and its place.

    sharding         where the array goes; None for the default device, or for host memory if `as_numpy`
    is_explicit      an argument asks for the sharding
    transform        the caller's function from `shardings`, to call on the loaded array
    boxes            the distinct boxes that this process reads
    device_boxes     the box of each device of this process
    arrays           host memory of the boxes, once they are read
    new_shape        shape to change to, if it differs from the stored shape
    read_sharding    sharding to read with before the array is broadcast: no two processes hold the same box
    like_scalar      the leaf of `like`, if the array becomes a plain number in the end
    is_stored        False for a plain value that becomes an array, and for an array that rules compute
    resize           the caller's function that makes an array of `new_shape` of the stored array
    is_weak          the array gets a weak type, as `jnp.asarray(1.0)` has
    """

    sharding: Any = None
    as_numpy: bool = False
    is_explicit: bool = False
    transform: Callable[[Any], Any] | None = None
    device_boxes: DeviceBoxes | None = None
    arrays: Sequence[Any] = ()
    new_shape: tuple[int, ...] | None = None
    read_sharding: Any = None
    like_scalar: Any = None
    is_stored: bool = True
    resize: Callable[[Any], Any] | None = None
    is_weak: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the caller sees."""
        return self.entry.logical_shape if self.new_shape is None else self.new_shape


@dataclass(frozen=True, slots=True)
class Selection:
    """The leaves of the checkpoint and of `like`, by their part in a load.

    targets    arrays to make
    values     plain values to return
    kept       leaves of `like` that stay, because the checkpoint lacks them
    code       functions in `like`, which stay
    left_out   names of leaves of the checkpoint that are not loaded
    """

    targets: list[LeafTarget]
    values: Mapping[str, Any]
    kept: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def report(self, dropped: Iterable[str], numbers: Mapping[str, str]) -> LoadReport:
        """Return the report of the load. Rules have `dropped` leaves before the selection; `numbers` are the dtypes of
        leaves that were read as numbers from quantised weights."""
        return LoadReport(
            loaded=(*(target.name for target in self.targets), *self.values),
            kept=tuple(self.kept),
            left_out=(*self.left_out, *dropped),
            resized=tuple(target.name for target in self.targets if target.resize),
            code=tuple(self.code),
            dequantized=tuple(numbers),
            dequant=tuple(dict.fromkeys(numbers.values())),
        )


def compare(
    contents: Contents, names: Mapping[str, None], request: Request, like: Mapping[str, Any] | None
) -> Selection:
    """Compare the selected leaves with `like`, and describe the array or value that each becomes.

    Raise a MismatchError that lists every difference.
    """
    values: Mapping[str, Any] = {
        name: value_from_json(raw) for name, raw in contents.raw_values.items() if name in names
    }
    if like is None:
        return Selection(_targets(contents, names, {}, request), values)
    code = {
        name: leaf for name, leaf in like.items() if _is_left_to_code(leaf, values.get(name), name in names)
    }
    names, values, like = (_without(mapping, code) for mapping in (names, values, like))
    missing = {name: leaf for name, leaf in like.items() if name not in names}
    unexpected = {name: None for name in names if name not in like}
    lost, refused = (
        {name: leaf for name, leaf in some.items() if not _is_below(name, request.transient)}
        for some in (missing, unexpected)
    )
    problems = list(_other_leaves(lost, refused, names, like, request))
    common, values = _without(names, unexpected), _without(values, unexpected)
    cast = _cast_of(request)
    targets = _targets(contents, common, like, request)
    _change_shapes(targets, like, request)
    problems += _mismatches(targets, values, like, request)
    if problems:
        context = f"the checkpoint does not fit `{request.like_name}`"
        raise MismatchError(problems, context, _advice(lost, refused, names, request))
    numbers = {target.name: target for target in _values_as_arrays(values, like, cast)}
    plain = {n: fitted(value, like[n], cast(like[n])) for n, value in values.items() if n not in numbers}
    targets += numbers.values()
    for target in targets:
        _imitate(target, like[target.name], has_mesh=request.placement.mesh is not None)
    return Selection(targets, plain, missing, code, tuple(unexpected))


def _is_left_to_code(leaf: Any, value: Any, is_stored: bool) -> bool:
    """Tell whether a leaf of `like` is a function, of which the checkpoint has nothing, or only the name."""
    return is_code(leaf) and (not is_stored or isinstance(value, LeftToCode))


def _is_below(name: str, parts: Iterable[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def _without(mapping: Mapping[str, T], names: Collection[str]) -> Mapping[str, T]:
    return {name: value for name, value in mapping.items() if name not in names} if names else mapping


def _cast_of(request: Request) -> _Cast:
    """Return a function that returns, for a leaf of `like`, the dtype to cast a floating array to; None for no cast."""
    if request.casts_like:
        return floating_dtype_of
    cast = request.cast
    return lambda _: cast


def floating_dtype_of(leaf: Any) -> str | None:
    """Return the name of the leaf's dtype if it is floating; None for other dtypes and for leaves without a dtype."""
    dtype = _dtype_name(leaf.dtype) if _has_shape(leaf) else ""
    return dtype if is_floating(dtype) else None


def _targets(
    contents: Contents, names: Mapping[str, None], like: Mapping[str, Any], request: Request
) -> list[LeafTarget]:
    """Describe the arrays among the leaves, in their stored dtype or the dtype that they are cast to."""
    entries, computed = contents.arrays, contents.computed
    cast = None if request.dtype is None else _cast_of(request)
    targets = []
    for name in names:
        if name in entries:
            entry = entries[name]
            is_cast = (
                cast and is_floating(entry.dtype) and not (name in computed and computed[name].keeps_dtype)
            )
            dtype = (cast(like.get(name)) if cast and is_cast else None) or entry.dtype
            target = LeafTarget(name, entry, dtype, as_numpy=entry.home == "numpy")
            target.is_stored = name not in computed
            if entry.home == "weak":
                target.is_weak = dtype == entry.dtype  # a cast gives it a strong type
            targets.append(target)
    return targets


# ------------------------------------------------------------------------------------------ new shapes


def _change_shapes(targets: Iterable[LeafTarget], like: Mapping[str, Any], request: Request) -> None:
    """Mark arrays whose shape differs from `like`, to be resized by the caller's function or reshaped."""
    if request.resize is None and not request.reshape:
        return
    for target in targets:
        leaf = like.get(target.name)
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple) or shape == target.entry.shape or target.entry.key:
            continue
        if (resize := _resize_of(target.name, leaf, request.resize)) is not None:
            target.new_shape, target.resize = shape, resize
        elif request.reshape and math.prod(shape) == math.prod(target.entry.shape):
            target.new_shape = shape
            stored = list(target.entry.shape)
            logger.warning("leaf %r is reshaped from %s to %s", target.name, stored, list(shape))


def _resize_of(name: str, leaf: Any, resize: Resize | None) -> Callable[[Any], Any] | None:
    """Return the caller's function for a leaf, as a function of the stored array alone."""
    if resize is None:
        return None
    if callable(resize):
        return lambda array: resize(array, leaf, name)
    spellings = (name, readable(name))
    for pattern, function in dict(resize).items():
        if any(fnmatch.fnmatchcase(spelling, pattern) for spelling in spellings):
            return lambda array: function(array, leaf)
    return None


def _values_as_arrays(
    values: Mapping[str, Any], like: Mapping[str, Any], cast: _Cast
) -> Iterable[LeafTarget]:
    """Yield targets for the plain numbers whose leaf in `like` is an array without axes."""
    for name, value in values.items():
        if _has_shape(leaf := like[name]) and not is_scalar(leaf):
            dtype = _dtype_name(leaf.dtype)
            array = as_array(value, dtype, cast(leaf))
            yield LeafTarget(name, LeafEntry(dtype, (), ()), dtype, arrays=[array], is_stored=False)


def _imitate(target: LeafTarget, leaf: Any, *, has_mesh: bool) -> None:
    """Give the target the kind and the place of the leaf of `like`."""
    if isinstance(leaf, (Sharding, PartitionSpec)):
        target.as_numpy, target.sharding, target.is_explicit = False, leaf, True
    elif is_scalar(leaf):
        target.as_numpy, target.like_scalar = True, leaf
    elif isinstance(leaf, np.ndarray):
        target.as_numpy = True
    elif isinstance(leaf, AnnotatedShape):
        target.as_numpy, target.is_weak = False, leaf.weak_type
        if has_mesh:
            target.sharding, target.is_explicit = leaf.axes, True
    else:
        target.as_numpy, target.is_weak = False, bool(getattr(leaf, "weak_type", False))
        if (sharding := getattr(leaf, "sharding", None)) is not None and getattr(leaf, "committed", True):
            target.sharding, target.is_explicit = sharding, True


# ----------------------------------------------------------------------------------------- mismatches


def _other_leaves(
    missing: Mapping[str, Any],
    unexpected: Collection[str],
    names: Collection[str],
    like: Collection[str],
    request: Request,
) -> Iterable[str]:
    """Yield the problems of leaves that are only in the checkpoint or only in `like`."""
    there = request.like_name
    if not request.partial:
        # The hints name leaves that are only on the other side, if there are any: others have their counterpart.
        for name, hint in with_nearest(missing, unexpected or names):
            where = "the checkpoint does not" if request.keys is None else "the selection by keys= does not"
            yield f"missing leaf {name!r}{hint}: `{there}` has it, {where}"
        for name, hint in with_nearest(unexpected, missing or like):
            yield f"unexpected leaf {name!r}{hint}: the checkpoint has it, `{there}` does not"
    elif like and len(missing) == len(like):
        yield f"no leaf has the same name in both: the checkpoint has {_first(names)}, `{there}` has {_first(like)}"
    else:
        for name, leaf in missing.items():
            if why := _why_without_value(leaf):
                yield f"missing leaf {name!r}: the checkpoint does not have it, and `{there}` has {why}"


def _why_without_value(leaf: Any) -> str | None:
    """Return the reason why a leaf of `like` cannot stay as it is; None if it can."""
    if isinstance(leaf, jax.Array):
        return (
            "an array that was deleted, probably donated to a jitted function" if leaf.is_deleted() else None
        )
    if isinstance(leaf, (np.ndarray, np.generic)):
        return None
    is_value = not _has_shape(leaf) and not isinstance(leaf, (Sharding, PartitionSpec))
    kind = jax.ShapeDtypeStruct if isinstance(leaf, jax.ShapeDtypeStruct) else type(leaf)
    return None if is_value else f"a {kind.__name__}, not a value"


def _first(names: Iterable[str]) -> str:
    return few(list(names)) or "none"


def _mismatches(
    targets: Sequence[LeafTarget], values: Mapping[str, Any], like: Mapping[str, Any], request: Request
) -> Iterable[str]:
    cast = _cast_of(request)
    for target in targets:
        leaf = like[target.name]
        if not _is_alike(target, leaf):
            yield from _array_mismatch(target, leaf, request)
    for name, value in values.items():
        yield from _value_mismatch(name, value, like[name], cast)


def _is_alike(target: LeafTarget, leaf: Any) -> bool:
    """Return True if both are arrays of numbers and alike, which is the most frequent case and checked quickly.

    False means that a mismatch is possible.
    """
    if not isinstance(leaf, _ARRAYS) or target.entry.key or target.new_shape is not None:
        return False
    return leaf.shape == target.entry.shape and _dtype_name(leaf.dtype) == target.dtype


def _array_mismatch(target: LeafTarget, leaf: Any, request: Request) -> Iterable[str]:
    if isinstance(leaf, (Sharding, PartitionSpec)):
        return
    stored, dtype = (
        (str(key_dtype(target.entry.key)),) * 2 if target.entry.key else (target.entry.dtype, target.dtype)
    )
    found = _array_text(stored, target.entry.logical_shape)
    if dtype != stored:
        found += f", which dtype= casts to {dtype}"
    if not _has_shape(leaf):
        kind = None if target.shape or target.entry.key else kind_of_dtype(target.dtype)
        if kind is None or kind is not kind_of_number(leaf):
            yield f"leaf {target.name!r}: expected {_plain_text(leaf)}, found {found}"
        return
    expected = _array_text(_dtype_name(leaf.dtype), tuple(leaf.shape))
    same_shape = tuple(leaf.shape) == target.shape
    if not same_shape or _dtype_name(leaf.dtype) != dtype:
        cast = _CASTS if is_floating(expected) and is_floating(found) else ""
        resize = "" if request.is_template or target.entry.key else _how_to_resize(request)
        if request.partial:
            resize += f", rename={{{target.name!r}: None}} leaves it out"
        how = cast if same_shape else resize
        yield f"leaf {target.name!r}: expected {expected}, found {found}{how}"


def _how_to_resize(request: Request) -> str:
    return "; resize= changes shapes" if request.resize is None else "; no pattern of resize= matches it"


def _value_mismatch(name: str, value: Any, leaf: Any, cast: _Cast) -> Iterable[str]:
    found = f"found the {type(value).__name__} {_short_repr(value)}"
    if isinstance(value, LeftToCode):
        found = f"found {value!r}"
    if isinstance(leaf, (Sharding, PartitionSpec)):
        yield f"leaf {name!r}: expected an array, {found}; pass a ShapeDtypeStruct to give its dtype"
    elif not _has_shape(leaf):
        if fitted(value, leaf, cast(leaf)) is None:
            yield f"leaf {name!r}: expected {_plain_text(leaf)}, {found}"
    elif leaf.shape or as_array(value, _dtype_name(leaf.dtype), cast(leaf)) is None:
        dtype, is_python = _dtype_name(leaf.dtype), not isinstance(value, np.generic)
        expected = _array_text(dtype, leaf.shape)
        same_kind = kind_of_number(value) is kind_of_dtype(dtype) is not None
        why = f", which {dtype} cannot hold exactly" if same_kind and is_python and not leaf.shape else ""
        how = _CASTS if same_kind and is_floating(dtype) and not leaf.shape else ""
        yield f"leaf {name!r}: expected {expected}, {found}{why}{how}"


def _advice(
    missing: Mapping[str, Any], unexpected: Collection[str], names: Collection[str], request: Request
) -> str:
    """Name the arguments of `load` that would help if leaves have other names, or are only on one side."""
    if not (missing or unexpected) or request.is_template:
        return ""
    advice = []
    root, number = _best_root(missing, names)
    if (
        root and not request.is_list
    ):  # a root in one checkpoint would drop the leaves of the other checkpoints
        advice.append(f"root={root!r} would find {number:,} of the {len(missing):,} missing leaves")
    elif missing and unexpected:
        # With rules already, another rule would have to follow them.
        rule = "" if request.rename else _best_rule(missing, unexpected, names)
        advice.append(rule or "rename= gives leaves of the checkpoint other names")
    if request.could_be_list and request.partial and any(map(_why_without_value, missing.values())):
        advice.append("a list of paths, such as [base, adapter], takes them from several checkpoints")
    kept = f"keep {len(missing):,} of `{request.like_name}` as they are" if missing else ""
    left_out = f"leave {len(unexpected):,} of the checkpoint out" if unexpected else ""
    if len(unexpected) < len(names) and not request.partial:  # otherwise nothing would be loaded
        advice.append(f"partial=True would {' and '.join(filter(None, (kept, left_out)))}")
    return "; ".join(advice)


def _best_root(missing: Collection[str], names: Collection[str]) -> tuple[str, int]:
    """Return the root with the most of the missing leaves below it, and their number; ("", 0) without such a root."""
    ends = set(missing)
    found = Counter[str]()
    for name in names:
        parts = split_name(name)
        for depth in range(1, len(parts)):
            if ".".join(parts[depth:]) in ends:
                found[".".join(parts[:depth])] += 1
    return found.most_common(1)[0] if found else ("", 0)


def _best_rule(missing: Collection[str], unexpected: Collection[str], names: Collection[str]) -> str:
    """Return the rule that finds all missing leaves by another first part of their names; "" without such a rule, or if
    it would rename other leaves that `like` has, or to their names."""
    wanted = {rest: first for first, _, rest in (name.partition(".") for name in missing) if rest}
    split = [(first, rest) for first, _, rest in (name.partition(".") for name in unexpected)]
    found = Counter((first, wanted[rest]) for first, rest in split if rest in wanted)
    (old, new), number = found.most_common(1)[0] if found else (("", ""), 0)
    renamed = [name for name in names if name.startswith(f"{old}.")]
    has_others = any(name not in unexpected or f"{new}.{name[len(old) + 1 :]}" in names for name in renamed)
    if number < len(missing) or has_others or "|" in new or new != new.strip():  # a rule has steps after |
        return ""
    rule = {rf"{re.escape(old)}\.(.*)": rf"{new}.\1"}
    return f"rename={rule!r} would find {number:,} of the {len(missing):,} missing leaves"


def _plain_text(leaf: Any) -> str:
    return f"a plain {type(leaf).__name__} such as {_short_repr(leaf)}"


def _short_repr(value: Any) -> str:
    return reprlib.repr(value.item() if isinstance(value, np.generic) else value)


def _array_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _has_shape(leaf: Any) -> bool:
    """Return True for arrays, descriptions of arrays and numpy scalars."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@lru_cache(256)
def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


@lru_cache
def key_dtype(generator: str) -> Any:
    """Return the dtype of PRNG keys of this generator; raise a FormatError if JAX does not have it."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype
    except (TypeError, ValueError) as error:
        raise FormatError(f"JAX cannot make PRNG keys of kind {generator[:200]!r}: {error}") from error


# -------------------------------------------------------------------------------------------- scalars
#
# Plain numbers, numpy scalars and arrays without axes become each other: `like` decides.

_KINDS = (bool, int, float, complex)  # bool before int, because a bool is an int, too


def kind_of_number(number: Any) -> type | None:
    """Return bool, int, float or complex for a number, None for other values."""
    if isinstance(number, np.generic):
        return kind_of_dtype(number.dtype.name)
    return next((kind for kind in _KINDS if isinstance(number, kind)), None)


@lru_cache
def kind_of_dtype(name: str) -> type | None:
    """Return the kind of Python number that can hold every element of this dtype; None if no kind can."""
    kind = type(np.zeros((), DTYPES[name]).item()) if name in DTYPES else None
    return kind if kind in _KINDS else None


def is_scalar(leaf: Any) -> bool:
    """Return True for plain numbers and numpy scalars, False for arrays, also for arrays without axes."""
    return isinstance(leaf, (*_KINDS, np.generic))


def as_array(value: Any, dtype: str, cast: str | None = None) -> np.ndarray[Any, Any] | None:
    """Convert a number to an array without axes; return None if `dtype` is of another kind or cannot hold the number.

    A numpy scalar must already have this dtype. `cast` is the dtype that floating numbers may be rounded to.
    """
    if isinstance(value, np.generic):
        own = value.dtype.name
        own = cast if cast and is_floating(own) else own
        return np.asarray(value).astype(DTYPES[dtype]) if own == dtype else None
    kind = kind_of_number(value)
    if kind is None or kind is not kind_of_dtype(dtype):
        return None
    try:
        with np.errstate(all="ignore"):
            array = np.array(value, DTYPES[dtype])
    except OverflowError:
        return None
    # Compared as text, because nan is not equal to nan, and -0.0 is equal to 0.0.
    is_exact = repr(array.item()) == repr(value)
    return array if is_exact or (kind is float and cast == dtype) else None


def as_scalar(array: Any, leaf: Any) -> Any:
    """Convert an array without axes to a number of the same type as `leaf`; return other values unchanged."""
    if not is_scalar(leaf) or not isinstance(array, np.ndarray) or array.shape:
        return array
    return array.astype(leaf.dtype)[()] if isinstance(leaf, np.generic) else array.item()


def fitted(value: Any, leaf: Any, cast: str | None = None) -> Any:
    """Convert a stored value to the type of the plain `leaf`; None if the type is of another kind or too small."""
    if isinstance(leaf, np.generic):
        array = as_array(value, leaf.dtype.name, cast)
        return None if array is None else array[()]
    if (kind := kind_of_number(leaf)) is None:
        return value if type(value) is type(leaf) else None
    if kind_of_number(value) is not kind:
        return None
    return value.item() if isinstance(value, np.generic) else value
