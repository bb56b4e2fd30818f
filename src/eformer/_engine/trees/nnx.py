"""Modules, optimizers and states of flax NNX."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Nnx:
    """Stores the value of every variable under the path to it.

    Variables that are shared are stored once, and are shared again after a load. Metadata of variables, such as names
    of axes for partitioning, and static attributes are those of the module that is loaded into.
    """

    def is_imported(self) -> bool:
        return "flax.nnx" in sys.modules

    def owns(self, kind: type) -> bool:
        nnx = _nnx()
        return issubclass(kind, (nnx.Pytree, nnx.State, nnx.Variable))

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        return [_nested(flat) for flat in _flat_states(modules)]

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        nnx = _nnx()
        replaced = [
            {path: _replaced(old, _at(state, path)) for path, old in flat.items()}
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


def _flat_states(modules: Sequence[Any]) -> list[dict[tuple[Any, ...], Any]]:
    """Return the variables of each module by path. A variable that several modules share is in the first of them."""
    nnx = _nnx()
    flat: list[dict[tuple[Any, ...], Any]] = [{} for _ in modules]
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


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return the values of variables in nested dicts."""
    if list(flat) == [()]:
        return _value(flat[()])
    tree: dict[Any, Any] = {}
    for (*path, last), leaf in flat.items():
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = _value(leaf)
    return tree


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, _nnx().Variable) else leaf


def _replaced(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, _nnx().Variable) else value


def _update(module: Any, flat: Mapping[tuple[Any, ...], Any]) -> None:
    nnx = _nnx()
    if isinstance(module, nnx.Variable):
        module.update_from_state(flat[()])
    elif isinstance(module, nnx.State):
        module.update(nnx.from_flat_state(flat))
    else:
        nnx.update(module, nnx.from_flat_state(flat))


def _built(module: Any, flat: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a new state, or a new variable on its own."""
    nnx = _nnx()
    return flat[()] if isinstance(module, nnx.Variable) else nnx.from_flat_state(flat)
