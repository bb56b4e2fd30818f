"""Rename leaves and move their elements by rules; `docs/guides/renaming.md` describes their syntax.

Rules are stages: the rules of a stage see the names that the stage before has made. Read backwards, the last stage
comes first.

Tests: tests/engine/record/test_rename.py, tests/engine/record/test_rename_axes.py.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating, name_of_dtype
from eformer._engine.record.lazy_arrays import Computed, stored_leaves
from eformer._engine.record.notation import AxisRule, is_notation, parse_let, parse_rule, without_comment
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.regex_rules import (
    RegexRule,
    parse_regex_rule,
    sides_of,
)
from eformer._engine.record.rule_books import find_book, is_layout, other_book
from eformer._engine.record.stages import ModelFacts, Renamed, RuleText, StageRenaming
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.expressions import Expression
    from eformer._engine.record.rule_books import Book

_Pair = tuple[str, str | None]

RenameRules = str | os.PathLike[str] | Mapping[str, str | None] | Iterable[str | os.PathLike[str] | _Pair]
"""A file of rules, their text, or the rules: a dict {pattern: name}, pairs, or lines. Steps may follow a name:
"layers.kernel | transpose". A rule without a name (None, "") drops the leaf. Files and texts in a list are stages."""


_Stage = tuple[RuleText, tuple[RegexRule | AxisRule, ...]]


@dataclass(frozen=True, slots=True)
class BookName:
    """The name of a layout, whose book depends on the model."""

    name: str


# ------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True, slots=True)
class RenamingRules:
    """Rules of one text or several, and the direction. Each text sees the names that the text before has made."""

    texts: tuple[RuleText | BookName, ...] = ()
    back: bool = False

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def stacks(self) -> bool:
        """Tell whether rules may join leaves."""
        return any(not isinstance(rule, RegexRule) or rule.stack for rule in self._all())

    @property
    def are_two_way(self) -> bool:
        """Tell whether some rules are written to be read in both directions."""
        return any(isinstance(rule, AxisRule) and rule.is_two_way for rule in self._all())

    def _all(self) -> Iterator[RegexRule | AxisRule]:
        for text in self.texts:
            for stage in text.stages if isinstance(text, RuleText) else ():
                yield from stage

    def of_model(self, numbers: Mapping[str, Any]) -> RenamingRules:
        """Return the rules with the books for a model in the place of names of layouts."""
        kind = numbers.get("model_type")
        kind = kind if isinstance(kind, str) else None
        texts = (parse_book(text.name, kind) if isinstance(text, BookName) else text for text in self.texts)
        return replace(self, texts=tuple(texts))

    def _in_order(self) -> list[_Stage]:
        """List the stages of all texts in the order in which they are applied."""
        stages = [(text, stage) for text in self.texts if isinstance(text, RuleText) for stage in text.stages]
        return stages[::-1] if self.back else stages

    def _notes(self, known: ModelFacts) -> Iterator[str]:
        """Yield a note for each book that is of another family of models."""
        kind = known.config.get("model_type")
        for book in self.books if isinstance(kind, str) else ():
            if other := other_book(book, str(kind)):
                yield f"config.json is of a model {kind!r}, whose rules {other!r} differ from {book.name!r}"

    @property
    def have_book(self) -> bool:
        """Tell whether a shipped book is among the texts."""
        return any(isinstance(text, BookName) or text.book for text in self.texts)

    @property
    def books(self) -> list[Book]:
        return [text.book for text in self.texts if isinstance(text, RuleText) and text.book]

    def matches(self, name: str) -> bool:
        """Tell whether a rule of the first stage may match a name."""
        known = ModelFacts(back=self.back)
        stages = self._in_order()
        if not stages:  # the name of a layout, which says nothing yet
            return True
        ((text, stage), *_) = stages
        return any(way.matches(name) for way in StageRenaming(stage, text, known, dict, {}).ways)

    def apply(
        self,
        arrays: Mapping[str, LazyArray],
        plain: Sequence[str] = (),
        numbers: Mapping[str, Any] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> Renamed:
        """Apply the rules to arrays and to the names of plain values. A single error lists all problems.

        numbers    the model's config.json
        shapes     the shapes of the new leaves, as far as they are known: of `like`
        dtypes     their dtypes, for leaves whose values change
        """
        known = ModelFacts(numbers or {}, dict(shapes or {}), dict(dtypes or {}), self.back)
        renamed = Renamed(dict(arrays), plain={name: name for name in plain})
        kept = dict.fromkeys([*arrays, *plain], "")
        stages = self.of_model(known.config)._in_order()
        own: dict[str, str] = {}
        for number, (text, stage) in enumerate(stages):
            shapes_of = cache(partial(_shapes_before, stages[number + 1 :], known))
            renaming = StageRenaming(stage, text, known, shapes_of, renamed.transforms)
            renamed = _joined(renamed, renaming.apply(renamed.arrays, dict.fromkeys(renamed.plain.values())))
            kept = renaming.still_kept(kept)
            is_first = number == 0 or stages[number - 1][0] is not text
            own = dict(renaming.kept) if is_first else renaming.still_kept(own)
            _require_matched(own, text, stages[number + 1 :], back=self.back)
        renamed.kept = [f"{name}{hint}" for name, hint in kept.items()]
        renamed.notes += self._notes(known)
        _set_dtypes(renamed, known)
        return renamed


def rules_from(given: RenameRules, *, back: bool = False) -> RenamingRules:
    """Parse rules in any form that a caller may pass. A string without line breaks and arrows is the name of a book if
    there is one, else a path."""
    if callable(given):
        raise TypeError("rename= is a function; expected rules: pairs of a pattern and a new name, or a file")
    if isinstance(given, (str, os.PathLike)):
        return RenamingRules((_named(given),), back)
    items: list[Any] = [*given.items()] if isinstance(given, Mapping) else [*given]
    return RenamingRules(tuple(_texts(items)), back)


def parse_rules(text: str, origin: str) -> RenamingRules:
    """Parse the rules of a file. A single error lists all lines that are not rules."""
    return RenamingRules((_parsed(text.splitlines(), origin, ""),))


def parse_book(name: str, model_type: str | None = None) -> RuleText:
    """Parse a shipped book: "FAMILY/LAYOUT", or the LAYOUT of a model type."""
    book = find_book(name, model_type)
    return replace(_parsed(book.text.splitlines(), book.name, f"{book.name}, "), book=book)


def _is_text(given: str) -> bool:
    return "\n" in given or "->" in given


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{os.fspath(path)} is not a text file of rules: {error}") from error
    except IsADirectoryError as error:
        shown = os.fspath(path) or "rename="
        raise FormatError(
            f"{shown} is a directory or empty; expected rules: the name of a book, a file, or their text"
        ) from error


def _texts(items: Sequence[Any]) -> Iterator[RuleText | BookName]:
    """Yield the texts among the items of a list. Lines in a row are one text."""
    for is_line, group in itertools.groupby(items, _is_line):
        if is_line:
            yield _parsed(list(group), "rename", "")
        else:
            yield from (_named(item, in_list=True) for item in group)


def _is_line(item: object) -> bool:
    """Tell whether an item of a list is a line or a pair, and not a text, a file or a book."""
    if not isinstance(item, str):
        return not isinstance(item, os.PathLike)
    words = item.strip()
    return "\n" not in item and ("->" in item or not words or words.startswith(("#", "---")) or "=" in item)


def _named(item: str | os.PathLike[str], *, in_list: bool = False) -> RuleText | BookName:
    """Return the rules of a text, a file or a book."""
    if isinstance(item, str) and _is_text(item):
        return _parsed(item.removeprefix("\ufeff").splitlines(), "rename", "")
    if isinstance(item, str) and is_layout(item):
        return parse_book(item) if "/" in item else BookName(item)
    try:
        text = _text_of(item)
    except FileNotFoundError:
        if isinstance(item, str) and not Path(item).suffix:
            return parse_book(item)  # which names the books near by
        raise
    return _parsed(text.splitlines(), os.fspath(item), f"{os.fspath(item)}, " if in_list else "")


def _parsed(lines: Sequence[object], origin: str, prefix: str) -> RuleText:
    """Parse lines; `prefix` stands before their numbers in messages."""
    stages: list[list[RegexRule | AxisRule]] = [[]]
    lets: dict[str, Expression] = {}
    places: dict[str, str] = {}
    problems = []
    for number, given in enumerate(lines, 1):
        where = f"{prefix}line {number}"
        try:
            found = _line(where, given)
        except (FormatError, re.error) as error:
            shown = given.strip() if isinstance(given, str) else str(given)
            problems.append(f"{where}, {shown[:100]}: {error}")
            continue
        if isinstance(found, tuple):
            lets[found[0]], places[found[0]] = found[1], where
        elif found == _STAGE:
            stages.append([])
        elif not isinstance(found, str):
            stages[-1].append(found)
    if problems:
        raise FormatError("\n  ".join([f"{origin} cannot be read as rules:", *problems]))
    if not any(stages):
        raise ValueError(f"{origin} has no rules; write one on each line: PATTERN -> NAME")
    return RuleText(tuple(tuple(rules) for rules in stages if rules), lets, places)


_STAGE = "---"


def _line(where: str, given: Any) -> RegexRule | AxisRule | tuple[str, Expression] | str:
    """Parse a line or a pair: a rule, a number with its name, or the text of a line between stages or of no rule."""
    if isinstance(given, str):
        line = without_comment(given)
        if not line or given.startswith(_STAGE):
            return _STAGE if given.startswith(_STAGE) else ""
        if let := parse_let(line):
            return let
        if is_notation(line):
            return parse_rule(where, line)
        return parse_regex_rule(where, *sides_of(given))
    pattern, name = sides_of(given)
    if isinstance(pattern, str) and isinstance(name, (str, type(None))):
        line = f"{pattern} -> {name or ''}".strip()
        if is_notation(line):
            return parse_rule(where, line)
    return parse_regex_rule(where, pattern, name)


# ------------------------------------------------------------------------------------------ applying


def _require_matched(kept: Mapping[str, str], text: RuleText, later: Sequence[_Stage], *, back: bool) -> None:
    """Refuse leaves that no stage of a book matches, behind its last stage."""
    if text.book and kept and not (later and later[0][0] is text):
        book = f"{text.book.name}, read from right to left," if back else text.book.name
        unmatched = [f"{name}: no rule of {book} matches{hint}" for name, hint in kept.items()]
        raise MismatchError(unmatched, context="rename")


class _Shaped(LazyArray):
    """An array that has a shape and no elements."""

    in_order = True
    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _shapes_before(stages: Sequence[_Stage], known: ModelFacts) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes that leaves must have before the stages that are still to come, if that can be told."""
    shapes: Mapping[str, tuple[int, ...]] = known.shapes
    undoing = replace(known, back=not known.back)
    for text, stage in reversed(stages) if shapes else ():
        try:
            renaming = StageRenaming(stage, text, undoing, dict, {})
            arrays: dict[str, LazyArray] = {name: _Shaped(shape) for name, shape in shapes.items()}
            shapes = {name: array.shape for name, array in renaming.apply(arrays, ()).arrays.items()}
        except (FormatError, MismatchError):
            return {}
    return shapes


