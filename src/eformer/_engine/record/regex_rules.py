"""Rules with regular expressions, which rename, transpose, stack and unstack in one direction.

Tests: tests/engine/record/test_rename.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from eformer._engine.record.lazy_arrays import stacked, transposed, unstacked
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.planned import LazyArray


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
class RegexRule:
    """One line of a rule file. `name` is None if the rule drops the leaf."""

    where: str
    pattern: re.Pattern[str]
    name: str | None
    steps: tuple[RuleStep, ...]

    def __str__(self) -> str:
        return f"{self.where}, {self.pattern.pattern}"

    @property
    def stack(self) -> RuleStep | None:
        return self.steps[-1] if self.steps and self.steps[-1].verb == "stack" else None

    @property
    def literal(self) -> str:
        """Guess a name that the pattern could match, to find the nearest existing one."""
        text = re.sub(r"\\d[+*]?", "0", self.pattern.pattern)
        return re.sub(r"\\(.)", r"\1", re.sub(r"[()?+*^$]|\.\*|\\w|\\S", "", text))


_ARROW = re.compile(r"\s+->(?:\s+|$)")


def sides_of(given: str | Sequence[object]) -> tuple[object, object]:
    """Split a rule into the pattern and the new name with its steps."""
    sides = _ARROW.split(given.strip()) if isinstance(given, str) else given
    try:
        pattern, name = sides
    except (TypeError, ValueError):
        raise FormatError(
            "a rule is PATTERN -> NAME, with spaces around the arrow, or a pair of the two"
        ) from None
    return pattern, name


def parse_regex_rule(where: str, pattern: object, result: object) -> RegexRule:
    """Parse a rule. Raise FormatError or re.error if it can fit no leaf."""
    if not isinstance(pattern, (str, re.Pattern)) or not isinstance(result, (str, type(None))):
        raise FormatError("the pattern and the name of a rule are text")
    name, *steps = [part.strip() for part in (result or "").split("|")]
    rule = RegexRule(where, re.compile(pattern), name or None, tuple(_step(words.split()) for words in steps))
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


def _check(rule: RegexRule) -> None:
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


def fill(template: str, match: re.Match[str]) -> str:
    return re.sub(r"\\(\d+)", lambda group: match[int(group[1])] or "", template)


class Stacking(NamedTuple):
    """An array in a stack."""

    number: int
    old: str
    array: LazyArray
    rule: RegexRule


def renamed_leaves(
    rule: RegexRule, match: re.Match[str], array: LazyArray | None
) -> Iterator[tuple[str, LazyArray | None]]:
    """Yield the new names of one leaf with their arrays, before any stacking."""
    template = rule.name or ""
    steps = [step for step in rule.steps if step.verb != "stack"]
    if array is None:
        if rule.steps:
            raise FormatError(f"{rule.steps[0].verb} needs an array, and this is a plain value")
        yield fill(template, match), None
    elif steps and steps[0].verb == "unstack":
        (axis,) = steps[0].axes
        _require_axis(array, axis, len(array.shape) - 1)
        before, after = (fill(part, match) for part in template.split("{}"))
        for index, part in enumerate(unstacked(array, axis)):
            yield f"{before}{index}{after}", _transpose(part, steps[1:])
    else:
        yield fill(template, match), _transpose(array, steps)


def _transpose(array: LazyArray, steps: Sequence[RuleStep]) -> LazyArray:
    for step in steps:
        axes = step.axes or tuple(reversed(range(len(array.shape))))
        if sorted(axes) != list(range(len(array.shape))):
            raise FormatError(f"{step} does not fit an array of shape {list(array.shape)}")
        array = transposed(array, axes)
    return array


def stack(members: Sequence[Stacking]) -> LazyArray:
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
    return stacked(arrays, axis)


def _require_axis(array: LazyArray, axis: int, last: int) -> None:
    if axis > last:
        raise FormatError(f"axis {axis} does not exist in an array of shape {list(array.shape)}")


def number_of(text: str) -> int:
    if not text.isdecimal():
        raise FormatError(f"{text!r} is not a number to stack by")
    return int(text)
