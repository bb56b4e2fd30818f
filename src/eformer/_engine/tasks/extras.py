"""Import packages that only an extra of eformer installs, or tell which extra is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module; if that fails, raise an ImportError that says `what` needs it, and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} the package {package}: pip install 'eformer[{extra}]'", name=package
        ) from error
