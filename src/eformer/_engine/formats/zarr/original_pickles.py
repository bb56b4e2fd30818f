"""Read pickles as data: the opcodes that trees and plain values need, and none that run or import anything."""

from __future__ import annotations

import base64
import pickletools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.values import value_to_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

_HINT = "; pass template= (a tree of the same structure)"

_MAX_VALUE_DEPTH = 64


def refuse(problem: str) -> NoReturn:
    """Raise a FormatError."""
    raise FormatError(problem)


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function that a pickle refers to. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(slots=True, eq=False)
class Object:
    """A call that a pickle asks for, with the state it sets afterwards. It is never made."""

    made_by: Global
    arguments: tuple[Any, ...]
    state: Any = None


# Lists, because hashing a hostile nest of tuples can take unlimited time or overflow the stack.
class _Set(list[Any]): ...


class _FrozenSet(list[Any]): ...


class _Dict(list[Any]):
    """Key, value, key, value, ..."""


class NotPlainError(FormatError):
    """A pickle holds an object that is not a plain value, made by `found`."""

    def __init__(self, found: Global) -> None:
        super().__init__(
            f"it holds {str(found)[:200]}, which is not a plain value, and is neither imported nor run{_HINT}"
        )
        self.found = found


_COMPLEX = "builtins:complex"
_PLAIN_TYPES = (list, dict, set, tuple, int, float, complex, bool, str, bytes)
FACTORIES = {f"builtins:{kind.__name__}" for kind in _PLAIN_TYPES} | {"collections:OrderedDict"}


def _global(module: Any, name: Any) -> Global:
    """Return the name of a class; refuse the names that attacks use and trees do not, though none is imported."""
    if type(module) is not str or type(name) is not str:
        refuse("a pickle refers to a class by a name that is not text")
    found = Global(module, name)
    is_tool = module.partition(".")[0] in sys.stdlib_module_names or module.startswith("numpy.")
    if is_tool and str(found) not in FACTORIES | {"collections:defaultdict"}:
        raise NotPlainError(found)
    return found


@dataclass(slots=True)
class _Machine:
    """The part of the pickle machine of protocol 4 that trees and plain values need.

    `pickle.Unpickler` can be kept from importing, but not from filling a memo of 2**32 entries or from hashing.
    """

    stack: list[Any] = field(default_factory=list)
    below_marks: list[list[Any]] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            refuse("a pickle takes more than it has")
        start = len(self.stack) - count
        popped, self.stack[start:] = self.stack[start:], []
        return popped

    def mark(self) -> None:
        self.below_marks.append(self.stack)
        self.stack = []

    def pop_marked(self) -> list[Any]:
        popped, self.stack = self.stack, self.below_marks.pop()
        return popped

    def extend(self, kind: type[list[Any]], items: list[Any]) -> None:
        if type(self.stack[-1]) is not kind:
            refuse("a pickle adds items to a value that cannot have them")
        self.stack[-1].extend(items)

    def make(self) -> None:
        made_by, arguments = self.pop(2)
        if type(made_by) is not Global or type(arguments) is not tuple:
            refuse("a pickle calls something that is not a class")
        self.push(Object(made_by, arguments))

    def build(self) -> None:
        (state,) = self.pop(1)
        if type(self.stack[-1]) is not Object or self.stack[-1].state is not None:
            refuse("a pickle gives a state to a value that cannot have one")
        self.stack[-1].state = state


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _Machine.push),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "MARK": lambda m, _: m.mark(),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_marked())),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "APPEND": lambda m, _: m.extend(list, m.pop(1)),
    "APPENDS": lambda m, _: m.extend(list, m.pop_marked()),
    "EMPTY_DICT": lambda m, _: m.push(_Dict()),
    "SETITEM": lambda m, _: m.extend(_Dict, m.pop(2)),
    "SETITEMS": lambda m, _: m.extend(_Dict, m.pop_marked()),
    "EMPTY_SET": lambda m, _: m.push(_Set()),
    "ADDITEMS": lambda m, _: m.extend(_Set, m.pop_marked()),
    "FROZENSET": lambda m, _: m.push(_FrozenSet(m.pop_marked())),
    "MEMOIZE": lambda m, _: m.memo.append(m.stack[-1]),
    "BINGET": lambda m, index: m.push(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    "STACK_GLOBAL": lambda m, _: m.push(_global(*m.pop(2))),
    "NEWOBJ": lambda m, _: m.make(),
    "REDUCE": lambda m, _: m.make(),
    "BUILD": lambda m, _: m.build(),
}


def unpickle(encoded: str) -> Any:
    """Read a pickle, in base64, into plain values, `Global`s and `Object`s. Nothing is imported or called."""
    data = base64.b64decode(encoded, validate=True)
    machine = _Machine()
    end = 0
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name == "STOP":
            end = (position or 0) + 1
        elif opcode.name not in _ACTIONS:
            shown = f"{opcode.name} {argument or ''!s:.200}".strip()
            refuse(f"a pickle has the opcode {shown}, which neither trees nor plain values need{_HINT}")
        else:
            _ACTIONS[opcode.name](machine, argument)
    if end != len(data) or len(machine.stack) != 1 or machine.below_marks:
        refuse("a pickle has more in it than one value")
    return machine.stack[0]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: dict[type, Callable[[list[Any]], Any]] = {
    tuple: tuple,
    list: list,
    _Set: set,
    _FrozenSet: frozenset,
    _Dict: _pairs,
}


@dataclass(slots=True)
class PlainDecoder:
    """A decoder of plain values from the contents of pickles.

    It stops when the values have used up `budget`: references let a short pickle stand for a huge value.
    """

    budget: int

    def decode(self, found: Any, depth: int = 0) -> Any:
        """Return the plain value; raise a NotPlainError if it is not one."""
        self.budget -= 1 + sys.getsizeof(found) // 64
        if self.budget < 0 or depth > _MAX_VALUE_DEPTH:
            refuse("a value is far larger than its pickle, nested too deep, or contains itself")
        kind = type(found)
        if kind in _ATOMS:
            return found
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self.decode(item, depth + 1) for item in found])
        if kind is Object and str(found.made_by) == _COMPLEX:
            return complex(*self.decode(found.arguments, depth + 1))
        raise NotPlainError(found if kind is Global else found.made_by)

    def to_json(self, found: Any) -> Any:
        """Encode auxiliary data. Unlike a leaf or a key it may be opaque; the tree then needs a `like`."""
        if type(found) is Global and found.module in _DTYPE_MODULES and found.name in DTYPES:
            return {found.module: found.name}
        try:
            return value_to_json(self.decode(found))
        except NotPlainError as error:
            return {"opaque": str(error.found)[:200]}


_DTYPE_MODULES = ("numpy", "ml_dtypes", "jax.numpy")
