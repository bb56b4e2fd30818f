"""Read the configuration of a model beside its weights: config.json, as Hugging Face and others write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer._engine.record.values import parse_lenient
from eformer._engine.stores.base import read_whole

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store

_MOST_CONFIG = 2**26  # bytes


def model_config(store: Store) -> dict[str, Any]:
    """Return config.json of a directory; an empty dict if it has none.

    Raise FormatError for a file that is not a configuration, and PermissionError for an unreadable file.
    """
    return read_config(store, "config.json")


def read_config(store: Store, file: str) -> dict[str, Any]:
    """Return a configuration in a directory; an empty dict if the directory has no such file."""
    try:
        data, _ = read_whole(store, file, _MOST_CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return parse_lenient(data, dict[str, Any], f"{store.path_to(file)} is not a configuration")
