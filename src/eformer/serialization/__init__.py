"""Front door 1: the documented serialization API, as thin functions over the engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer.checkpoint import dry_run as dry_run

__all__ = ["dry_run"]


def __getattr__(name: str) -> Any:
    # Late: a submodule may be imported without what this needs.
    if name != "dry_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer.checkpoint import dry_run

    return dry_run
