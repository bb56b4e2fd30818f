"""Turn the metadata of a save into JSON: numbers on devices become plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.record.text import few
from eformer._engine.record.values import is_recorded, value_to_json
from eformer.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Mapping


def metadata_to_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as JSON. Arrays without axes become plain numbers. One error names every key that cannot be
    stored."""
    recorded: dict[str, Any] = {}
    problems = []
    for name, value in dict(metadata or {}).items():
        try:
            recorded[name] = _recorded(name, value)
        except LeafError as error:
            problems.append(f"metadata {name!r}: {error}")
    if problems:
        raise LeafError(few(problems))
    return recorded


def _recorded(name: object, value: Any) -> Any:
    if type(name) is not str:
        raise LeafError(f"a key is text, not a {type(name).__name__}")
    json = value_to_json(_plain(value))
    if not is_recorded(json):
        raise LeafError(f"a {type(value).__name__} cannot be stored; use plain values")
    return json


def _plain(value: Any) -> Any:
    """Return a value with plain numbers in place of arrays without axes and of numpy's scalars."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _number(value)
    return value


def _number(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        raise LeafError("a traced value has no number; save outside of jit, grad and vmap")
    if array.shape or not isinstance(array.dtype, np.dtype):
        raise LeafError(
            f"an array {array.dtype}{list(array.shape)} is not a number; save it as a leaf of the tree"
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise LeafError("the array was deleted, probably donated to a jitted function")
    return array.item()
