"""The documented serialization API, as thin functions over the engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer._engine.loading.dry_run import dry_run as dry_run
    from eformer.serialization import async_manager as async_manager
    from eformer.serialization import serialization as serialization
    from eformer.serialization import utils as utils

__all__ = ["async_manager", "dry_run", "serialization", "utils"]


def __getattr__(name: str) -> Any:
    # Late, so that importing one submodule does not import the others.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "dry_run":
        from eformer._engine.loading.dry_run import dry_run

        return dry_run
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(__all__)
