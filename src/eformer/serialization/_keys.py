"""Turn leaf names into the keys of the documented API: dotted, without escapes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from eformer._engine.record.names import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Map names to dotted keys; a name whose dotted key would be ambiguous maps to itself."""
    keys = {name: readable(name) for name in names}
    count = Counter(keys.values())
    return {name: key if count[key] == 1 else name for name, key in keys.items()}


def by_key(callback: Callable[[Any, str], Any] | None) -> Callable[[Any, str], Any] | None:
    """Wrap a callback that takes a dotted key, so that it can be called with a leaf's name."""
    return None if callback is None else lambda array, name: callback(array, readable(name))
