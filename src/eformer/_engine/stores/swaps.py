"""Replace the index of a checkpoint in a bucket on a condition, and know whether that has happened.

Every commit depends on conditions, so servers that are not known to honour them are asked before the first save.
"""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from eformer._engine.stores.base import SwapError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Version
    from eformer._engine.stores.objects import Objects

_TRIES = 8  # of a put whose outcome is not known
_WRONG = '"00000000000000000000000000000000"\n999999999999999999'  # an ETag and a generation that nothing has


def swap_index(objects: Objects, key: str, data: bytes, expected: Version | None) -> None:
    """Replace an object if it is still the version that is expected; None: if there is none.

    Raise SwapError if it is not. After a refusal or an error only the object itself can tell what has happened.
    """
    for attempt in itertools.count(1):
        problem: OSError | None = None
        try:
            if _swap(objects, key, data, expected):
                return
        except OSError as error:
            problem = error
        there = read_if_there(objects, key)
        if there is not None and there[0] == data:
            return
        is_unchanged = (there[1] if there else None) == expected
        if is_unchanged and problem is None and expected and not objects.compares_unquoted:
            objects.compares_unquoted = True
        elif problem is None or not is_unchanged:
            raise SwapError(f"{objects.path_to(key)} is not the one that was read")
        elif attempt >= _TRIES:
            raise problem
        else:
            time.sleep(min(2.0, 0.025 * 2**attempt))


def _swap(objects: Objects, key: str, data: bytes, expected: Version | None) -> bool:
    """Return False if the object is another version. An error leaves it open whether it was replaced."""
    if not objects.is_unconditional:
        return objects.put_if(key, data, expected)
    there = objects.find(key)
    if (there.version if there else None) != expected:
        return False
    objects.put(key, data)
    if bytes(objects.read(key)[0]) != data:
        raise OSError(f"{objects.path_to(key)} is not what was written: somebody else saves here, too")
    return True


def read_if_there(objects: Objects, key: str) -> tuple[bytes, Version] | None:
    try:
        data, found = objects.read(key)
    except FileNotFoundError:
        return None
    return bytes(data), found.version


def honours_conditions(objects: Objects, key: str) -> bool:
    """Tell whether a server refuses to write an object on a condition that does not hold.

    `key` is for an object that does not exist, and is removed again. This shows that conditions are looked at, not that
    they are atomic. Raise the error of a server that cannot be written to at all.
    """
    try:
        objects.put_if(key, b"1", None)
    except OSError:
        objects.put(key, b"1")  # if this works, conditions alone are refused
        return False
    else:
        return not objects.put_if(key, b"2", None) and not objects.put_if(key, b"3", _WRONG)
    finally:
        with suppress(OSError):  # a lease of a save that never was: it runs out
            objects.delete([key])
