"""Models of Keras 3 on JAX.

Tests: tests/frameworks/test_keras.py.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from eformer._engine.trees.nodes import at, nested
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    _Path = tuple[str, ...]


class Keras:
    """Stores the variables of a model, its optimizer and its metrics, in the groups of `model.get_state_tree()`.

    Keras numbers layers without a name through the whole program: the first model is `sequential`, with `dense` and
    `dense_1`, the next is `sequential_1`, with `dense_2` and `dense_3`. Here the numbers begin anew in each model, so
    that a checkpoint of one model fits its twin.
    """

    def is_imported(self) -> bool:
        return hasattr(sys.modules.get("keras"), "Model")

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["keras"].Model)

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        return [nested({path: variable.value for path, variable in _variables(m).items()}) for m in modules]

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        if not in_place:
            raise StructureError(
                "a Keras model can only be loaded in place: pass into=model instead of like="
            )
        for model, state in zip(modules, states, strict=True):
            for path, variable in _variables(model).items():
                variable.assign(at(state, path))
        return modules

    def transient(self, model: Any) -> Sequence[str]:
        """Name the metrics: Keras makes them at the first batch of training, and resets them at each epoch."""
        return ("metrics_variables",)


def _variables(model: Any) -> dict[_Path, Any]:
    """Return the variables of a model by group and path."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer and model.built and not optimizer.built:
        optimizer.build(model.trainable_variables)  # as the first step of training does
    groups = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": optimizer.variables if optimizer else [],
        "metrics_variables": model.metrics_variables,
    }
    automatic = {_automatic_name(part) for part in (*model._flatten_layers(), *model.metrics, optimizer)}
    paths = _numbered_from_the_start(
        [tuple(variable.path.split("/")) for variables in groups.values() for variable in variables],
        automatic | {"seed_generator"},
    )
    weights = {"_".join(path): "_".join(new) for path, new in paths.items()}
    found: dict[_Path, Any] = {}
    for group, variables in groups.items():
        for variable in variables:
            *outer, last = paths[tuple(variable.path.split("/"))]
            if group == "optimizer_variables":
                last = _slot(last, weights)
            if (group, *outer, last) in found:
                raise StructureError(
                    f"two variables of the model are called {variable.path}: name its layers"
                )
            found[group, *outer, last] = variable
    return found


def _numbered_from_the_start(paths: Iterable[_Path], automatic: set[str]) -> dict[_Path, _Path]:
    """Number the parts with an automatic name anew below each parent, in their order; the number 0 is left out."""
    numbers: dict[tuple[_Path, str], set[int]] = defaultdict(set)
    split: dict[str, tuple[str, int]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            name, number = split.setdefault(part, _split(part))
            if name in automatic:
                numbers[path[:depth], name].add(number)
    ranks = {key: {n: rank for rank, n in enumerate(sorted(found))} for key, found in numbers.items()}

    def renumbered(parent: _Path, part: str) -> str:
        name, number = split[part]
        rank = ranks[parent, name][number] if name in automatic else None
        return part if rank is None else f"{name}_{rank}" if rank else name

    return {path: tuple(renumbered(path[:i], part) for i, part in enumerate(path)) for path in paths}


def _split(part: str) -> tuple[str, int]:
    """Split dense_2 into dense and 2; the number of dense is 0."""
    match = re.fullmatch(r"(.+?)_([1-9]\d*)", part)
    return (match[1], int(match[2])) if match else (part, 0)


def _automatic_name(thing: Any) -> str:
    """Return the name that Keras gives to objects of this class, before the number."""
    name = re.sub(r"\W+", "", type(thing).__name__)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _slot(name: str, weights: dict[str, str]) -> str:
    """Rename a variable of an optimizer that is named after a weight, such as sequential_1_dense_2_kernel_momentum."""
    cuts = [match.start() for match in re.finditer("_", name)]
    weight = next((name[:cut] for cut in reversed(cuts) if name[:cut] in weights), None)
    return name if weight is None else weights[weight] + name[len(weight) :]
