"""Find out whether a server honours the conditions of requests, on which every commit depends."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eformer._engine.stores.objects import Objects

_WRONG = '"00000000000000000000000000000000"\n999999999999999999'  # an ETag and a generation that nothing has


def honours_conditions(objects: Objects, key: str) -> bool:
    """Tell whether a server refuses to write an object on a condition that does not hold.

    `key` is for an object that does not exist, and is removed again. This shows that conditions are looked at, not that
    they are atomic. Raise the error of a server that cannot be written to at all.
    """
    try:
        return _probe(objects, key)
    finally:
        with suppress(OSError):  # a lease of a save that never was: it runs out
            objects.delete([key])


def _probe(objects: Objects, key: str) -> bool:
    try:
        objects.put_if(key, b"1", None)
    except OSError:
        objects.put(key, b"1")  # if this works, conditions alone are refused
        return False
    return not objects.put_if(key, b"2", None) and not objects.put_if(key, b"3", _WRONG)
