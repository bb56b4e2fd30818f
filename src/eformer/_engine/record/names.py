"""Escape, join and split the names of leaves, and turn them into paths."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from eformer._engine.record.lazy import lazy_property
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# ---------------------------------------------------------------------------------------------- names
#
# A leaf's name is its path, parts joined by ".". Each part is escaped so that joining loses nothing
# and so that a part can be a directory: no dots (hence no "..", no ".zarray"), no separators, no
# control characters, never empty.
#
#   %XX       one of the characters below            %uXXXX    a lone surrogate, which UTF-8 lacks
#   %_        an empty part                          %+int     the type of a key that reads like a sibling
#   %#1       after that, a number for keys that are still alike
#   %-        (paths only) continues in the next part  %       alone: the tree is one bare leaf

_UNSAFE = re.compile(r"[%./\\\x00-\x1f\x7f]|[\ud800-\udfff]")
_ESCAPE = re.compile(r"%(?:([0-9A-F]{2})|u(D[89A-F][0-9A-F]{2}))")
_SIBLING = re.compile(r"(%\+\w+)?(%#[1-9][0-9]*)?$")

# Levels of a tree. JSON readers stop near a thousand levels, and a level of the tree takes up to three of JSON.
MAX_DEPTH = 250

BARE_LEAF = "%"
_EMPTY = "%_"

# File systems allow 255 bytes; formats append something to the rest.
_MAX_COMPONENT_BYTES = 200

_MOST_HINTS = 8
_MOST_CANDIDATES = 5000


@lru_cache(2**12)  # names of leaves have most parts in common
def escape(part: str) -> str:
    """Escape one part of a name."""
    return _UNSAFE.sub(_escape_character, part) or _EMPTY


def escape_siblings(keys: Sequence[Any]) -> list[str]:
    """Escape the keys of one node's children. Keys that read the same, such as 1 and "1", stay different.

    If possible, the result does not depend on the order of the keys.
    """
    texts = list(map(str, keys))
    if len(set(texts)) == len(texts):
        return list(map(escape, texts))
    count, seen = Counter(texts), Counter[str]()
    parts = []
    for key, text in zip(keys, texts, strict=True):
        part = escape(text)
        if count[text] > 1 and type(key) is not str:
            part += "%+" + re.sub(r"\W", "_", type(key).__name__)
        parts.append(f"{part}%#{seen[part]}" if seen[part] else part)
        seen[part] += 1
    return parts


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"%{code:02X}" if code < 256 else f"%u{code:04X}"


def unescape(part: str) -> str:
    """Return the text of an escaped part."""
    if "%" not in part:
        return part
    text = _SIBLING.sub("", part)
    return "" if text == _EMPTY else _ESCAPE.sub(lambda m: chr(int(m[1] or m[2], 16)), text)


def join_name(escaped: Iterable[str]) -> str:
    """Join escaped parts to the name of a leaf."""
    return ".".join(escaped) or BARE_LEAF


def split_name(name: str) -> tuple[str, ...]:
    """Split the name of a leaf into its escaped parts."""
    return () if name == BARE_LEAF else tuple(name.split("."))


def readable(name: str) -> str:
    """Return a readable name: parts without escapes, joined by dots. Several leaves may read the same."""
    return name if "%" not in name else ".".join(map(unescape, split_name(name)))


def readable_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of a tree to distinct readable spellings.

    Names that read the same stay escaped. So do names whose spelling would be empty, unprintable or contain a percent
    sign: a spelling with a percent sign is always an escaped name.
    """
    spelled = {name: name for name in names}
    escaped = {name: readable(name) for name in spelled if "%" in name}
    times = Counter(escaped.values())
    for name, text in escaped.items():
        if times[text] == 1 and text not in spelled and _is_plain(text):
            spelled[name] = text
    return spelled


def _is_plain(text: str) -> bool:
    return bool(text) and "%" not in text and text.isprintable()


