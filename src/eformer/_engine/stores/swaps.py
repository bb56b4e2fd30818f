"""Replace the index of a checkpoint in a bucket, and know whether that has happened."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from eformer._engine.stores.base import SwapError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Version
    from eformer._engine.stores.objects import Objects

_TRIES = 8  # of a put whose outcome is not known


def swap_index(objects: Objects, key: str, data: bytes, expected: Version | None) -> None:
    """Replace an object if it is still the version that is expected; None: if there is none.

    Raise SwapError if it is not. After a refusal or an error only the object itself can tell what has happened.
    """
    for attempt in range(_TRIES):
        problem: OSError | None = None
        try:
            if objects.swap(key, data, expected):
                return
        except OSError as error:
            problem = error
        there = read_if_there(objects, key)
        if there is not None and there[0] == data:
            return
        version = there[1] if there else None
        if problem is None and version == expected and expected and objects.use_unquoted_etags():
            continue
        if problem is None or version != expected:
            raise SwapError(f"{objects.path_to(key)} is not the one that was read")
        if attempt == _TRIES - 1:
            raise problem
        time.sleep(min(2.0, 0.05 * 2**attempt))


def read_if_there(objects: Objects, key: str) -> tuple[bytes, Version] | None:
    try:
        data, found = objects.read(key)
    except FileNotFoundError:
        return None
    return bytes(data), found.version
