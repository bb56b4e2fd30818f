"""The origin of a tree: the checkpoints that it was made from, and the rules that gave its leaves their names.

An origin is a small JSON object, which a reader may ignore:

    rules      book, version, sha256 and layout of the rules, and the numbers of the model's config.json
    parents    path, save_id and digest of each checkpoint that the tree was made from; of a merge also its weight, or
               "as": "lora"
    left_out   the number of parents that are not recorded, because there are too many
    tool       the call that wrote it: "load", "convert", "export" or "merge"
    version    the version of eformer
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.text import count, shortened
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
    """Return the origin of a tree that is made now.

    A few long paths or a long configuration must not fail a save: the rules go first, then the first parents.
    """
    known = {"rules": dict(rules)} if rules else {}
    made: Origin = {**known, "parents": list(parents), "tool": tool, "version": __version__}
    if _nbytes(made) > MOST_BYTES:
        made.pop("rules", None)
    if _nbytes(made) > MOST_BYTES:
        kept = _last_that_fit(parents, MOST_BYTES - _MOST_TEXT)
        made |= {"parents": kept, "left_out": len(parents) - len(kept)}
    return made


def _nbytes(value: Any) -> int:
    return len(msgspec.json.encode(value))


def _last_that_fit(parents: Sequence[Origin], most: int) -> list[Origin]:
    """Return as many of the last parents as fit into this many bytes."""
    kept: list[Origin] = []
    for parent in reversed(parents):
        most -= _nbytes(parent) + 1
        if most < 0:
            break
        kept.insert(0, parent)
    return kept


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


def parents_in(origin: Mapping[str, Any]) -> list[Origin]:
    """Return the recorded parents. Any program may have written the record."""
    found = origin.get("parents")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def origin_text(origin: Mapping[str, Any]) -> str:
    """Return the tool and the rules of an origin in one line, for display."""
    rules, tool = rules_in(origin), origin.get("tool")
    book = " ".join(str(rules[name]) for name in ("book", "version") if rules.get(name))
    by = f"{tool}, eformer {origin.get('version', '')}".rstrip() if isinstance(tool, str) and tool else ""
    return ", ".join(filter(None, [by, f"rules {book}" if book else ""])) or count(len(origin), "field")


def parent_lines(origin: Mapping[str, Any]) -> list[str]:
    """Return a line for each parent, for display: its path, its weight in a merge, its save and its digest."""
    lines = [_parent_text(parent) for parent in parents_in(origin)]
    left_out = origin.get("left_out")
    return [f"{left_out} earlier parents, not recorded", *lines] if _is_number(left_out) else lines


def _is_number(found: Any) -> bool:
    """Tell whether a value is a number that can be shown: a record may have an integer of a thousand digits."""
    return isinstance(found, float) or (isinstance(found, int) and abs(found) < 2**63)


def _parent_text(parent: Mapping[str, Any]) -> str:
    weight = parent.get("weight")
    named = (("as", "as"), ("save", "save_id"), ("digest", "digest"))
    facts = [
        str(parent.get("path") or "a checkpoint whose path is not recorded"),
        f"weight {weight:.6g}" if _is_number(weight) else "",
        *(f"{label} {parent[name]}" for label, name in named if parent.get(name)),
    ]
    return shortened(", ".join(filter(None, facts)), 2 * _MOST_TEXT)
