"""JSON that may be wrong on purpose: keys that occur twice, literals that JSON lacks, documents within strings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Literal:
    """Text that is written as it is."""

    text: str


@dataclass
class Embedded:
    """A document in a string of another."""

    content: Any


@dataclass
class Pairs:
    """An object with a pair more, whose key it already has."""

    content: dict[str, Any]
    also: tuple[str, Any]


def parse(text: str | bytes) -> Any:
    """Parse JSON, with the documents in its strings. Raises ValueError or RecursionError."""
    content = json.loads(text)
    embeds = b'"{' in text or b'"[' in text if isinstance(text, bytes) else '"{' in text or '"[' in text
    return _opened(content) if embeds else content


def _opened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _opened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    if isinstance(value, str) and value[:1] in ("{", "[") and value[-1:] in ("}", "]"):
        try:
            return Embedded(_opened(json.loads(value)))
        except (ValueError, RecursionError):
            return value
    return value


def written(value: Any) -> str:
    """Write a document without spaces. Raises RecursionError."""
    try:
        return json.dumps(value, separators=(",", ":"), default=_embedded)
    except TypeError:
        return _written(value)


def _embedded(value: Any) -> str:
    if isinstance(value, Embedded):
        return written(value.content)
    raise TypeError


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, Pairs):
        return f"{_written(value.content)[:-1]},{json.dumps(value.also[0])}:{_written(value.also[1])}}}"
    if isinstance(value, Literal):
        return value.text
    return json.dumps(written(value.content) if isinstance(value, Embedded) else value)


Slot = tuple[Any, Any]
"""A container and the key or the index of a value in it."""


def slots(document: Any) -> list[Slot]:
    """List the places of all values in a document."""
    found: list[Slot] = []
    left = [document]
    while left:
        one = left.pop()
        if isinstance(one, (Embedded, Pairs)):
            left.append(one.content)
        elif isinstance(one, (dict, list)):
            keys = one if isinstance(one, dict) else range(len(one))
            found += [(one, key) for key in keys]
            left += one.values() if isinstance(one, dict) else one
    return found
