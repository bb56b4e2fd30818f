"""Apply the rules of one stage: to each leaf the first that matches, by its axes or by a regular expression.

Tests: tests/engine/record/test_rename.py, tests/engine/record/test_rename_axes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.dtypes import dtype_from_name, is_floating, name_of_dtype
from eformer._engine.record.expressions import Expression, Numbers
from eformer._engine.record.lazy_arrays import Constant
from eformer._engine.record.names import nearest, readable
from eformer._engine.record.notation import AxisRule
from eformer._engine.record.pieces import pieces
from eformer._engine.record.rearrange import Assembly, ReadyRule, fits
from eformer._engine.record.regex_rules import RegexRule, Stacking, fill, number_of, renamed_leaves, stack
from eformer._engine.record.templates import Template, outline_of
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rearrange import Target
    from eformer._engine.record.rule_books import Book
    from eformer._engine.record.templates import Bound


@dataclass(frozen=True, slots=True)
class RuleText:
    """Parsed rules of one text: stages, whose rules see the same names, and the names of numbers with their lines.

    `book` is the shipped book that the text is, in which every leaf must match a rule of one stage.
    """

    stages: tuple[tuple[RegexRule | AxisRule, ...], ...]
    lets: Mapping[str, Expression] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    book: Book | None = None


@dataclass(frozen=True, slots=True)
class Tied:
    """A leaf that is left out because another leaf has its values, as soon as they were compared."""

    name: str
    array: LazyArray
    other: str
    other_array: LazyArray

    @property
    def difference(self) -> float:
        return largest_difference(self.array, self.other_array)


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
            if (difference := tied.difference)
        ]
        if problems:
            raise MismatchError(problems, context="rename")


def largest_difference(one: LazyArray, other: LazyArray) -> float:
    """Return the largest difference of two arrays, read part by part; infinity if a NaN is in one of them alone."""
    if one.shape != other.shape:
        return np.inf
    worst = 0.0
    for box in pieces(one.shape, _WIDE.itemsize, _COMPARED_BYTES):
        a, b = (array.read(box).astype(_WIDE) for array in (one, other))
        unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
        distances = np.abs(a[unequal] - b[unequal])
        worst = max(worst, float(np.where(np.isnan(distances), np.inf, distances).max(initial=0)))
    return worst


_WIDE = np.dtype(np.float64)
_COMPARED_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that rules need: config.json of the model, the shapes and dtypes of the leaves to be made as far as they
    are known, and whether the rules are read backwards."""

    config: Mapping[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    back: bool = False

    def in_config(self, *keys: str) -> Any:
        """Return the first of these keys in config.json, or in its text_config."""
        parts = (self.config, self.config.get("text_config"))
        return next((p[key] for p in parts if isinstance(p, Mapping) for key in keys if p.get(key)), None)


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


class StageRenaming:
    """The state of one stage while it walks the leaves."""

    def __init__(
        self,
        stage: Sequence[RegexRule | AxisRule],
        text: RuleText,
        known: ModelFacts,
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        before: Mapping[str, str],
    ) -> None:
        self.stage, self.known, self.shapes, self.before = stage, known, shapes, before
        self.is_book = text.book is not None
        self.numbers = Numbers(text.lets, known.config)
        self.kept: dict[str, str] = {}
        self.spelled: dict[str, str] = {}
        self.renamed = Renamed()
        self.problems: list[str] = []
        self.used: set[str] = set()
        self.stacks: dict[str, list[Stacking]] = {}
        self.taken: set[str] = set()
        self.assembly = Assembly(self.numbers, text.lines, shapes, self.scales_at)
        self.ways = list(self._ways())
        self.has_tied = any(way.is_tied for way in self.ways)
        self.has_templates = any(way.template is not None for way in self.ways)
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
        if not self.has_templates:
            return self.ways
        outline = outline_of(name)
        found = self._by_outline.get(outline)
        if found is None:
            found = [way for way in self.ways if way.template is None or way.template.may_match(outline)]
            self._by_outline[outline] = found
        return found

    # -------------------------------------------------------------------------------------- leaves

    def apply(self, arrays: Mapping[str, LazyArray], plain: Iterable[str]) -> Renamed:
        self.arrays = arrays  # to look for leaves in whose place other leaves are read
        scales = self.scales_in(arrays)
        for name, array in arrays.items():
            if name not in scales:
                self.add_leaf(name, array)
        for name in plain:
            self.add_leaf(name, None)
        for new, members in self.stacks.items():
            self.add_stack(new, members)
        self.add_targets()
        self.problems += self.assembly.problems
        if not self.known.shapes:  # otherwise the shapes are compared
            self.renamed.notes += self.assembly.ragged()
        if self.problems:
            raise MismatchError(self.problems, context="rename")
        self.add_hints()
        return self.renamed

    def scales_in(self, arrays: Mapping[str, LazyArray]) -> set[str]:
        """Return the names of leaves that are the scales of other leaves by a rule.

        They belong to the other leaves, and no rule has to name them.
        """
        if self.known.back or not any(isinstance(rule, AxisRule) and rule.scales for rule in self.stage):
            return set()
        self.spelled = {readable(name): name for name in arrays}
        found = set[str]()
        for text, name in self.spelled.items():
            for way in self.ways_for(text):
                if isinstance(way.rule, ReadyRule) and way.template and way.rule.scales:
                    bound = way.template.match(text)
                    if bound is not None and fits(way.template.leaf.axes, arrays[name]):
                        found.add(self.spelled.get(way.rule.scales.fill(bound), ""))
        return found

    def scales_at(self, name: str) -> LazyArray | None:
        return self.arrays.get(self.spelled.get(readable(name), ""))

    def add_leaf(self, name: str, array: LazyArray | None) -> None:
        near = None
        text = readable(name)
        for spelled in (name,) if text == name else (name, text):
            ways = self.ways_for(spelled)
            if self.has_tied:
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
        elif self.known.back and (why := ready.rule.cannot_go_back):
            advice = "" if ready.rule.scales else "write <->, or "
            self.problems.append(f"{ready.where} {why}; {advice}leave it out of the way back")
        elif array is None or (ready.moves_nothing and not ready.rule.steps and not ready.tied):
            self.add(ready.targets[0].fill(bound), name, array)
        else:
            self.assembly.add(ready, way.number, bound, name, array)

    def add_constants(self, ready: ReadyRule) -> None:
        self.used.add(ready.where)
        step = ready.rule.steps[0]
        assert step.number
        number = self.numbers.require(step.number)
        casts = [dtype_from_name(s.dtype) for s in ready.rule.steps if s.verb == "cast"]
        for name, shape in self.assembly.add_constants(ready):
            dtype = casts[-1] if casts else dtype_from_name(self.known.dtypes.get(name, "float32"))
            if is_floating(name_of_dtype(dtype)) or np.asarray(number).astype(dtype) == number:
                self.add(name, name, Constant(number, shape, dtype, keeps_dtype=bool(casts)), str(step))
            else:
                self.problems.append(
                    f"{ready.where}: {name} is {dtype}, which does not hold the number of `{step}`"
                )

    def add_stack(self, new: str, members: Sequence[Stacking]) -> None:
        *before, last = members[0].rule.steps
        try:
            transform = ", ".join([*map(str, before), f"{last} of {len(members)}"])
            self.add(new, members[0].old, stack(members), transform)
        except FormatError as error:
            self.problems.append(f"{new!r}, by {members[0].rule}: {error}")

    def add_targets(self) -> None:
        is_tied = self.known.back and self.known.in_config("tie_word_embeddings")
        made = list(self.assembly.make())
        for name, target, array in made:
            if not (is_tied and target.rule.tied):
                self.add(name, target.first.name, array, target.rule.described)
        for name, target, array in made:
            if is_tied and target.rule.tied:
                self.add_tied(name, target, target.rule.tied.fill(target.bound), array)

    def add_tied(self, name: str, target: Target, other: str, array: LazyArray) -> None:
        """Leave a leaf out if the leaf that it is tied to is there."""
        if other in self.renamed.arrays:
            self.renamed.tied.append(Tied(target.first.name, array, other, self.renamed.arrays[other]))
        else:
            self.add(name, target.first.name, array, target.rule.described)

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


def _near_miss(near: RegexRule | ReadyRule | None, array: LazyArray | None) -> str:
    """Tell which rule has the name of a leaf, but other axes."""
    if near is None or isinstance(near, RegexRule) or array is None:
        return ""
    axes = near.sources[0].leaf.axes or ()
    number = f"{len(axes)} {'axis' if len(axes) == 1 else 'axes'}"
    return f" ({near.where} would, but has {number} and the leaf has {len(array.shape)}: {list(array.shape)})"
