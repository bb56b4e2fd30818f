"""Keys as people write them: dotted, nothing escaped, with or without the prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer.checkpoint._leaf import split_name, unescape

if TYPE_CHECKING:
    from collections.abc import Callable


def dotted(name: str) -> str:
    """A leaf's name as the documents write keys."""
    return ".".join(unescape(part) for part in split_name(name))


def by_key(callback: Callable[[Any, str], Any] | None) -> Callable[[Any, str], Any] | None:
    """The caller's function, for who calls it with a leaf's name."""
    return None if callback is None else lambda array, name: callback(array, dotted(name))


def without_prefix(shardings: Any, prefix: str | None) -> Any:
    """The same shardings, whose keys may begin with the prefix of the tree, flat or nested, or may not."""
    if not prefix or not isinstance(shardings, dict):
        return shardings
    if set(shardings) == {prefix} and isinstance(shardings[prefix], dict):
        return shardings[prefix]
    start = f"{prefix}."
    return {k.removeprefix(start) if isinstance(k, str) else k: value for k, value in shardings.items()}
