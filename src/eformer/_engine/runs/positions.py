"""The position of a job in its data: one for each process, taken from its iterator and given back to it.

Grain's iterators over data have `get_state` and `set_state`; loaders of torchdata and datasets of Hugging Face have
`state_dict` and `load_state_dict`. A position is plain values, bytes, and arrays of numpy and torch, such as the state
of a random generator.

A job of another number of processes takes the positions in two cases. Grain's `ElasticIterator` counts the examples of
the whole job, so its position is the same in all processes and valid in any number of them. A loader with `set_states`
(or `load_state_dicts`) gets the positions of all processes, and divides them itself. All others are refused, because
rows would be repeated or lost.

Tests: tests/engine/runs/test_positions.py, tests/engine/runs/test_data.py, tests/frameworks/test_data.py,
tests/multihost/test_data.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.record.text import few
from eformer._engine.record.values import MALFORMED_JSON, is_recorded, value_from_json, value_to_json
from eformer._engine.tasks.interrupts import called
from eformer.errors import FormatError, LeafError, StructureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_METHODS = (("get_state", "set_state", "set_states"), ("state_dict", "load_state_dict", "load_state_dicts"))
_ELASTIC = "global_next_index"  # the only key of the positions of an elastic iterator


def position_of(data: Any) -> bytes:
    """Return the position of an iterator, as bytes."""
    get, _, _ = _methods(data)
    position = value_to_json(_without_arrays(called(getattr(data, get))))
    if not is_recorded(position):
        raise LeafError(f"the position of a {type(data).__qualname__} cannot be stored: {position}")
    return msgspec.json.encode(position)


def set_position(data: Any, facts: Mapping[str, Any], step: str, *, number: int, count: int) -> None:
    """Put the iterator of process `number` of `count` to the position that a step has recorded in its facts."""
    _, put, put_all = _methods(data)
    found = _recorded(facts, step)
    if len(found) == count:
        called(getattr(data, put), _parsed(found[number], step, number))
        return
    positions = [_parsed(text, step, number) for number, text in enumerate(found)]
    if callable(getattr(data, put_all, None)):
        called(getattr(data, put_all), positions)
    elif _are_elastic(positions) and all(position == positions[0] for position in positions):
        called(getattr(data, put), positions[0])
    else:
        raise ValueError(
            f"{step} has the positions of {len(found)} processes in the data, this job has {count}. "
            f"{_loss(positions, count)}. Read the data by grain.experimental.ElasticIterator, whose position any "
            f"number of processes can take; or give the {type(data).__qualname__} a method {put_all}(positions), "
            "which gets the positions of all processes; or resume without data= and place the iterators yourself"
        )


def _recorded(facts: Mapping[str, Any], step: str) -> Sequence[str]:
    """Return the positions of all processes that a step has recorded."""
    found = facts.get("data", [])
    if not isinstance(found, (list, tuple)) or not all(isinstance(position, str) for position in found):
        raise FormatError(
            f"the recorded position of {step} in the data is not a list of texts: {found!r:.200}"
        )
    if not found:
        raise ValueError(
            f"{step} was saved without data=, so it has no position in the data; resume without data= and place the "
            "iterator yourself"
        )
    return found


def _parsed(position: str, step: str, number: int) -> Any:
    if not position:
        raise ValueError(
            f"{step} was saved without data= in process {number}, so it has no position of that process in the data; "
            "pass data= in the same processes as before"
        )
    try:
        return _with_arrays(value_from_json(msgspec.json.decode(position.encode())))
    except (*MALFORMED_JSON, TypeError, ValueError) as error:
        raise FormatError(f"the recorded position in the data cannot be read: {error}") from error


def _methods(data: Any) -> tuple[str, str, str]:
    for methods in _METHODS:
        if all(callable(getattr(data, name, None)) for name in methods[:2]):
            return methods
    names = " nor ".join(f"{get} and {put}" for get, put, _ in _METHODS)
    raise StructureError(f"data= is a {type(data).__qualname__}, which has neither {names}")


# ------------------------------------------------------------------------- another number of processes


def _are_elastic(positions: Sequence[Any]) -> bool:
    return all(
        isinstance(position, dict) and [*position] == [_ELASTIC] and isinstance(position[_ELASTIC], int)
        for position in positions
    )


def _loss(positions: Sequence[Any], count: int) -> str:
    """Say which rows `count` processes would repeat or lose at these positions, as far as the positions tell."""
    if _are_elastic(positions):
        indices = [position[_ELASTIC] for position in positions]
        first, last = min(indices), max(indices)
        return (
            f"Its processes were not at the same example: going on from example {first} would repeat examples up to "
            f"{last - 1} that some processes have had, and going on from {last} would lose the others"
        )
    taken = [_taken(position, len(positions)) for position in positions]
    if any(number is None for number in taken):
        return (
            "They do not say which rows the processes have had, so some would be repeated and others lost; the first "
            f"position is {positions[0]!r:.200}"
        )
    return _loss_of_parts([number or 0 for number in taken], count, is_strided=isinstance(positions[0], dict))


def _loss_of_parts(taken: Sequence[int], count: int, *, is_strided: bool) -> str:
    before, each = len(taken), taken[0]
    numbers = f"{each} each" if len({*taken}) == 1 else few([str(number) for number in taken])
    had = f"The processes have had {numbers} of the elements of their parts, {sum(taken)} in all"
    if not is_strided or not each or len({*taken}) > 1:
        return f"{had}; the parts of {count} processes are others, so some rows would be repeated and others lost"
    low, high = sorted((before * each, count * each))
    return (
        f"{had}. If process p has the elements p, p + {before}, p + {2 * before}, ..., {count} processes at the same "
        f"positions would {'repeat' if count < before else 'lose'} the elements {low} to {high - 1}"
    )


def _taken(position: Any, count: int) -> int | None:
    """Return how many elements of its part a process has had, if an iterator or a loader of Grain tells it."""
    if isinstance(position, dict):
        return position["next_index"] if [*position] == ["next_index"] else None
    if not isinstance(position, bytes):
        return None
    try:
        loader = msgspec.json.decode(position, type=_LoaderPosition)
    except msgspec.DecodeError:
        return None
    if f"shard_count={count}," not in loader.sampler:
        return None
    workers = (
        max(1, loader.worker_count) * count
    )  # of all processes; an index modulo this number is one of them
    return sum(index // workers + 1 for index in loader.last_seen_indices.values())


class _LoaderPosition(msgspec.Struct):
    """The position of a `DataLoader` of Grain: the last index that each of its workers has read."""

    last_seen_indices: dict[str, int]
    worker_count: int
    sampler: str


# ------------------------------------------------------------------------------------------- arrays

_ARRAY = "eformer.array"  # the only key of a dict that stands for an array


def _without_arrays(value: Any) -> Any:
    """Replace each array in a value by a dict of plain values."""
    if type(value) is dict:
        return {name: _without_arrays(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_arrays, value))
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and type(value) is torch.Tensor and value.device.type == "cpu"
    if not is_tensor and type(value) is not np.ndarray:
        return value
    array = value.numpy() if is_tensor else value
    if array.dtype.kind not in "biuf" or array.dtype.isbuiltin != 1:
        return value  # numpy cannot read back the names of other dtypes
    return {_ARRAY: ["torch" if is_tensor else "numpy", array.dtype.str, list(array.shape), array.tobytes()]}


def _with_arrays(value: Any) -> Any:
    """Restore the arrays of a value from their dicts."""
    if type(value) is dict and list(value) == [_ARRAY]:
        kind, dtype, shape, data = value[_ARRAY]
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        return _tensor(array) if kind == "torch" else array
    if type(value) is dict:
        return {name: _with_arrays(inner) for name, inner in value.items()}
    return type(value)(map(_with_arrays, value)) if type(value) in (list, tuple) else value


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    return import_module("torch").from_numpy(array)  # late: only positions of torch loaders have tensors
