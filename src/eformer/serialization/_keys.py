"""Keys as people write them: dotted, nothing escaped."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from eformer._engine.record.names import split_name, unescape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def dotted(name: str) -> str:
    """A leaf's name as the documents write keys."""
    return ".".join(unescape(part) for part in split_name(name))


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """The key of each leaf by its name; where dotted keys would be alike, the name, in which they are not."""
    keys = {name: dotted(name) for name in names}
    count = Counter(keys.values())
    return {name: key if count[key] == 1 else name for name, key in keys.items()}


def by_key(callback: Callable[[Any, str], Any] | None) -> Callable[[Any, str], Any] | None:
    """The caller's function, for who calls it with a leaf's name."""
    return None if callback is None else lambda array, name: callback(array, dotted(name))
