"""Rename and reshape leaves by rules; `docs/guides/renaming.md` describes their syntax."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eformer._engine.record.lazy_arrays import Stacked, Transposed, Unstacked, stored_leaves
from eformer._engine.record.names import nearest, readable
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.planned import LazyArray

_Pair = tuple[str, str | None]

RenameRules = str | os.PathLike[str] | Mapping[str, str | None] | Iterable[str | _Pair]
"""A file of rules, their text, or the rules: a dict {pattern: name}, pairs, or lines. Steps may follow a name:
"layers.kernel | transpose". A rule without a name (None, "") drops the leaf."""


@dataclass(frozen=True, slots=True)
class RuleStep:
    """A step of a rule: transpose, stack or unstack. `number` is the template of the position in a stack."""

    verb: str
    axes: tuple[int, ...] = ()
    number: str = ""

    def __str__(self) -> str:
        axes = () if self.axes == (0,) else self.axes
        return " ".join([self.verb, *map(str, axes)])


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rule file. `name` is None if the rule drops the leaf."""

    line: int
    pattern: re.Pattern[str]
    name: str | None
    steps: tuple[RuleStep, ...]

    def __str__(self) -> str:
        return f"line {self.line}, {self.pattern.pattern}"

    @property
    def stack(self) -> RuleStep | None:
        return self.steps[-1] if self.steps and self.steps[-1].verb == "stack" else None

    @property
    def literal(self) -> str:
        """Guess a name that the pattern could match, to find the nearest existing one."""
        text = re.sub(r"\\d[+*]?", "0", self.pattern.pattern)
        return re.sub(r"\\(.)", r"\1", re.sub(r"[()?+*^$]|\.\*|\\w|\\S", "", text))


