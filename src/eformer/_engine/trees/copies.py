"""Copy arrays on their devices by few programs, so that the caller waits neither for the copies nor for their start.

To start a program takes a few microseconds for each array, and a copy by `device_put` ten times as long. Programs are
small, since one takes about a millisecond to compile for each of its arrays: large trees use the same one many times.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.tasks.pool import run_all
from eformer._engine.trees.devices import PACKED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger("eformer")

_TOGETHER = 64  # arrays in one program
_WORTH_WAITING = 16  # batches for one program, from which on it is compiled at once
_THREADS = 4  # programs are started without the interpreter lock
_MAX_PROGRAMS = 256

_programs: dict[Any, Any] = {}  # None for one that is not compiled yet


def copied(arrays: Sequence[Any]) -> list[Any]:
    """Begin to copy arrays, each of which is on one device, on the same devices; return the copies.

    A program takes longer to compile than a few arrays to copy, so the first call mostly does without; see
    `compile_copies`.
    """
    copies: list[Any] = [None] * len(arrays)
    batches = list(_batches(arrays))
    for key, count in Counter(key for key, _ in batches if key).items():
        if _programs.setdefault(key, None) is None and count >= _WORTH_WAITING:
            _compile(key)

    def copy(key: Any, numbers: Sequence[int]) -> None:
        found = _copied(key, [arrays[number] for number in numbers])
        for number, array in zip(numbers, found, strict=True):
            copies[number] = array

    run_all([partial(copy, key, numbers) for key, numbers in batches], _THREADS)
    return copies


def _batches(arrays: Sequence[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Yield what one program copies: its key, None if there can be no program, and the numbers of the arrays."""
    for sharding, numbers in _by_sharding(arrays):
        programmed = [number for number in numbers if arrays[number].dtype not in PACKED]
        others = [number for number in numbers if arrays[number].dtype in PACKED]
        if sharding.memory_kind not in (None, _default_memory(sharding)):
            programmed, others = [], numbers
        if others:
            yield None, others
        kinds = [(number, (arrays[number].shape, arrays[number].dtype)) for number in programmed]
        for batch in _alike_first(kinds):
            yield (sharding, tuple(kind for _, kind in batch)), [number for number, _ in batch]


def _by_sharding(arrays: Sequence[Any]) -> Iterable[tuple[Any, list[int]]]:
    """Group the numbers of the arrays by their shardings."""
    groups: dict[Any, list[int]] = defaultdict(list)
    last, alike = None, []
    for number, array in enumerate(arrays):
        sharding = array.sharding
        if sharding is not last:  # by identity: comparing shardings takes long
            last, alike = sharding, groups[sharding]
        alike.append(number)
    return groups.items()


def _alike_first(kinds: Iterable[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Cut arrays, given as numbers and kinds, into batches: of one kind while these are full, then the rest."""
    by_kind: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for number, kind in kinds:
        by_kind[kind].append((number, kind))
    rest: list[tuple[int, Any]] = []
    for alike in by_kind.values():
        full = len(alike) // _TOGETHER * _TOGETHER
        yield from (alike[start : start + _TOGETHER] for start in range(0, full, _TOGETHER))
        rest += alike[full:]
    yield from (rest[start : start + _TOGETHER] for start in range(0, len(rest), _TOGETHER))


def _default_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def _copied(key: Any, arrays: list[Any]) -> Sequence[Any]:
    """Copy by the program of this key, if it is compiled; otherwise one by one."""
    program = key and _programs.get(key)
    try:
        if program:
            return program(arrays)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:  # compiled for another memory layout
        logger.debug("%d arrays do not fit the program that copies their shapes: %s", len(arrays), error)
    return _copied_singly(arrays)


def _copied_singly(arrays: list[Any]) -> Sequence[Any]:
    import jax  # late: numpy trees are read and written without it

    return jax.device_put(arrays, arrays[0].sharding, may_alias=False)  # type: ignore[no-any-return]


def compile_copies() -> None:
    """Compile the programs that `copied` did without. Takes a fraction of a second; call it in the background."""
    for key in [key for key, program in list(_programs.items()) if program is None]:
        _compile(key)
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)


def _compile(key: Any) -> None:
    import jax  # late, as above

    sharding, kinds = key
    described: Any = jax.ShapeDtypeStruct  # it has no type annotations
    shapes = [described(shape, dtype, sharding=sharding) for shape, dtype in kinds]
    try:
        copy_all = jax.jit(lambda arrays: [array.copy() for array in arrays])
        _programs[key] = copy_all.lower(shapes).compile()
    except Exception as error:  # noqa: BLE001  a compiler may raise anything; single copies do as well
        logger.debug("%d arrays cannot be copied by one program: %s", len(kinds), error)
        _programs[key] = _copied_singly
