"""Import packages that only an extra of eformer-checkpoint installs, or name the extra that is missing.

Tests: tests/package/test_extras.py.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def import_extra(module: str, extra: str, user: str) -> Any:
    """Import a module; if that fails, raise an ImportError that says `user` needs it, and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(module, extra, user) from error


def require_extra(module: str, extra: str, user: str) -> None:
    """Raise an ImportError that names the extra if the module is not installed, without importing it."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise _missing(module, extra, user) from error
    if spec is None:
        raise _missing(module, extra, user)


def _missing(module: str, extra: str, user: str) -> ImportError:
    package = module.partition(".")[0]
    return ImportError(
        f"{user} the package {package}: pip install 'eformer-checkpoint[{extra}]'", name=package
    )
