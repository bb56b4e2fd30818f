"""The engine: trees to named leaves, leaves to bytes, bytes to stable storage, and back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer.checkpoint._nodes import register_node as register_node

__all__ = ["register_node"]

_HOME = {"register_node": "_nodes"}


def __getattr__(name: str) -> Any:
    # Late, because some of these modules import jax, and what only reads files should start without it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
