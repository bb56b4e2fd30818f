"""Rules by which leaves get other names and shapes; `docs/guides/renaming.md` tells how they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from eformer._engine.record.names import nearest
from eformer._engine.tools.lazy_arrays import Stacked, Taken, Transposed, stored_in
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.planned import LazyArray


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to an array. `number` says where in a stack it goes."""

    verb: str
    axes: tuple[int, ...] = ()
    number: str = ""

    def __str__(self) -> str:
        axes = () if self.axes == (0,) else self.axes
        return " ".join([self.verb, *map(str, axes)])


@dataclass(frozen=True, slots=True)
class Rule:
    """One line. `name` is None for what is left out."""

    line: int
    pattern: re.Pattern[str]
    name: str | None
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"line {self.line}, {self.pattern.pattern}"

    @property
    def stack(self) -> Step | None:
        return self.steps[-1] if self.steps and self.steps[-1].verb == "stack" else None

    @property
    def literal(self) -> str:
        """What a name that it matches might look like, to find one that it nearly does."""
        text = re.sub(r"\\d[+*]?", "0", self.pattern.pattern)
        return re.sub(r"\\(.)", r"\1", re.sub(r"[()?+*^$]|\.\*|\\w|\\S", "", text))


@dataclass(slots=True)
class Renamed:
    """Arrays under their new names, and `hows` what was done to them; `plain` values have new names, too.

    `kept` are those that no rule matches, `left_out` those that a rule drops, `idle` rules that match nothing: the
    first and the last with hints of what is nearest.
    """

    arrays: dict[str, LazyArray] = field(default_factory=dict)
    hows: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------- parsing


def parse_rules(text: str, origin: str) -> list[Rule]:
    """The rules of a file; all lines that are none, at once."""
    rules, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            rules.append(_rule(number, line.strip()))
        except (FormatError, re.error) as error:
            problems.append(f"line {number}, {line.strip()[:100]}: {error}")
    if problems:
        raise FormatError("\n  ".join([f"{origin} cannot be read as rules:", *problems]))
    if not rules:
        raise ValueError(f"{origin} has no rules; one is a line: PATTERN -> NAME")
    return rules


_ARROW = re.compile(r"\s+->(?:\s+|$)")


def _rule(number: int, line: str) -> Rule:
    pattern, *rest = _ARROW.split(line)
    if len(rest) != 1:
        raise FormatError("a rule is PATTERN -> NAME, with spaces around the arrow")
    name, *steps = [part.strip() for part in rest[0].split("|")]
    rule = Rule(number, re.compile(pattern), name or None, tuple(_step(words.split()) for words in steps))
    _check(rule)
    return rule


def _step(words: list[str]) -> Step:
    verb, *rest = words or [""]
    if verb == "stack" and rest and rest[0].startswith("\\"):
        return Step(verb, _numbers(rest[1:], 1) or (0,), rest[0])
    if verb == "transpose":
        return Step(verb, _numbers(rest, 64))
    if verb == "unstack":
        return Step(verb, _numbers(rest, 1) or (0,))
    raise FormatError(
        f"{' '.join(words)!r} is none of: transpose [AXES], stack \\GROUP [AXIS], unstack [AXIS]"
    )


def _numbers(words: list[str], most: int) -> tuple[int, ...]:
    if len(words) > most or not all(word.isdecimal() for word in words):
        number = "one axis" if most == 1 else "axes"
        raise FormatError(f"{' '.join(words)!r}: expected {number}, counted from 0")
    return tuple(map(int, words))


def _check(rule: Rule) -> None:
    """What can be known before there are leaves."""
    verbs = [step.verb for step in rule.steps]
    if rule.name is None and verbs:
        raise FormatError("what is left out needs no steps")
    if "stack" in verbs[:-1]:
        raise FormatError("stack comes last")
    if "unstack" in verbs[1:] or ("unstack" in verbs and "stack" in verbs):
        raise FormatError("unstack comes first, and without stack")
    if ("unstack" in verbs) != ("{}" in (rule.name or "")):
        raise FormatError("unstack needs {} in the name, for the number; and nothing else does")
    if re.search(r"\\(?!\d)", rule.name or ""):
        raise FormatError(f"{rule.name!r}: behind a backslash stands the number of a group, \\1")
    for template in (rule.name, *(step.number for step in rule.steps)):
        if template and (missing := [g for g in _groups(template) if g > rule.pattern.groups]):
            raise FormatError(f"\\{missing[0]} in {template!r}: the pattern has {rule.pattern.groups} groups")


