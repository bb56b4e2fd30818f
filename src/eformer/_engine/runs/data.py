"""Take the position out of an iterator over data, and put it back.

Grain's iterators have `get_state` and `set_state`; loaders of torchdata and datasets of Hugging Face have `state_dict`
and `load_state_dict`. A position is plain values, or bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from eformer._engine.record.values import is_recorded, value_from_json, value_to_json
from eformer.errors import LeafError, StructureError

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def position_of(data: Any) -> bytes:
    """Return the position of an iterator, as bytes."""
    get, _ = _methods(data)
    position = value_to_json(getattr(data, get)())
    if not is_recorded(position):
        raise LeafError(f"the position of a {type(data).__qualname__} cannot be stored: {position}")
    return msgspec.json.encode(position)


def set_position(data: Any, position: bytes) -> None:
    """Put an iterator to a position that `position_of` returned."""
    _, put = _methods(data)
    getattr(data, put)(value_from_json(msgspec.json.decode(position)))


def _methods(data: Any) -> tuple[str, str]:
    for pair in _PAIRS:
        if all(callable(getattr(data, name, None)) for name in pair):
            return pair
    names = " nor ".join(f"{get} and {put}" for get, put in _PAIRS)
    raise StructureError(f"data= is a {type(data).__qualname__}, which has neither {names}")
