"""Models of Keras 3 on JAX."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Keras:
    """Stores what `model.get_state_tree()` returns: variables of the model, its optimizer and its metrics."""

    def is_imported(self) -> bool:
        return hasattr(sys.modules.get("keras"), "Model")

    def owns(self, kind: type) -> bool:
        return issubclass(kind, sys.modules["keras"].Model)

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        return [model.get_state_tree() for model in modules]

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        if not in_place:
            raise StructureError("a Keras model can only be loaded in place: load(..., into=model)")
        for model, state in zip(modules, states, strict=True):
            model.set_state_tree(state)
        return modules
