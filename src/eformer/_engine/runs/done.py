"""A step that is done, as the caller passes it to a run: its state, its position in the data, and other facts.

Grain's iterators over data have `get_state` and `set_state`; loaders of torchdata and datasets of Hugging Face have
`state_dict` and `load_state_dict`. A position is plain values, bytes, and arrays of numpy and torch, such as the state
of a random generator.

Tests: tests/engine/runs/test_data.py, tests/engine/runs/test_odd_uses.py, tests/frameworks/test_data.py.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from eformer._engine.formats.run_steps import RUN_METADATA
from eformer._engine.record.policies import metric_from
from eformer._engine.record.values import MALFORMED_JSON, is_recorded, value_from_json, value_to_json
from eformer._engine.saving.snapshot import metadata_to_json
from eformer._engine.tasks.interrupts import called
from eformer.errors import FormatError, LeafError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type(jax.jit(lambda: None)))


@dataclass(frozen=True, slots=True)
class Done:
    """The arguments of `Run.after`: the number of a step, its state or a function that returns it, data, and facts."""

    step: int
    tree: Any
    data: Any
    metrics: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None

    def state(self) -> Any:
        """Return the tree to save. Call `tree` if it is a function."""
        return called(self.tree) if isinstance(self.tree, _FUNCTIONS) else self.tree

    def position(self) -> bytes:
        """Return the position of this process in the data."""
        return b"" if self.data is None else _position_of(self.data)

    def facts(self, why: str) -> Callable[[Sequence[bytes]], Mapping[str, Any]]:
        """Return a function that makes the metadata of the run, as JSON, from the positions of all processes.

        The caller may change or donate its metrics after this call. Metrics on a device begin to be copied to the host,
        and the returned function waits for them. Raise ValueError for a metric that is not a number.
        """
        metrics = {name: _taken(name, value) for name, value in (self.metrics or {}).items()}
        return functools.partial(_facts, why, metrics)


def _facts(why: str, metrics: Mapping[str, Any], positions: Sequence[bytes]) -> Mapping[str, Any]:
    facts: dict[str, Any] = {"why": why}
    if metrics:
        facts["metrics"] = {
            name: metric_from(name, value.item() if isinstance(value, jax.Array) else value)
            for name, value in metrics.items()
        }
    if any(positions):
        facts["data"] = [position.decode() for position in positions]
    return metadata_to_json({RUN_METADATA: facts})


def _taken(name: str, value: Any) -> Any:
    """Return a metric as a number, or as an array on a device without waiting for its value."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__float__"):
        return metric_from(name, value)
    if not isinstance(value, jax.Array):
        return value  # perhaps a tensor of another library on a device: do not wait for it
    if value.size != 1:
        raise ValueError(f"metrics[{name!r}] has the shape {value.shape}; expected a single number")
    shards = value.addressable_shards
    if not shards:  # only other processes have it
        return value
    copy = jnp.copy(shards[0].data)  # the next step may be given the memory of this one
    copy.copy_to_host_async()
    return copy


# ----------------------------------------------------------------------------- position in the data

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def _position_of(data: Any) -> bytes:
    """Return the position of an iterator, as bytes."""
    get, _ = _methods(data)
    position = value_to_json(_without_arrays(called(getattr(data, get))))
    if not is_recorded(position):
        raise LeafError(f"the position of a {type(data).__qualname__} cannot be stored: {position}")
    return msgspec.json.encode(position)


def set_position(data: Any, facts: Mapping[str, Any], step: str, *, number: int, count: int) -> None:
    """Put the iterator of process `number` of `count` to the position that a step has recorded in its facts."""
    _, put = _methods(data)
    called(getattr(data, put), _parsed(_positions(facts, step, count)[number]))


def _positions(facts: Mapping[str, Any], step: str, count: int) -> Sequence[str]:
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
    if len(found) != count:
        raise ValueError(
            f"{step} has the positions of {len(found)} processes in the data, this job has {count}; resume without "
            "data= and place the iterators yourself"
        )
    return found


def _parsed(position: str) -> Any:
    try:
        return _with_arrays(value_from_json(msgspec.json.decode(position.encode())))
    except (*MALFORMED_JSON, TypeError, ValueError) as error:
        raise FormatError(f"the recorded position in the data cannot be read: {error}") from error


def _methods(data: Any) -> tuple[str, str]:
    for pair in _PAIRS:
        if all(callable(getattr(data, name, None)) for name in pair):
            return pair
    names = " nor ".join(f"{get} and {put}" for get, put in _PAIRS)
    raise StructureError(f"data= is a {type(data).__qualname__}, which has neither {names}")


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
