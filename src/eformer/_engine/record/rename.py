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
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.boxes import Box
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating, name_of_dtype
from eformer._engine.record.expressions import Expression, Numbers
from eformer._engine.record.lazy_arrays import Computed, Constant, stored_leaves
from eformer._engine.record.names import nearest, readable
from eformer._engine.record.notation import AxisRule, is_notation, parse_let, parse_rule, without_comment
from eformer._engine.record.rearrange import Assembly, ReadyRule, fits
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.regex_rules import (
    RegexRule,
    Stacking,
    fill,
    number_of,
    parse_regex_rule,
    renamed_leaves,
    sides_of,
    stack,
)
from eformer._engine.record.rule_books import find_book, is_layout
from eformer._engine.record.templates import Template, outline_of
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer._engine.record.rule_books import Book
    from eformer._engine.record.templates import Bound

_Pair = tuple[str, str | None]

RenameRules = str | os.PathLike[str] | Mapping[str, str | None] | Iterable[str | os.PathLike[str] | _Pair]
"""A file of rules, their text, or the rules: a dict {pattern: name}, pairs, or lines. Steps may follow a name:
"layers.kernel | transpose". A rule without a name (None, "") drops the leaf. Files and texts in a list are stages."""


@dataclass(frozen=True, slots=True)
class RuleText:
    """Parsed rules of one text: stages, whose rules see the same names, and the names of numbers with their lines.

    `book` is the shipped book that the text is, in which every leaf must match a rule of one stage.
    """

    stages: tuple[tuple[RegexRule | AxisRule, ...], ...]
    lets: Mapping[str, Expression] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    book: Book | None = None


_Stage = tuple[RuleText, tuple[RegexRule | AxisRule, ...]]


@dataclass(frozen=True, slots=True)
class BookName:
    """The name of a layout, whose book depends on the model."""

    name: str


@dataclass(frozen=True, slots=True)
class Tied:
    """A leaf that is left out because another leaf has its values, as soon as they were compared."""

    name: str
    array: LazyArray
    other: str


@dataclass(slots=True)
class Renamed:
    """The leaves under their new names.

    arrays        by new name
    transforms    the steps that each array goes through, as text, by new name
    plain         new names of plain values, by old name
    kept          names that no rule matches, with the nearest rule as a hint
    left_out      names that a rule drops
    unused_rules  rules that match no leaf, by their lines, with the nearest leaf as a hint
    tied          leaves left out if another leaf has their values
    notes         surprises
    """

    arrays: dict[str, LazyArray] = field(default_factory=dict)
    transforms: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unused_rules: dict[str, str] = field(default_factory=dict)
    tied: list[Tied] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require_tied(self) -> None:
        """Read the tied leaves. Raise MismatchError if one differs from the leaf that stands for it."""
        problems = [
            f"{tied.name} is not the embedding, {tied.other} (max difference {difference:.2g}); set "
            "tie_word_embeddings to false in config="
            for tied in self.tied
            if tied.other in self.arrays and (difference := _difference(tied.array, self.arrays[tied.other]))
        ]
        if problems:
            raise MismatchError(problems, context="rename")