def name_to_path(name: str) -> tuple[str, ...]:
    """Turn a name into path components: each fits a file system, and no two names share a path.

    Raise FormatError for a name that eformer never writes, so that a hostile name cannot lead out of the directory.
    """
    parts = name.split(".")
    for part in parts:
        if not _is_part(part) and name != BARE_LEAF:
            raise FormatError(f"{part[:64]!r} cannot be part of a leaf's name (in {name[:200]!r})")
    if len(name) * 4 <= _MAX_COMPONENT_BYTES:
        return tuple(parts)
    return tuple(piece for part in parts for piece in _fit(part))


def path_to_name(path: Iterable[str]) -> str:
    """Return the name of the leaf at a path. Raise FormatError for a path that no leaf has."""
    components = tuple(path)
    name = ".".join(components).replace("%-.", "")
    if name_to_path(name) != components:
        raise FormatError(f"{components} is not the path of a leaf")
    return name


@lru_cache(2**12)
def _is_part(part: str) -> bool:
    """Tell whether a name of eformer can have this part."""
    text = _SIBLING.sub("", part)
    return escape(unescape(text)) == text


def _fit(part: str) -> list[str]:
    """Split `part` into texts of at most `_MAX_COMPONENT_BYTES`; all but the last end in a continuation mark."""
    if len(part) * 4 <= _MAX_COMPONENT_BYTES:
        return [part]
    pieces, room = [""], _MAX_COMPONENT_BYTES
    for character in part:
        width = len(character.encode())
        if width > room:
            pieces[-1] += "%-"
            pieces.append("")
            room = _MAX_COMPONENT_BYTES
        pieces[-1] += character
        room -= width
    return pieces


def is_text(name: str) -> bool:
    """Tell whether a name is valid text. Names of files need not be UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_inside(path: str) -> bool:
    """Tell whether a path from a checkpoint stays below its directory, apart from links."""
    return "\0" not in path and not any(part in ("", ".", "..") for part in path.split("/"))


def with_nearest(names: Iterable[str], existing: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each of `names` with a hint for an error message: the most similar existing name, or nothing.

    Only the first few names get a hint, because each search takes milliseconds.
    """
    candidates = list(itertools.islice(existing, _MOST_CANDIDATES))
    for index, name in enumerate(names):
        found = difflib.get_close_matches(name, candidates, n=1) if index < _MOST_HINTS else []
        yield name, f" (nearest is {found[0]!r})" if found else ""


def nearest(name: str, existing: Iterable[str]) -> str | None:
    """Return the most similar existing name, if any is similar."""
    found = difflib.get_close_matches(name, list(itertools.islice(existing, _MOST_CANDIDATES)), n=1)
    return found[0] if found else None


# -------------------------------------------------------------------------------------------- look up


_WILDCARD = re.compile(r"[*?[]")
_WORD = re.compile(r"[^.*?[\]]+")  # between the dots and wildcards of a pattern


