"""The origin of a tree: the checkpoints that it was made from, and the rules that gave its leaves their names.

An origin is a small JSON object, which a reader may ignore:

    rules      book, version, sha256 and layout of the rules, and the numbers of the model's config.json
    parents    path, save_id and digest of each checkpoint that the tree was made from
    tool       the call that wrote it: "load", "convert" or "export"
    version    the version of eformer
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.text import count, few, shortened
from eformer._version import __version__

Origin = dict[str, Any]

MOST_BYTES = 2**14
_MOST_CONFIG = 2**13  # bytes of a configuration
_MOST_ITEMS = 128  # of a list: a type for each layer
_MOST_KEYS = 200  # of an object
_MOST_TEXT = 500  # characters
_MOST_LEVELS = 3  # of a configuration inside a configuration, such as text_config.rope_scaling
_SCALARS = (str, int, float, bool, type(None))
_BOOK = re.compile(r"[\w-]+/[\w-]+", re.ASCII)
_LABELS = ("id2label", "label2id")  # of classifiers: long, and no numbers of a shape


def checked_origin(given: Mapping[str, Any] | None) -> Origin | None:
    """Return an origin as JSON. Raise ValueError if it is not JSON or too long; None for an empty one."""
    if not given:
        return None
    try:
        data = msgspec.json.encode(dict(given))
        found: Origin = msgspec.json.decode(data, type=dict[str, Any])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"origin= is not a JSON object: {error}; pass LoadReport.origin, or a dict of plain values"
        ) from error
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"origin= has {len(data):,} bytes as JSON, expected at most {MOST_BYTES:,}; leave long fields out, and "
            "pass other facts as metadata="
        )
    return found


def new_origin(tool: str, parents: Sequence[Origin], rules: Mapping[str, Any] | None = None) -> Origin:
    """Return the origin of a tree that is made now."""
    known = {"rules": dict(rules)} if rules else {}
    made: Origin = {**known, "parents": list(parents), "tool": tool, "version": __version__}
    for field in ("rules", "parents"):  # a few long paths or a long configuration must not fail a save
        if len(msgspec.json.encode(made)) > MOST_BYTES:
            made.pop(field, None)
    return made


def parent_of(path: str, save_id: str, digest: str) -> Origin:
    """Describe a checkpoint that a tree is made from. Other programs have no save ids and no digests."""
    known = {"save_id": save_id, "digest": "" if digest == NO_DIGEST else digest}
    return {"path": shortened(path, _MOST_TEXT), **{name: text for name, text in known.items() if text}}


def published_parent(parent: Mapping[str, Any]) -> Origin:
    """Return the description of a parent without its path, unless everybody can read that path."""
    is_public = str(parent.get("path", "")).startswith("hf://")
    return {name: value for name, value in parent.items() if is_public or name != "path"}


def rules_in(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the rules; an empty dict without one."""
    found = origin.get("rules")
    return found if isinstance(found, dict) else {}


def book_in(origin: Mapping[str, Any]) -> str:
    """Return the book of rules that gave the leaves their names, such as "qwen3/maxtext"; "" if none is recorded.

    A record comes with a checkpoint from anywhere: a path, or the text of rules, is no book.
    """
    found = rules_in(origin).get("book")
    return found if isinstance(found, str) and _BOOK.fullmatch(found) else ""


def config_in(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded configuration of the model; an empty dict without one."""
    found = rules_in(origin).get("config")
    return found if isinstance(found, dict) else {}


def trimmed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars and the short lists of a configuration, in at most a few KB: the longest entries go first."""
    found = {key: value for key, given in config.items() if (value := _trimmed(key, given, 1)) is not None}
    sizes = {key: len(msgspec.json.encode({key: value})) for key, value in found.items()}
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sum(sizes.values()) <= _MOST_CONFIG:
            break
        del found[key], sizes[key]
    return found


def _trimmed(key: str, value: Any, level: int) -> Any:
    """Return a value of a configuration; None if it is left out."""
    if isinstance(value, _SCALARS):
        return None if isinstance(value, str) and len(value) > _MOST_TEXT else value
    if isinstance(value, (list, tuple)):
        is_short = len(value) <= _MOST_ITEMS and all(isinstance(item, _SCALARS) for item in value)
        return list(value) if is_short else None
    if not isinstance(value, Mapping) or level == _MOST_LEVELS or key in _LABELS or len(value) > _MOST_KEYS:
        return None
    return {
        name: kept for name, inner in value.items() if (kept := _trimmed(name, inner, level + 1)) is not None
    }


def origin_text(origin: Mapping[str, Any]) -> str:
    """Return an origin in one line, for display."""
    rules = rules_in(origin)
    book = " ".join(str(rules[name]) for name in ("book", "version") if rules.get(name))
    found = origin.get("parents")
    parents = (
        [str(one.get("path", "")) for one in found if isinstance(one, dict)]
        if isinstance(found, list)
        else []
    )
    parts = [f"rules {book}" if book else "", f"from {few(parents)}" if any(parents) else ""]
    return ", ".join(filter(None, parts)) or count(len(origin), "field")
