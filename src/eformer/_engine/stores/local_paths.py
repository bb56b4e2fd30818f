"""Understand paths as people write them: with "~", and as file:// URLs."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes

from eformer._engine.stores.urls import is_bucket_url, refuse_cut_url


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine, for a path that may begin with "~" or be a file:// URL.

    Refuse any other URL, which would quietly name a directory of this machine.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty")
    if is_file_url(text):
        return Path(path_of_file_url(text))
    if is_bucket_url(text):
        raise ValueError(f"{path} is in a bucket, and this works in local directories only; copy it first")
    if "://" in text:
        raise ValueError(
            f"{path} is a URL of a kind that is not known here; buckets are s3://, gs:// and az://, local files are "
            "file:// or a path"
        )
    refuse_cut_url(text)
    found = Path(with_home(text))
    return found.absolute() if text.startswith("./~") else found  # pathlib drops the dot, and "~" is a home


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
