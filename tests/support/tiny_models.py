"""The tiny models of `tests/rules/models`, which the classes of transformers made, and the books that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file

from eformer import checkpoint
from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer._engine.record.rename import rules_from
from eformer._engine.record.rule_books import books

if TYPE_CHECKING:
    import numpy as np

    from eformer._engine.record.planned import LazyArray

MODELS = Path(__file__).parent.parent / "rules" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text("utf-8"))
    return found


def leaves_of(name: str) -> dict[str, np.ndarray[Any, Any]]:
    return load_file(MODELS / name / "model.safetensors")


def layouts_of(name: str) -> list[str]:
    """List the layouts of the model's family."""
    kind = config_of(name)["model_type"]
    families = [each for each in books() if kind in each.model_types]
    return list((families or [each for each in books() if not each.model_types])[0].layouts)


CASES = [(name, layout) for name in NAMES for layout in layouts_of(name)]


def arrays_of(view: checkpoint.View) -> dict[str, LazyArray]:
    return {name: StoredLeaf(view, name, entry) for name, entry in view.tree.leaves.items()}


def read(array: LazyArray) -> np.ndarray[Any, Any]:
    return array.read(Box.whole(array.shape))


def laid_out(name: str, layout: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the leaves of a model in a layout; values that a step changes are float32."""
    with checkpoint.open(MODELS / name) as view:
        renamed = rules_from(layout).apply(arrays_of(view), (), config_of(name))
        return {leaf: read(array) for leaf, array in renamed.arrays.items()}
