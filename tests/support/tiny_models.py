"""The tiny models of `tests/rules/models`, which the classes of transformers made, and the books that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from eformer._engine.record.rule_books import books

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
