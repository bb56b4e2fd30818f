"""Read pickles as data: a machine for the opcodes that trees need. It runs and imports nothing.

Tests: tests/compat/test_original_structure_attacks.py, tests/compat/test_torch_hostile.py.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, NoReturn

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_OPCODES = 50_000_000  # about a minute of work; a model of a thousand tensors has some thirty thousand


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
class PickledObject:
    """A call that a pickle asks for, with the state that it sets afterwards. The call is never made."""

    made_by: Global
    arguments: tuple[Any, ...]
    state: Any = None


# Sets and dicts are kept as lists: to hash a hostile nest of tuples can take unlimited time or overflow the stack.
class PickledSet(list[Any]): ...


class PickledFrozenSet(list[Any]): ...


class PickledDict(list[Any]):
    """Key, value, key, value, ..."""


@dataclass(slots=True)
class Machine:
    """The opcodes of pickle's protocol 4 that trees and plain values need.

    `pickle.Unpickler` can be kept from importing, but not from filling a memo of 2**32 entries or from hashing.
    Subclasses override `find`, `call` and `persistent` to give names, calls and persistent ids a meaning.
    """

    stack: list[Any] = field(default_factory=list)
    below_marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def find(self, module: Any, name: Any) -> Any:
        """Return the value of a name: by default a `Global`."""
        if type(module) is not str or type(name) is not str:
            refuse("a pickle refers to a class by a name that is not text")
        return Global(module, name)

    def call(self, made_by: Global, arguments: tuple[Any, ...]) -> Any:
        """Return the value of a call: by default a `PickledObject`."""
        return PickledObject(made_by, arguments)

    def persistent(self, found: Any) -> Any:
        """Return the value of a persistent id, which lies outside the pickle: by default, refuse it."""
        refuse("a pickle refers to an object outside the pickle")

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
        self.push(self.call(made_by, arguments))

    def build(self) -> None:
        (state,) = self.pop(1)
        if type(self.stack[-1]) is not PickledObject or self.stack[-1].state is not None:
            refuse("a pickle gives a state to a value that cannot have one")
        self.stack[-1].state = state


Actions = dict[str, "Callable[[Any, Any], None]"]
"""A function for each opcode, which takes the machine and the opcode's argument."""

# The opcodes of protocol 4, in which this package and the original pickle trees.
ACTIONS: Actions = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), Machine.push),
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
    "EMPTY_DICT": lambda m, _: m.push(PickledDict()),
    "SETITEM": lambda m, _: m.extend(PickledDict, m.pop(2)),
    "SETITEMS": lambda m, _: m.extend(PickledDict, m.pop_marked()),
    "EMPTY_SET": lambda m, _: m.push(PickledSet()),
    "ADDITEMS": lambda m, _: m.extend(PickledSet, m.pop_marked()),
    "FROZENSET": lambda m, _: m.push(PickledFrozenSet(m.pop_marked())),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "BINGET": lambda m, index: m.push(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    "STACK_GLOBAL": lambda m, _: m.push(m.find(*m.pop(2))),
    "NEWOBJ": lambda m, _: m.make(),
    "REDUCE": lambda m, _: m.make(),
    "BUILD": lambda m, _: m.build(),
}


def run(machine: Machine, data: bytes | IO[bytes], actions: Actions, hint: str = "") -> tuple[Any, int]:
    """Read the pickle that `data` begins with. Return its value, and the position of its end."""
    end = 0
    for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if number > _MAX_OPCODES:
            refuse(f"a pickle has more than {_MAX_OPCODES} opcodes")
        if opcode.name == "STOP":
            end = (position or 0) + 1
        elif opcode.name not in actions:
            shown = f"{opcode.name} {argument or ''!s:.200}".strip()
            refuse(f"a pickle has the opcode {shown}, which neither trees nor plain values need{hint}")
        else:
            actions[opcode.name](machine, argument)
    if len(machine.stack) != 1 or machine.below_marks:
        refuse("a pickle does not hold exactly one value")
    return machine.stack[0], end