def _joined(before: Renamed, after: Renamed) -> Renamed:
    """Join the records of two stages."""
    return Renamed(
        after.arrays,
        after.transforms,
        {old: after.plain[new] for old, new in before.plain.items() if new in after.plain},
        left_out=[*before.left_out, *after.left_out],
        unused_rules=before.unused_rules | after.unused_rules,
        tied=[*before.tied, *after.tied],
        notes=[*before.notes, *after.notes],
    )


# -------------------------------------------------------------------------------------------- dtypes


def _set_dtypes(renamed: Renamed, known: ModelFacts) -> None:
    """Give leaves with changed values the dtype of `like`; on the way back, give it to all floating leaves."""
    named = known.in_config("dtype", "torch_dtype") if known.back else None
    default = named if isinstance(named, str) else None
    for name, array in renamed.arrays.items():
        is_changed = array.is_changed
        wanted = known.dtypes.get(name) or default
        is_settled = not (is_changed or known.back) or (array.keeps_dtype and not known.back)
        if not wanted or is_settled or not is_floating(name_of_dtype(array.dtype)):
            continue
        dtype = dtype_from_name(floating_dtype(wanted)) if is_floating(wanted) else array.dtype
        if dtype != array.dtype:
            renamed.arrays[name] = Computed(array, dtype)
            if is_changed and not known.back and dtype.itemsize < 4:
                renamed.notes.append(
                    f"{name}: computed in float32, stored as {dtype.name}; the way back is not exact"
                )


def refuse_transformed_keys(arrays: Iterable[LazyArray]) -> None:
    """Refuse transposed, stacked and unstacked PRNG keys: their stored arrays have one axis more than the keys."""
    problems = [
        f"leaf {stored.name!r} holds PRNG keys, which cannot be transposed, stacked or unstacked"
        for array in arrays
        for stored in stored_leaves(array)
        if stored.entry.key and stored is not array
    ]
    if problems:
        raise MismatchError(problems, context="rename")
