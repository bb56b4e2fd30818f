"""Read the pickles of PyTorch as data: containers, plain values and tensors, which name the storages of their elements.

Nothing is imported or called. Any other value stays a `PickledObject`, and is left out of the tree.

Tests: tests/compat/test_torch.py, tests/compat/test_torch_hostile.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.pickles import (
    ACTIONS,
    Actions,
    Global,
    Machine,
    PickledDict,
    PickledFrozenSet,
    PickledObject,
    PickledSet,
    refuse,
    run,
)
from eformer._engine.record.dtypes import MOST_AXES, dtype_from_name
from eformer._engine.record.names import MAX_DEPTH
from eformer._engine.record.text import few
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = {
    "float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32",
    "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
}  # fmt: skip
_OF_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32",
    "LongStorage": "int64", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip

_MOST_NODES, _MOST_EXPANSION = 200_000, 4  # nodes of the tree, and further nodes for each byte of the pickle


class Storage(Struct, frozen=True):
    """Elements that lie outside the pickle under a key. Its tensors have its dtype, unless they name another.

    `kind` is the name of its class. A storage of an unknown kind has no dtype.
    """

    key: str
    kind: str
    size: int

    @property
    def dtype(self) -> str | None:
        return _OF_STORAGES.get(self.kind)

    @property
    def nbytes(self) -> int:
        return self.size * dtype_from_name(self.dtype).itemsize if self.dtype else 0


class TorchTensor(Struct, frozen=True):
    """A view of a storage. Offset and strides count elements of `dtype`.

    `is_conjugated` and `is_negated` mark views whose elements are stored as before `conj()` or negation.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    is_conjugated: bool = False
    is_negated: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype_from_name(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def is_by_rows(self) -> bool:
        """Tell whether the elements lie one after the other, as eformer stores them."""
        if self.is_conjugated or self.is_negated:
            return False
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return self.size == 0
            step *= size
        return True

    @property
    def extent(self) -> int:
        """Return the number of elements of the storage from the first to the last that the tensor uses."""
        if not self.size:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class OtherTensor(Struct, frozen=True):
    """A tensor of a kind that eformer does not store, such as quantised or sparse."""

    kind: str


@dataclass(slots=True)
class _Machine(Machine):
    storages: dict[str, Storage] = field(default_factory=dict)

    def call(self, made_by: Global, arguments: tuple[Any, ...]) -> Any:
        return _called(made_by, arguments)

    def persistent(self, found: Any) -> Any:
        """Return the storage of a persistent id. For other ids, such as the source of a module, return an object."""
        if type(found) is not tuple or len(found) < 5 or found[0] != "storage":
            return PickledObject(Global("torch", "persistent id"), ())
        _, kind, key, _, size, *view = found
        if type(kind) is not Global or type(key) is not str or not _is_count(size):
            refuse("a storage of a pickle is invalid")
        if view and view[0] is not None:
            refuse(
                f"storage {key[:40]!r} is a part of another storage, as PyTorch before 0.4 wrote it; save it again "
                "with a newer PyTorch"
            )
        return self.storages.setdefault(key, Storage(key, kind.name, size))

    def extend(self, kind: type[list[Any]], items: list[Any]) -> None:
        if type(self.stack[-1]) is not PickledObject:  # the items of an object are left out with the object
            Machine.extend(self, kind, items)

    def build(self) -> None:
        """Keep the states of objects. States of containers and parameters, such as versions of modules, are ignored."""
        (state,) = self.pop(1)
        if type(self.stack[-1]) is PickledObject:
            self.stack[-1].state = state


def _called(made_by: Global, arguments: tuple[Any, ...]) -> Any:
    """Return the value of a call."""
    make = _CALLS.get(str(made_by))
    if make is not None:
        return make(arguments)
    is_tensor = made_by.module.startswith("torch") and made_by.name.startswith("_rebuild_")
    return OtherTensor(str(made_by)) if is_tensor else PickledObject(made_by, arguments)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _tensor(arguments: tuple[Any, ...]) -> Any:
    """Make a tensor from (storage, offset, shape, strides, ..., dtype, marks). Dtype and marks may be missing."""
    storage, offset, shape, strides = arguments[:4]
    more = arguments[6:]
    named = more[0] if more and type(more[0]) is Global else None
    if type(storage) is not Storage:
        refuse("a tensor of a pickle has no storage")
    dtype = storage.dtype if named is None else named.name
    if dtype is None or (named and dtype not in _DTYPES):
        return OtherTensor(f"elements of {str(named) if named else storage.kind}")
    marks = _marks(more[1:] if named else more)
    if unknown := sorted(marks - {"conj", "neg"}):
        return OtherTensor(f"marked as {few([mark[:40] for mark in unknown])}")
    is_shape = type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= MOST_AXES
    if not is_shape or not all(map(_is_count, (offset, *shape, *strides))):
        refuse("a tensor of a pickle has an invalid shape")
    found = TorchTensor(storage, offset, shape, strides, dtype, "conj" in marks, "neg" in marks)
    if (offset + found.extent) * found.itemsize > storage.nbytes and found.size:
        refuse(
            f"a tensor {dtype}{list(shape)} ends after element {offset + found.extent} of its storage "
            f"{storage.key[:40]!r}, which has {storage.nbytes} bytes"
        )
    return found


def _marks(more: tuple[Any, ...]) -> set[str]:
    """Return the names of a tensor's marks, which a dict of booleans holds."""
    if not more or more[0] is None:
        return set()
    if type(more[0]) is not PickledDict or not all(type(name) is str for name in more[0][::2]):
        refuse("a tensor of a pickle has invalid marks")
    return {name for name, is_set in zip(more[0][::2], more[0][1::2], strict=True) if is_set}


def _first(arguments: tuple[Any, ...]) -> Any:
    """Return the tensor of a parameter."""
    return arguments[0]


def _subclass(arguments: tuple[Any, ...]) -> Any:
    """Make the tensor of a subclass from (function, class, arguments of the function, state)."""
    function, _, inner = arguments[:3]
    if type(function) is not Global or type(inner) is not tuple:
        refuse("a tensor of a pickle is made by a value that is not a function")
    if str(function) == _SUBCLASS:
        refuse("a tensor of a pickle is wrapped twice")
    return _called(function, inner)


def _dict(arguments: tuple[Any, ...]) -> PickledDict:
    """Make a dict from a list of pairs. Without pairs it is empty: a defaultdict has the class of its values there."""
    found = PickledDict()
    for pair in arguments[0] if arguments and type(arguments[0]) is list else ():
        if type(pair) not in (list, tuple) or len(pair) != 2:
            refuse("a dict of a pickle has an invalid item")
        found.extend(pair)
    return found


def _items(kind: type[list[Any] | tuple[Any, ...]]) -> Callable[[tuple[Any, ...]], Any]:
    def make(arguments: tuple[Any, ...]) -> Any:
        (items,) = arguments or ((),)
        if type(items) not in (list, tuple):
            refuse("a collection of a pickle has invalid items")
        return kind(items)

    return make


def _bytes(arguments: tuple[Any, ...]) -> bytes:
    """Make bytes, which protocol 2 writes as text."""
    text, *more = arguments or ("",)
    if type(text) is not str or more not in ([], ["latin1"]):
        refuse("the bytes of a pickle are invalid")
    return text.encode("latin-1")


def _complex(arguments: tuple[Any, ...]) -> complex:
    real, imaginary = arguments
    if type(real) is not float or type(imaginary) is not float:
        refuse("a complex number of a pickle is invalid")
    return complex(real, imaginary)


def _device(arguments: tuple[Any, ...]) -> str:
    return ":".join(str(part) for part in arguments if type(part) in (str, int))


_BYTEARRAY = Global("builtins", "bytearray")  # a class that eformer does not store
_SUBCLASS = "torch._tensor:_rebuild_from_type_v2"
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils:_rebuild_tensor": _tensor,
    "torch._utils:_rebuild_tensor_v2": _tensor,
    "torch._utils:_rebuild_tensor_v3": _tensor,
    "torch._utils:_rebuild_parameter": _first,
    "torch._utils:_rebuild_parameter_with_state": _first,
    "torch.nn.parameter:Parameter": _first,
    _SUBCLASS: _subclass,
    "torch:Size": _items(tuple),
    "torch:device": _device,
    "collections:OrderedDict": _dict,
    "collections:defaultdict": _dict,
    "_codecs:encode": _bytes,
}
for _module in ("builtins", "__builtin__"):
    _CALLS[f"{_module}:set"] = _items(PickledSet)
    _CALLS[f"{_module}:frozenset"] = _items(PickledFrozenSet)
    _CALLS[f"{_module}:bytes"] = _bytes
    _CALLS[f"{_module}:dict"] = _dict
    _CALLS[f"{_module}:complex"] = _complex
    _CALLS[f"{_module}:bytearray"] = lambda arguments: PickledObject(_BYTEARRAY, ())