class Spellings:
    """Find leaves by their names, escaped or readable, and by the names of subtrees.

    The escaped spelling comes first, because it is never ambiguous.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._readable = {name: readable(name) for name in names}
        self._names: dict[str, list[str]] = {}
        for name, text in self._readable.items():
            self._names.setdefault(text, []).append(name)

    def leaves(self, spelling: str) -> list[str]:
        """Return the leaf of this name; all leaves that read like it, if no name is spelled exactly so."""
        return [spelling] if spelling in self._readable else self._names.get(spelling, [])

    def below(self, spelling: str) -> list[str]:
        """Return the leaves of a subtree."""
        return self._exact_subtrees.get(spelling) or self._readable_subtrees.get(spelling) or []

    @lazy_property
    def _exact_subtrees(self) -> dict[str, list[str]]:
        return _subtrees((name, name) for name in self._readable)

    @lazy_property
    def _readable_subtrees(self) -> dict[str, list[str]]:
        return _subtrees((text, name) for name, text in self._readable.items())

    def matching(self, pattern: str) -> list[str]:
        """Return the leaves whose names, in either spelling, match a pattern such as "layers.*.bias"."""
        if not _WILDCARD.search(pattern):
            return []
        return [
            name
            for name, text in self._readable.items()
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(text, pattern)
        ]

    def hint_for(self, pattern: str) -> str:
        """Return a hint with the pattern whose words are the nearest words of names, if it matches a leaf."""
        names = itertools.islice(self._names, _MOST_CANDIDATES)
        words = dict.fromkeys(word for text in names for word in text.split("."))
        near = _WORD.sub(lambda word: nearest(word[0], words) or word[0], pattern)
        return f" (nearest is {near!r})" if self.matching(near) else ""

    def known(self) -> Iterator[str]:
        """Yield the readable spellings of the leaves, each followed by the subtrees that contain it."""
        seen = set[str]()
        for text in self._names:
            while text and text not in seen:
                seen.add(text)
                yield text
                text = text.rpartition(".")[0]


def _subtrees(spelled: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the leaves of each subtree by its name, from pairs of a spelling and a leaf."""
    subtrees: dict[str, list[str]] = {}
    for text, name in spelled:
        while text := text.rpartition(".")[0]:
            subtrees.setdefault(text, []).append(name)
    return subtrees


def resolve(spellings: Iterable[str], names: Iterable[str]) -> tuple[dict[str, None], list[str]]:
    """Return the leaves that the spellings name, match or contain, in the order of `names`, and a problem for each
    spelling that finds no leaf or is ambiguous."""
    names = list(names)
    known, chosen, unknown, problems = Spellings(names), set[str](), [], []
    for spelling in spellings:
        found = known.leaves(spelling)
        if len(found) > 1:
            problems.append(ambiguous(spelling, found))
            continue
        found = found or list(dict.fromkeys([*known.below(spelling), *known.matching(spelling)]))
        if not found:
            unknown.append(spelling)
        chosen.update(found)
    patterns = {each: known.hint_for(each) for each in unknown[:_MOST_HINTS] if _WILDCARD.search(each)}
    problems += [
        f"no leaf is named {spelling!r}, matches it or lies below it{patterns.get(spelling) or hint}"
        for spelling, hint in with_nearest(unknown, known.known())
    ]
    return {name: None for name in names if name in chosen}, problems


def names_below(names: Iterable[str], root: str) -> dict[str, str]:
    """Return the names below the root of the leaves at or below it, by their whole names.

    An exact name of a subtree wins over subtrees whose names only read the same.
    """
    spelled = {name: name for name in names}
    for spellings in (spelled, {name: readable(name) for name in spelled}):
        found = {
            name: text[len(root) + 1 :] or BARE_LEAF
            for name, text in spellings.items()
            if text == root or text.startswith(f"{root}.")
        }
        if found:
            return found
    return {}


def refuse_root(names: Iterable[str], root: str) -> NoReturn:
    """Raise a MismatchError for a root without leaves below it."""
    known = dict.fromkeys(name.rpartition(".")[0] for name in map(readable, names))
    hint = next(with_nearest([root], filter(None, known)))[1]
    raise MismatchError([f"no leaf is named {root!r} or lies below it{hint}"], context="root")


def ambiguous(spelling: str, found: Sequence[str]) -> str:
    """Return a message that a spelling is ambiguous, with the names to write instead."""
    return f"{spelling!r} is ambiguous; write one of {', '.join(map(repr, found))}"


# A place in a tree during a walk: None at the root, else the parent's place and the step from there. It costs one tuple
# for each node, and becomes text only for an error.
Place = tuple["Place", Any] | None


def steps_to(place: Place) -> list[str]:
    """List the steps from the root to a place."""
    steps = []
    while place is not None:
        place, step = place
        steps.append(str(step))
    return steps[::-1]