def _groups(template: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\\(\d+)", template)]


def _filled(template: str, match: re.Match[str]) -> str:
    return re.sub(r"\\(\d+)", lambda group: match[int(group[1])] or "", template)


# ------------------------------------------------------------------------------------------ applying


def apply(rules: Sequence[Rule], arrays: Mapping[str, LazyArray], plain: Sequence[str]) -> Renamed:
    """The arrays, and the names of plain values, by the rules; all that does not work out, at once."""
    applying = _Applying(rules)
    for name in (*arrays, *plain):
        applying.leaf(name, arrays.get(name))
    for name, members in applying.stacks.items():
        applying.stack(name, members)
    if applying.problems:
        raise MismatchError(applying.problems, context="rename")
    applying.give_hints()
    return applying.renamed


class _Member(NamedTuple):
    """An array that goes into a stack."""

    number: int
    old: str
    array: LazyArray
    rule: Rule


class _Applying:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.renamed = Renamed()
        self.problems: list[str] = []
        self.used: set[int] = set()
        self.stacks: dict[str, list[_Member]] = {}
        self.taken: set[str] = set()

    def leaf(self, name: str, array: LazyArray | None) -> None:
        for rule in self.rules:
            if match := rule.pattern.fullmatch(name):
                self.used.add(rule.line)
                self.by_rule(rule, match, array)
                return
        self.renamed.kept.append(name)
        self.put(name, name, array)

    def by_rule(self, rule: Rule, match: re.Match[str], array: LazyArray | None) -> None:
        if rule.name is None:
            self.renamed.left_out.append(match[0])
            return
        try:
            for new, made in _made(rule, match, array):
                if made is not None and rule.stack:
                    member = _Member(_number(_filled(rule.stack.number, match)), match[0], made, rule)
                    self.stacks.setdefault(new, []).append(member)
                else:
                    self.put(new, match[0], made, ", ".join(map(str, rule.steps)))
        except FormatError as error:
            self.problems.append(f"leaf {match[0]!r}, by {rule}: {error}")

    def stack(self, new: str, members: Sequence[_Member]) -> None:
        *before, stack = members[0].rule.steps
        try:
            how = ", ".join([*map(str, before), f"{stack} of {len(members)}"])
            self.put(new, members[0].old, _stacked(members), how)
        except FormatError as error:
            self.problems.append(f"{new!r}, by {members[0].rule}: {error}")

    def put(self, new: str, old: str, array: LazyArray | None, how: str = "") -> None:
        renamed = self.renamed
        if new in self.taken:
            self.problems.append(f"leaf {old!r} would be called {new!r}, and so would another")
        elif array is None:
            renamed.plain[old] = new
        else:
            renamed.arrays[new], renamed.hows[new] = array, how
        self.taken.add(new)

    def give_hints(self) -> None:
        """To each rule that matches nothing the leaf that it nearly does, and to that leaf the rule."""
        renamed = self.renamed
        near: dict[str, Rule] = {}
        for rule in self.rules:
            if rule.line not in self.used:
                name = nearest(rule.literal, renamed.kept)
                renamed.idle.append(f"{rule} (nearest is {name!r})" if name else str(rule))
                if name:
                    near.setdefault(name, rule)
        renamed.kept = [
            f"{name} (nearest is {near[name]})" if name in near else name for name in renamed.kept
        ]


def _made(
    rule: Rule, match: re.Match[str], array: LazyArray | None
) -> Iterator[tuple[str, LazyArray | None]]:
    """What becomes of one leaf, all but stacking."""
    name = _filled(rule.name or "", match)
    steps = [step for step in rule.steps if step.verb != "stack"]
    if array is None:
        if rule.steps:
            raise FormatError(f"it is a plain value, and cannot be {rule.steps[0].verb}ed")
        yield name, None
    elif steps and steps[0].verb == "unstack":
        (axis,) = steps[0].axes
        _require_axis(array, axis, len(array.shape) - 1)
        for index in range(array.shape[axis]):
            yield name.replace("{}", str(index)), _transposed(Taken(array, axis, index), steps[1:])
    else:
        yield name, _transposed(array, steps)


def _transposed(array: LazyArray, steps: Sequence[Step]) -> LazyArray:
    for step in steps:
        axes = step.axes or tuple(reversed(range(len(array.shape))))
        if sorted(axes) != list(range(len(array.shape))):
            raise FormatError(f"{step} of an array with {len(array.shape)} axes, {list(array.shape)}")
        array = Transposed(array, axes)
    return array


def _stacked(members: Sequence[_Member]) -> LazyArray:
    ordered = sorted(members, key=lambda member: member.number)
    numbers = [member.number for member in ordered]
    if numbers != list(range(len(ordered))):
        missing = sorted(set(range(len(ordered))) - set(numbers))
        raise FormatError(f"a stack of {len(ordered)}, of which {missing[:8]} are not there: {numbers[:8]}")
    arrays = [member.array for member in ordered]
    kinds = {(str(array.dtype), array.shape) for array in arrays}
    if len(kinds) > 1:
        raise FormatError(f"arrays in a stack have to be alike, these are {sorted(kinds)[:4]}")
    axes = {member.rule.steps[-1].axes for member in members}
    if len(axes) > 1:
        raise FormatError(f"rules stack it along several axes: {sorted(axes)}")
    ((axis,),) = axes
    _require_axis(arrays[0], axis, len(arrays[0].shape))
    return Stacked(arrays, axis)


def _require_axis(array: LazyArray, axis: int, last: int) -> None:
    if axis > last:
        raise FormatError(f"there is no axis {axis}, the array is {list(array.shape)}")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise FormatError(f"{text!r} is no number to stack by")
    return int(text)


def origins(array: LazyArray) -> list[str]:
    """The leaves that an array was made of, by their old names."""
    return [stored.name for stored in stored_in(array)]