# The opcodes of protocol 2, which PyTorch writes, and of protocol 4.
_TORCH: Actions = {
    **ACTIONS,
    "BINPUT": lambda m, index: m.memo.__setitem__(index, m.stack[-1]),
    "LONG_BINPUT": lambda m, index: m.memo.__setitem__(index, m.stack[-1]),
    "GLOBAL": lambda m, name: m.push(m.find(*name.split(" ", 1))),
    "BINPERSID": lambda m, _: m.push(m.persistent(*m.pop(1))),
    "BINSTRING": Machine.push,
    "SHORT_BINSTRING": Machine.push,
    "BYTEARRAY8": lambda m, _: m.push(PickledObject(_BYTEARRAY, ())),
}


class Pickled(Struct, frozen=True):
    """The contents of a pickle (plain containers and values, tensors and objects), and its length in bytes."""

    value: Any
    nbytes: int
    storages: dict[str, Storage]


def unpickle(data: bytes) -> Pickled:
    """Read the pickle that `data` begins with."""
    machine = _Machine()
    try:
        value, end = run(machine, data, _TORCH)
        return Pickled(_plain(value, [_MOST_NODES + end * _MOST_EXPANSION]), end, machine.storages)
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"a pickle is damaged: {str(error)[:200]}") from error


def _plain(found: Any, left: list[int], depth: int = 0) -> Any:
    """Return the containers of a pickle as containers of Python. References let a short pickle stand for a huge tree,
    so the number of nodes is bounded: `left` counts down."""
    kind = type(found)
    left[0] -= 1 + _size(found, kind)
    if left[0] < 0 or depth > MAX_DEPTH:
        refuse("a pickle is far larger than its text, nested too deep, or contains itself")
    if kind is Global:
        return _named(found)
    if kind in (list, tuple):
        return kind(_plain(item, left, depth + 1) for item in found)
    if kind is PickledDict:
        keys = [_key(key) for key in found[::2]]
        return dict(zip(keys, (_plain(item, left, depth + 1) for item in found[1::2]), strict=True))
    if kind in (PickledSet, PickledFrozenSet):
        inside = [_key(item) for item in found]
        return set(inside) if kind is PickledSet else frozenset(inside)
    return found


def _size(found: Any, kind: type) -> int:
    """Return the number of nodes that a large value counts for: it is copied wherever the pickle refers to it."""
    if kind in (str, bytes):
        return len(found) // 16
    if kind in (PickledSet, PickledFrozenSet):
        return len(found)
    return found.bit_length() // 128 if kind is int else 0


def _named(found: Global) -> Any:
    """Return a dtype as text, as PyTorch prints it. Any other class or function is an object, and left out."""
    return (
        f"torch.{found.name}"
        if found.module == "torch" and found.name in _DTYPES
        else PickledObject(found, ())
    )


def _key(found: Any) -> Any:
    """Return a key of a dict, or an item of a set."""
    if type(found) is Global:
        return str(found)
    if type(found) is tuple and all(type(item) in _ATOMS for item in found):
        return found
    if type(found) not in _ATOMS:
        refuse(f"a key of a dict is a {type(found).__name__}, which is not supported")
    return found


_ATOMS = (str, int, float, bool, bytes, type(None))
