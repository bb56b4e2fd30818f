"""Modules, optimizers and states of flax NNX.

Tests: tests/models/test_nnx.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.trees.nodes import at, nested
from eformer._engine.trees.shardings import AnnotatedShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jax.sharding import PartitionSpec

    _Flat = dict[tuple[Any, ...], Any]


class Nnx:
    """Stores the value of every variable under the path to it.

    Shared variables are stored once, and are shared again after a load. Static attributes and metadata of variables,
    such as names of axes for partitioning, come from the module that is loaded into. The abstract variables of
    `nnx.eval_shape` are placed by the names of axes in their metadata.
    """

    def is_imported(self) -> bool:
        return "flax.nnx" in sys.modules

    def owns(self, kind: type) -> bool:
        nnx = _nnx()
        return issubclass(kind, (nnx.Pytree, nnx.State, nnx.Variable))

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        return [nested(values) for values in _values(_flat_states(modules))]

    def transient(self, module: Any) -> Sequence[str]:
        return ()

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        nnx = _nnx()
        replaced = [
            {path: _replaced(old, at(state, path)) for path, old in flat.items()}
            for flat, state in zip(_flat_states(modules), states, strict=True)
        ]
        if in_place:
            for module, flat in zip(modules, replaced, strict=True):
                _update(module, flat)
            return modules
        graphs = {number: module for number, module in enumerate(modules) if isinstance(module, nnx.Pytree)}
        flat = {(number, *path): leaf for number in graphs for path, leaf in replaced[number].items()}
        merged = nnx.merge(nnx.split(graphs)[0], nnx.from_flat_state(flat)) if graphs else {}
        return [
            merged[number] if number in graphs else _built(module, replaced[number])
            for number, module in enumerate(modules)
        ]


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _flat_states(modules: Sequence[Any]) -> list[_Flat]:
    """Return the variables of each module by path. The first module has the variables that several share."""
    nnx = _nnx()
    flat: list[_Flat] = [{} for _ in modules]
    graphs = {number: module for number, module in enumerate(modules) if isinstance(module, nnx.Pytree)}
    if graphs:
        for (number, *path), leaf in nnx.to_flat_state(nnx.state(graphs)):
            flat[number][tuple(path)] = leaf
    for number, module in enumerate(modules):
        if isinstance(module, nnx.State):
            flat[number] = dict(nnx.to_flat_state(module))
        elif isinstance(module, nnx.Variable):
            flat[number] = {(): module}
    return flat


def _values(flats: Sequence[_Flat]) -> Iterable[_Flat]:
    """Return the values of variables. Abstract values get the axes that the metadata of their variables name.

    If any variable names axes, a variable without names is replicated, as in flax itself.
    """
    specs = [{path: _axes(leaf) for path, leaf in flat.items()} for flat in flats]
    is_annotated = any(spec for by_path in specs for spec in by_path.values())
    for flat, by_path in zip(flats, specs, strict=True):
        values = {path: _value(leaf) for path, leaf in flat.items()}
        axes = {path: spec for path, spec in by_path.items() if is_annotated and spec is not None}
        yield values | {path: AnnotatedShape(values[path], spec) for path, spec in axes.items()}


def _axes(leaf: Any) -> PartitionSpec | None:
    """Return the axes of a mesh for an abstract variable that has no sharding; None for other leaves."""
    value = _value(leaf)
    if not isinstance(value, jax.ShapeDtypeStruct) or value.sharding is not None or value is leaf:
        return None
    if isinstance(leaf.get_metadata().get("out_sharding"), jax.sharding.Sharding):
        return None  # it names devices, not only axes
    spec: PartitionSpec = _nnx().get_partition_spec(leaf).get_raw_value()
    return spec


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, _nnx().Variable) else leaf


def _replaced(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, _nnx().Variable) else value


def _update(module: Any, flat: _Flat) -> None:
    nnx = _nnx()
    if isinstance(module, nnx.Variable):
        module.update_from_state(flat[()])
    elif isinstance(module, nnx.State):
        module.update(nnx.from_flat_state(flat))
    else:
        nnx.update(module, nnx.from_flat_state(flat))


def _built(module: Any, flat: _Flat) -> Any:
    """Return a new state, or a new variable on its own."""
    nnx = _nnx()
    return flat[()] if isinstance(module, nnx.Variable) else nnx.from_flat_state(flat)
