"""Copy arrays on their devices by few programs, so that the caller waits neither for the copies nor for their start.

Starting a program takes a few microseconds for each array, and a copy by `device_put` ten times as long. Programs are
small, since compiling takes about a millisecond for each array: large trees use the same program many times.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.tasks.pool import run_all
from eformer._engine.trees.devices import PACKED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("eformer")

_TOGETHER = 64  # arrays in one program
_WORTH_WAITING = 16  # batches for one program: from here on the first save compiles it and waits
_THREADS = 4  # programs are started without the interpreter lock
_MAX_PROGRAMS = 256  # a program that changes its shapes again and again must not fill the memory

_programs: dict[Any, Any] = {}  # None for a program that is not compiled yet


class Kinds:
    """The arrays of a tree, each on one device, grouped by sharding, shape and dtype."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = arrays
        self.numbers: dict[Any, list[int]] = defaultdict(list)  # of the arrays of each kind
        shardings: dict[int, Any] = {}  # by identity: to hash and compare shardings takes ten times as long
        alike: dict[Any, list[int]] = defaultdict(list)
        for number, array in enumerate(arrays):
            sharding = array.sharding
            shardings[id(sharding)] = sharding
            alike[id(sharding), array.shape, array.dtype].append(number)
        for (place, shape, dtype), numbers in alike.items():
            self.numbers[shardings[place], shape, dtype] += numbers

    def nbytes(self) -> dict[Any, int]:
        """Return the bytes of the arrays on each device."""
        found: dict[Any, int] = defaultdict(int)
        for (sharding, shape, dtype), numbers in self.numbers.items():
            (device,) = sharding.device_set
            found[device] += math.prod(shape) * dtype.itemsize * len(numbers)
        return found


def copied(kinds: Kinds) -> list[Any]:
    """Begin to copy arrays on their devices; return the copies, in the order of the arrays.

    A program takes longer to compile than a few arrays to copy. So the first call mostly copies array by array, and
    notes the programs for `compile_copies`.
    """
    arrays, copies = kinds.arrays, [None] * len(kinds.arrays)
    batches = list(_batches(kinds))
    for key, count in Counter(key for key, _ in batches if key).items():
        # Notes each program that is missing, for `compile_copies`.
        if _programs.setdefault(key, None) is None and count >= _WORTH_WAITING:
            _compile(key)

    def copy(key: Any, numbers: Sequence[int]) -> None:
        found = _copied(key, [arrays[number] for number in numbers])
        for number, array in zip(numbers, found, strict=True):
            copies[number] = array  # no lock: each task has numbers of its own

    run_all([partial(copy, key, numbers) for key, numbers in batches], _THREADS)
    return copies


def _batches(kinds: Kinds) -> Iterator[tuple[Any, list[int]]]:
    """Yield batches: the key of the program that copies one, None if no program can, and the numbers of its arrays.

    Full batches have arrays of one kind, so that one program serves many. The last batches of a device mix the rest of
    all kinds.
    """
    rest: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for (sharding, shape, dtype), numbers in kinds.numbers.items():
        # Programs return arrays in the default memory of a device. Packed arrays are left to `device_put` as well.
        if dtype in PACKED or sharding.memory_kind not in (None, _default_memory(sharding)):
            yield None, numbers
            continue
        kind, full = (shape, dtype), len(numbers) // _TOGETHER * _TOGETHER
        for start in range(0, full, _TOGETHER):
            yield (sharding, (kind,) * _TOGETHER), numbers[start : start + _TOGETHER]
        rest[sharding].extend((number, kind) for number in numbers[full:])
    for sharding, others in rest.items():
        for start in range(0, len(others), _TOGETHER):
            some = others[start : start + _TOGETHER]
            yield (sharding, tuple(kind for _, kind in some)), [number for number, _ in some]


def _default_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def _copied(key: Any, arrays: list[Any]) -> Sequence[Any]:
    """Copy by the program of this key if it is compiled, otherwise array by array."""
    program = key and _programs.get(key)
    try:
        if program:
            return program(arrays)  # type: ignore[no-any-return]
    # A program is compiled for the default layout of a shape, and an array may have another one.
    except (TypeError, ValueError) as error:
        logger.debug("%d arrays do not fit the program that copies their shapes: %s", len(arrays), error)
    return _copied_singly(arrays)


def _copied_singly(arrays: list[Any]) -> Sequence[Any]:
    import jax  # late: numpy trees are read and written without it

    return jax.device_put(arrays, arrays[0].sharding, may_alias=False)  # type: ignore[no-any-return]


def compile_copies() -> None:
    """Compile the programs that `copied` could have used. Takes a fraction of a second; call it in the background."""
    # A list, because a save in another thread may add programs.
    for key in [key for key, program in list(_programs.items()) if program is None]:
        _compile(key)
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)  # the oldest; another thread may have removed it


def _compile(key: Any) -> None:
    import jax  # late, as above

    sharding, kinds = key
    described: Any = jax.ShapeDtypeStruct  # it has no type annotations
    # Shapes suffice. To compile from arrays would keep them alive, and the caller may donate them.
    shapes = [described(shape, dtype, sharding=sharding) for shape, dtype in kinds]
    try:
        copy_all = jax.jit(lambda arrays: [array.copy() for array in arrays])
        # The thread that compiles may have a mesh of other devices, or 64 bits turned off, where int64 becomes int32.
        with jax.set_mesh(None), jax.enable_x64(True):
            _programs[key] = copy_all.lower(shapes).compile()
    except Exception as error:  # noqa: BLE001  a compiler may raise anything; single copies are as good
        logger.debug("%d arrays cannot be copied by one program: %s", len(kinds), error)
        _programs[key] = _copied_singly  # so that no later save tries again