@dataclass(slots=True)
class Renamed:
    """The leaves under their new names.

    arrays        by new name
    transforms    the steps that each array goes through, as text, by new name
    plain         new names of plain values, by old name
    kept          names that no rule matches, with the nearest rule as a hint
    left_out      names that a rule drops
    unused_rules  rules that match no leaf, by line, with the nearest leaf as a hint
    """

    arrays: dict[str, LazyArray] = field(default_factory=dict)
    transforms: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unused_rules: dict[int, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- parsing


def rules_from(given: RenameRules) -> list[Rule]:
    """Parse rules in any form that a caller may pass. A string is a path, unless it contains a line break or an
    arrow."""
    if callable(given):
        raise TypeError("rename= is a function; expected rules: pairs of a pattern and a new name, or a file")
    if isinstance(given, str) and ("\n" in given or "->" in given):
        return parse_rules(given, "rename")
    if isinstance(given, (str, os.PathLike)):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(f"{os.fspath(given)} is not a text file of rules: {error}") from error
        return parse_rules(text, os.fspath(given))
    rules: list[str | _Pair] = list(given.items() if isinstance(given, Mapping) else given)
    return _parsed(rules, "rename") if rules else []


def parse_rules(text: str, origin: str) -> list[Rule]:
    """Parse the rules of a file. A single error lists all lines that are not rules."""
    return _parsed(text.splitlines(), origin)


def _is_comment(rule: object) -> bool:
    return isinstance(rule, str) and (not rule.strip() or rule.lstrip().startswith("#"))


def _parsed(lines: Iterable[str | _Pair], origin: str) -> list[Rule]:
    rules, problems = [], []
    for number, given in enumerate(lines, 1):
        if _is_comment(given):
            continue
        try:
            rules.append(_rule(number, *_sides(given)))
        except (FormatError, re.error) as error:
            shown = given.strip() if isinstance(given, str) else str(given)
            problems.append(f"line {number}, {shown[:100]}: {error}")
    if problems:
        raise FormatError("\n  ".join([f"{origin} cannot be read as rules:", *problems]))
    if not rules:
        raise ValueError(f"{origin} has no rules; write one on each line: PATTERN -> NAME")
    return rules


_ARROW = re.compile(r"\s+->(?:\s+|$)")


def _sides(given: str | _Pair) -> tuple[object, object]:
    """Split a rule into the pattern and the new name with its steps."""
    sides = _ARROW.split(given.strip()) if isinstance(given, str) else given
    try:
        pattern, name = sides
    except (TypeError, ValueError):
        raise FormatError(
            "a rule is PATTERN -> NAME, with spaces around the arrow, or a pair of the two"
        ) from None
    return pattern, name


def _rule(number: int, pattern: object, result: object) -> Rule:
    if not isinstance(pattern, (str, re.Pattern)) or not isinstance(result, (str, type(None))):
        raise FormatError("the pattern and the name of a rule are text")
    name, *steps = [part.strip() for part in (result or "").split("|")]
    rule = Rule(number, re.compile(pattern), name or None, tuple(_step(words.split()) for words in steps))
    _check(rule)
    return rule


def _step(words: list[str]) -> RuleStep:
    verb, *rest = words or [""]
    if verb == "stack" and rest and rest[0].startswith("\\"):
        return RuleStep(verb, _numbers(rest[1:], 1) or (0,), rest[0])
    if verb == "transpose":
        return RuleStep(verb, _numbers(rest, 64))
    if verb == "unstack":
        return RuleStep(verb, _numbers(rest, 1) or (0,))
    raise FormatError(
        f"unknown step {' '.join(words)!r}; expected transpose [AXES], stack \\GROUP [AXIS] or unstack [AXIS]"
    )


def _numbers(words: list[str], most: int) -> tuple[int, ...]:
    if len(words) > most or not all(word.isdecimal() for word in words):
        number = "one axis" if most == 1 else "axes"
        raise FormatError(f"{' '.join(words)!r}: expected {number}, counted from 0")
    return tuple(map(int, words))


def _check(rule: Rule) -> None:
    """Raise FormatError if a rule can fit no leaf."""
    verbs = [step.verb for step in rule.steps]
    if rule.name is None and verbs:
        raise FormatError("a rule without a new name drops the leaf, and can have no steps")
    if "stack" in verbs[:-1]:
        raise FormatError("stack must be the last step")
    if "unstack" in verbs[1:] or ("unstack" in verbs and "stack" in verbs):
        raise FormatError("unstack must be the first step, and cannot be combined with stack")
    if ("unstack" in verbs) != ("{}" in (rule.name or "")):
        raise FormatError("a name contains {}, for the index, if and only if the rule has unstack")
    if (marks := (rule.name or "").count("{}")) > 1:
        raise FormatError(
            f"the name contains {marks} {{}}, and unstack has one index to fill in; write one {{}} and "
            "unstack one axis at a time: `convert` with this rule, then use the result with a second rule, which has "
            r"the first index as a group, such as (\d+) and \1"
        )
    if re.search(r"\\(?!\d)", rule.name or ""):
        raise FormatError(
            f"{rule.name!r}: a backslash must be followed by the number of a group, such as \\1"
        )
    for template in (rule.name, *(step.number for step in rule.steps)):
        if template and (missing := [g for g in _groups(template) if g > rule.pattern.groups]):
            raise FormatError(f"\\{missing[0]} in {template!r}: the pattern has {rule.pattern.groups} groups")


def _groups(template: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\\(\d+)", template)]


def _fill(template: str, match: re.Match[str]) -> str:
    return re.sub(r"\\(\d+)", lambda group: match[int(group[1])] or "", template)


# ------------------------------------------------------------------------------------------ applying


def apply(rules: Sequence[Rule], arrays: Mapping[str, LazyArray], plain: Sequence[str]) -> Renamed:
    """Apply the rules to arrays and to the names of plain values. A single error lists all problems."""
    renaming = _Renaming(rules)
    for name in (*arrays, *plain):
        renaming.add_leaf(name, arrays.get(name))
    for name, members in renaming.stacks.items():
        renaming.add_stack(name, members)
    if renaming.problems:
        raise MismatchError(renaming.problems, context="rename")
    renaming.add_hints()
    return renaming.renamed


class _Member(NamedTuple):
    """An array in a stack."""

    number: int
    old: str
    array: LazyArray
    rule: Rule


class _Renaming:
    """The state of `apply` while it walks the leaves."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.renamed = Renamed()
        self.problems: list[str] = []
        self.used_lines: set[int] = set()
        self.stacks: dict[str, list[_Member]] = {}
        self.taken: set[str] = set()

    def add_leaf(self, name: str, array: LazyArray | None) -> None:
        text = readable(name)
        for rule in self.rules:
            if match := rule.pattern.fullmatch(name) or (text != name and rule.pattern.fullmatch(text)):
                self.used_lines.add(rule.line)
                self.apply_rule(rule, name, match, array)
                return
        self.renamed.kept.append(name)
        self.add(name, name, array)

    def apply_rule(self, rule: Rule, old: str, match: re.Match[str], array: LazyArray | None) -> None:
        if rule.name is None:
            self.renamed.left_out.append(old)
            return
        try:
            for new, renamed in _renamed_leaves(rule, match, array):
                if renamed is not None and rule.stack:
                    member = _Member(_number(_fill(rule.stack.number, match)), old, renamed, rule)
                    self.stacks.setdefault(new, []).append(member)
                else:
                    self.add(new, old, renamed, ", ".join(map(str, rule.steps)))
        except FormatError as error:
            self.problems.append(f"leaf {old!r}, by {rule}: {error}")

    def add_stack(self, new: str, members: Sequence[_Member]) -> None:
        *before, stack = members[0].rule.steps
        try:
            transform = ", ".join([*map(str, before), f"{stack} of {len(members)}"])
            self.add(new, members[0].old, _stack(members), transform)
        except FormatError as error:
            self.problems.append(f"{new!r}, by {members[0].rule}: {error}")

    def add(self, new: str, old: str, array: LazyArray | None, transform: str = "") -> None:
        renamed = self.renamed
        if new in self.taken:
            keeps = f"leaf {old!r} keeps its name, which is the new name of another leaf"
            renamed_to = f"leaf {old!r} would be renamed to {new!r}, which is the name of another leaf"
            self.problems.append(keeps if old == new else renamed_to)
        elif array is None:
            renamed.plain[old] = new
        else:
            renamed.arrays[new], renamed.transforms[new] = array, transform
        self.taken.add(new)

    def add_hints(self) -> None:
        """Add the nearest leaf to each unused rule, and the rule to that leaf."""
        renamed = self.renamed
        near: dict[str, Rule] = {}
        for rule in self.rules:
            if rule.line not in self.used_lines:
                name = nearest(rule.literal, renamed.kept)
                renamed.unused_rules[rule.line] = f"{rule} (nearest is {name!r})" if name else str(rule)
                if name:
                    near.setdefault(name, rule)
        renamed.kept = [
            f"{name} (nearest is {near[name]})" if name in near else name for name in renamed.kept
        ]


def _renamed_leaves(
    rule: Rule, match: re.Match[str], array: LazyArray | None
) -> Iterator[tuple[str, LazyArray | None]]:
    """Yield the new names of one leaf with their arrays, before any stacking."""
    template = rule.name or ""
    steps = [step for step in rule.steps if step.verb != "stack"]
    if array is None:
        if rule.steps:
            raise FormatError(f"{rule.steps[0].verb} needs an array, and this is a plain value")
        yield _fill(template, match), None
    elif steps and steps[0].verb == "unstack":
        (axis,) = steps[0].axes
        _require_axis(array, axis, len(array.shape) - 1)
        before, after = (_fill(part, match) for part in template.split("{}"))
        for index in range(array.shape[axis]):
            yield f"{before}{index}{after}", _transpose(Unstacked(array, axis, index), steps[1:])
    else:
        yield _fill(template, match), _transpose(array, steps)


def _transpose(array: LazyArray, steps: Sequence[RuleStep]) -> LazyArray:
    for step in steps:
        axes = step.axes or tuple(reversed(range(len(array.shape))))
        if sorted(axes) != list(range(len(array.shape))):
            raise FormatError(f"{step} does not fit an array of shape {list(array.shape)}")
        array = Transposed(array, axes)
    return array


def _stack(members: Sequence[_Member]) -> LazyArray:
    ordered = sorted(members, key=lambda member: member.number)
    numbers = [member.number for member in ordered]
    if numbers != list(range(len(ordered))):
        missing = sorted(set(range(len(ordered))) - set(numbers))
        raise FormatError(f"a stack of {len(ordered)} needs the numbers {missing[:8]}, found {numbers[:8]}")
    arrays = [member.array for member in ordered]
    kinds = {(str(array.dtype), array.shape) for array in arrays}
    if len(kinds) > 1:
        raise FormatError(f"arrays in a stack must have one dtype and shape, found {sorted(kinds)[:4]}")
    axes = {member.rule.steps[-1].axes for member in members}
    if len(axes) > 1:
        raise FormatError(f"rules stack it along different axes: {sorted(axes)}")
    ((axis,),) = axes
    _require_axis(arrays[0], axis, len(arrays[0].shape))
    return Stacked(arrays, axis)


def _require_axis(array: LazyArray, axis: int, last: int) -> None:
    if axis > last:
        raise FormatError(f"axis {axis} does not exist in an array of shape {list(array.shape)}")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise FormatError(f"{text!r} is not a number to stack by")
    return int(text)


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