def _difference(one: LazyArray, other: LazyArray) -> float:
    """Return the largest difference of two arrays, read row by row."""
    if one.shape != other.shape:
        return np.inf
    rows = max(1, 2**22 // max(1, Box.whole(one.shape[1:]).size))
    worst = 0.0
    for start in range(0, one.shape[0], rows):
        box = Box((start, *(0 for _ in one.shape[1:])), (min(start + rows, one.shape[0]), *one.shape[1:]))
        a, b = (array.read(box).astype(np.float32) for array in (one, other))
        worst = max(worst, float(np.abs(a - b).max(initial=0)))
    return worst


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

    @property
    def books(self) -> list[Book]:
        return [text.book for text in self.texts if isinstance(text, RuleText) and text.book]

    def matches(self, name: str) -> bool:
        """Tell whether a rule of the first stage may match a name."""
        known = _Known(self.back)
        stages = self._in_order()
        if not stages:  # the name of a layout, which says nothing yet
            return True
        ((text, stage), *_) = stages
        return any(way.matches(name) for way in _Renaming(stage, text, known, dict, {}).ways)

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
        known = _Known(self.back, numbers or {}, shapes or {}, dtypes or {})
        renamed = Renamed(dict(arrays), plain={name: name for name in plain})
        kept = dict.fromkeys([*arrays, *plain], "")
        stages = self.of_model(known.config)._in_order()
        own: dict[str, str] = {}
        for number, (text, stage) in enumerate(stages):
            shapes_of = cache(partial(_shapes_before, stages[number + 1 :], known))
            renaming = _Renaming(stage, text, known, shapes_of, renamed.transforms)
            renamed = _joined(renamed, renaming.apply(renamed.arrays, dict.fromkeys(renamed.plain.values())))
            kept = renaming.still_kept(kept)
            is_first = number == 0 or stages[number - 1][0] is not text
            own = dict(renaming.kept) if is_first else renaming.still_kept(own)
            _require_matched(own, text, stages[number + 1 :])
        renamed.kept = [f"{name}{hint}" for name, hint in kept.items()]
        _set_dtypes(renamed, known)
        return renamed


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts for all stages."""

    back: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def in_config(self, *keys: str) -> Any:
        """Return the first of these keys in config.json, or in its text_config."""
        parts = (self.config, self.config.get("text_config"))
        return next((p[key] for p in parts if isinstance(p, Mapping) for key in keys if p.get(key)), None)


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
        return _parsed(item.splitlines(), "rename", "")
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


@dataclass(frozen=True, slots=True)
class _Way:
    """A way in which a rule matches names: a template of its sources, or a regular expression."""

    rule: RegexRule | ReadyRule
    template: Template | None = None
    number: int = 0
    is_tied: bool = False

    def matches(self, name: str) -> bool:
        if self.template is not None:
            return self.template.match(name) is not None
        return isinstance(self.rule, RegexRule) and self.rule.pattern.fullmatch(name) is not None


class _Renaming:
    """The state of one stage while it walks the leaves."""

    def __init__(
        self,
        stage: Sequence[RegexRule | AxisRule],
        text: RuleText,
        known: _Known,
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        before: Mapping[str, str],
    ) -> None:
        self.stage, self.known, self.shapes, self.before = stage, known, shapes, before
        self.is_book = text.book is not None
        self.numbers = Numbers(text.lets, known.config)
        self.kept: dict[str, str] = {}
        self.renamed = Renamed()
        self.problems: list[str] = []
        self.used: set[str] = set()
        self.stacks: dict[str, list[Stacking]] = {}
        self.taken: set[str] = set()
        self.assembly = Assembly(self.numbers, text.lines, shapes)
        self.ways = list(self._ways())
        self._by_outline: dict[str, list[_Way]] = {}

    def _ways(self) -> Iterator[_Way]:
        """Yield the ways in which names can match, in the order of the rules."""
        for rule in self.stage:
            if isinstance(rule, RegexRule):
                yield _Way(rule)
                continue
            try:
                yield from self._ways_of(rule)
            except FormatError as error:
                self.problems.append(f"{rule.where}: {error}")

    def _ways_of(self, rule: AxisRule) -> Iterator[_Way]:
        if rule.condition and not self.numbers.get(rule.condition):
            self.used.add(rule.where)
            return
        ready = ReadyRule(rule, self.numbers, back=self.known.back)
        for number, template in enumerate(ready.sources):
            yield _Way(ready, template, number)
        if ready.tied and not self.known.back:
            yield _Way(ready, ready.tied, 0, is_tied=True)
        if not rule.left and not self.known.back:
            self.add_constants(ready)

    def ways_for(self, name: str) -> list[_Way]:
        """Return the ways that may match a name. Names that differ in digits alone share them."""
        outline = outline_of(name)
        found = self._by_outline.get(outline)
        if found is None:
            found = [way for way in self.ways if way.template is None or way.template.may_match(outline)]
            self._by_outline[outline] = found
        return found

    # -------------------------------------------------------------------------------------- leaves

    def apply(self, arrays: Mapping[str, LazyArray], plain: Iterable[str]) -> Renamed:
        self.arrays = arrays  # to look for leaves that others stand for
        for name, array in arrays.items():
            self.add_leaf(name, array)
        for name in plain:
            self.add_leaf(name, None)
        for new, members in self.stacks.items():
            self.add_stack(new, members)
        self.add_targets()
        self.problems += self.assembly.problems
        if self.problems:
            raise MismatchError(self.problems, context="rename")
        self.add_hints()
        return self.renamed

    def add_leaf(self, name: str, array: LazyArray | None) -> None:
        near = None
        text = readable(name)
        for spelled in (name,) if text == name else (name, text):
            ways = self.ways_for(spelled)
            self.stand_in(ways, name, spelled, array)
            for way in ways:
                if way.template is None:
                    if self.take_by_regex(way.rule, name, text, array):
                        return
                elif not way.is_tied and (bound := way.template.match(spelled)) is not None:
                    if fits(way.template.leaf.axes, array):
                        self.take(way, name, bound, array)
                        return
                    near = near or way.rule
        self.kept[name] = _near_miss(near, array)
        self.add(name, name, array)

    def stand_in(self, ways: Iterable[_Way], name: str, spelled: str, array: LazyArray | None) -> None:
        """Read a leaf in the place of missing leaves that it is tied to. It stays free for other rules."""
        for way in ways:
            if not way.is_tied or way.template is None or not fits(way.template.leaf.axes, array):
                continue
            ready, bound = way.rule, way.template.match(spelled)
            if bound is None or array is None or isinstance(ready, RegexRule):
                continue
            new = ready.targets[0].fill(bound)
            is_wanted = not self.shapes() or new in self.shapes()
            if is_wanted and ready.sources[0].fill(bound) not in self.arrays:
                self.used.add(ready.where)
                self.assembly.add(ready, 0, bound, name, array)

    def take_by_regex(
        self, rule: RegexRule | ReadyRule, name: str, text: str, array: LazyArray | None
    ) -> bool:
        """Apply a rule with a regular expression; return False if it does not match."""
        assert isinstance(rule, RegexRule)
        match = rule.pattern.fullmatch(name) or (text != name and rule.pattern.fullmatch(text))
        if not match:
            return False
        self.used.add(rule.where)
        if rule.name is None:
            self.renamed.left_out.append(name)
        elif self.known.back:
            self.problems.append(
                f"{rule.where} has a regular expression and cannot be read from right to left"
            )
        else:
            self.apply_rule(rule, name, match, array)
        return True

    def apply_rule(self, rule: RegexRule, old: str, match: re.Match[str], array: LazyArray | None) -> None:
        try:
            for new, renamed in renamed_leaves(rule, match, array):
                if renamed is not None and rule.stack:
                    member = Stacking(number_of(fill(rule.stack.number, match)), old, renamed, rule)
                    self.stacks.setdefault(new, []).append(member)
                else:
                    self.add(new, old, renamed, ", ".join(map(str, rule.steps)))
        except FormatError as error:
            self.problems.append(f"leaf {old!r}, by {rule}: {error}")

    def take(self, way: _Way, name: str, bound: Bound, array: LazyArray | None) -> None:
        """Apply a rule with axes to a leaf."""
        ready = way.rule
        assert isinstance(ready, ReadyRule)
        self.used.add(ready.where)
        if not ready.targets:
            self.renamed.left_out.append(name)
        elif self.known.back and not ready.rule.is_two_way:
            self.problems.append(
                f"{ready.where} has -> and cannot be read from right to left; write <->, or leave it out of the way "
                "back"
            )
        elif array is None or (ready.moves_nothing and not ready.rule.steps):
            self.add(ready.targets[0].fill(bound), name, array)
        else:
            self.assembly.add(ready, way.number, bound, name, array)

    def add_constants(self, ready: ReadyRule) -> None:
        self.used.add(ready.where)
        step = ready.rule.steps[0]
        assert step.number
        number = self.numbers.require(step.number)
        for name, shape in self.assembly.add_constants(ready):
            dtype = dtype_from_name(self.known.dtypes.get(name, "float32"))
            casts = [dtype_from_name(s.dtype) for s in ready.rule.steps if s.verb == "cast"]
            self.add(name, name, Constant(number, shape, casts[-1] if casts else dtype), str(step))

    def add_stack(self, new: str, members: Sequence[Stacking]) -> None:
        *before, last = members[0].rule.steps
        try:
            transform = ", ".join([*map(str, before), f"{last} of {len(members)}"])
            self.add(new, members[0].old, stack(members), transform)
        except FormatError as error:
            self.problems.append(f"{new!r}, by {members[0].rule}: {error}")

    def add_targets(self) -> None:
        for name, target, array in self.assembly.make():
            ready = target.rule
            if ready.tied and self.known.back and self.known.in_config("tie_word_embeddings"):
                self.renamed.tied.append(Tied(target.first.name, array, ready.tied.fill(target.bound)))
            else:
                self.add(name, target.first.name, array, ready.described)

    def add(self, new: str, old: str, array: LazyArray | None, transform: str = "") -> None:
        renamed = self.renamed
        if new in self.taken:
            keeps = f"leaf {old!r} keeps its name, which is the new name of another leaf"
            renamed_to = f"leaf {old!r} would be renamed to {new!r}, which is the name of another leaf"
            self.problems.append(keeps if old == new else renamed_to)
        elif array is None:
            renamed.plain[old] = new
        else:
            renamed.arrays[new] = array
            renamed.transforms[new] = ", ".join(filter(None, [self.before.get(old), transform]))
        self.taken.add(new)

    def add_hints(self) -> None:
        """Add the nearest leaf to each unused rule, and the rule to that leaf."""
        renamed = self.renamed
        near: dict[str, RegexRule | AxisRule] = {}
        for rule in () if self.is_book else self.stage:
            if rule.where not in self.used:
                name = nearest(rule.literal, self.kept)
                renamed.unused_rules[rule.where] = f"{rule} (nearest is {name!r})" if name else str(rule)
                if name:
                    near.setdefault(name, rule)
        self.kept |= {name: f" (nearest is {rule})" for name, rule in near.items() if not self.kept[name]}

    def still_kept(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the names that this stage keeps, too, with its hints."""
        return {name: self.kept[name] or hint for name, hint in names.items() if name in self.kept}


def _require_matched(kept: Mapping[str, str], text: RuleText, later: Sequence[_Stage]) -> None:
    """Refuse leaves that no stage of a book matches, behind its last stage."""
    if text.book and kept and not (later and later[0][0] is text):
        unmatched = [f"{name}: no rule of {text.book.name} matches{hint}" for name, hint in kept.items()]
        raise MismatchError(unmatched, context="rename")


class _Shaped(LazyArray):
    """An array that has a shape and no elements."""

    in_order = True
    dtype = np.dtype(np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _shapes_before(stages: Sequence[_Stage], known: _Known) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes that leaves must have before the stages that are still to come, if that can be told."""
    shapes = known.shapes
    undoing = replace(known, back=not known.back)
    for text, stage in reversed(stages) if shapes else ():
        try:
            renaming = _Renaming(stage, text, undoing, dict, {})
            arrays: dict[str, LazyArray] = {name: _Shaped(shape) for name, shape in shapes.items()}
            shapes = {name: array.shape for name, array in renaming.apply(arrays, ()).arrays.items()}
        except (FormatError, MismatchError):
            return {}
    return shapes


def _near_miss(near: RegexRule | ReadyRule | None, array: LazyArray | None) -> str:
    """Tell which rule has the name of a leaf, but other axes."""
    if near is None or isinstance(near, RegexRule) or array is None:
        return ""
    axes = near.sources[0].leaf.axes or ()
    number = f"{len(axes)} {'axis' if len(axes) == 1 else 'axes'}"
    return f" ({near.where} would, but has {number} and the leaf has {len(array.shape)}: {list(array.shape)})"


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


def _set_dtypes(renamed: Renamed, known: _Known) -> None:
    """Give leaves with changed values the dtype of `like`; on the way back, give it to all floating leaves."""
    named = known.in_config("dtype", "torch_dtype") if known.back else None
    default = named if isinstance(named, str) else None
    for name, array in renamed.arrays.items():
        is_changed = array.is_changed
        wanted = known.dtypes.get(name) or default
        if not wanted or not (is_changed or known.back) or not is_floating(name_of_dtype(array.dtype)):
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
