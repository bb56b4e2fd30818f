"""A step that is done, as the caller passes it to a run: its state, its position in the data, and other facts.

Tests: tests/engine/runs/test_run.py, tests/engine/runs/test_odd_uses.py.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._engine.formats.run_steps import RUN_METADATA
from eformer._engine.record.policies import metric_from
from eformer._engine.runs.positions import position_of
from eformer._engine.saving.snapshot import metadata_to_json
from eformer._engine.tasks.interrupts import called

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
    origin: Mapping[str, Any] | None = None
    taken: bytes | None = None

    def as_it_is(self) -> Done:
        """Return this step with its present position and facts, which the caller changes until it is saved."""
        return dataclasses.replace(self, metrics=dict(self.metrics or {}), taken=self.position())

    def state(self) -> Any:
        """Return the tree to save. Call `tree` if it is a function."""
        return called(self.tree) if isinstance(self.tree, _FUNCTIONS) else self.tree

    def position(self) -> bytes:
        """Return the position of this process in the data."""
        if self.taken is not None:
            return self.taken
        return b"" if self.data is None else position_of(self.data)

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
