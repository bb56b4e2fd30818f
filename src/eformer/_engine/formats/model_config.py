"""Read the configuration of a model beside its weights: config.json, as Hugging Face and others write it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from eformer._engine.record.values import parse_lenient
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.locate import store_at

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


ModelConfig = Mapping[str, Any] | str | os.PathLike[str]
"""A model's configuration: a dict, the path of its config.json, or a directory or URL that has one."""


def given_config(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration that a caller passed. Raise FileNotFoundError for a place without one."""
    if isinstance(config, Mapping):
        return dict(config)
    store, name = store_at(config), "config.json"
    if PurePath(os.fspath(config)).suffix == ".json":
        store, name = store.parent()
    found = read_config(store, name)
    if not found:
        raise FileNotFoundError(f"config= is {os.fspath(config)}, and there is no {name}")
    return found
