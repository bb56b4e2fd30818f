"""Checkpoints for JAX that load exactly as you saved them, or tell you which bytes are damaged."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eformer import _install  # noqa: F401  which warns of another package of this name
from eformer._version import __version__

if TYPE_CHECKING:
    from eformer import checkpoint as checkpoint
    from eformer import errors as errors
    from eformer import paths as paths
    from eformer import pytree as pytree
    from eformer import serialization as serialization

__all__ = ["__version__", "checkpoint", "errors", "paths", "pytree", "serialization"]


def __getattr__(name: str) -> Any:
    # Late, so that the import of one door does not wait for the others.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(__all__)
