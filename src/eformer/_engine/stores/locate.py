"""Find the store that a path or a URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.stores.base import Store

# The stores that are not on this machine's disk, by the scheme of their URLs.
_BY_SCHEME: dict[str, Callable[[str], Store]] = {"memory": MemoryStore}


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store of a directory, which need not exist yet."""
    scheme, is_url, _ = os.fspath(path).partition("://")
    if is_url and scheme in _BY_SCHEME:
        return _BY_SCHEME[scheme](os.fspath(path))
    return LocalStore(local_path(path))


def locate(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of a directory and ""; or, for anything else, the store it would be in and its name there."""
    store = store_at(path)
    return (store, "") if store.is_there() else store.parent()


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that names the same place, whatever the current directory is later."""
    where = store_at(path).local_path()
    return os.fspath(path) if where is None else str(where.absolute())


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine, for a path that may begin with "~" or be a file:// URL.

    Refuse any other URL, which would quietly name a directory of this machine.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty")
    if is_file_url(text):
        return Path(path_of_file_url(text))
    if "://" in text:
        raise ValueError(f"{path}: only local paths are supported so far")
    return Path(with_home(text))


def with_home(path: str) -> str:
    """Return a path with its leading "~" or "~user" replaced as a shell does: a name that is not a user stays."""
    return os.path.expanduser(path)  # pathlib raises for a name that is not a user


def is_file_url(path: str) -> bool:
    return path.startswith("file:/")  # pathlib turns file:///x into file:/x, which is refused later


def path_of_file_url(url: str) -> str:
    """Return the absolute path of this machine that a file:// URL names, decoded as RFC 8089 says."""
    if not url.startswith(("file:///", "file://localhost/")):
        raise ValueError(f"{url!r} is not a local path: expected file:///absolute/path")
    return os.fsdecode(unquote_to_bytes(url.removeprefix("file://").removeprefix("localhost")))
