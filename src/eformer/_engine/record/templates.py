"""Match the names of leaves with the placeholders of rules, and fill placeholders in.

Tests: tests/engine/record/test_rename_axes.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from eformer._engine.record.axes import all_names
from eformer._engine.record.notation import NumberAxis, NumberHole, TextHole, WordHole
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.record.expressions import Expression, Numbers
    from eformer._engine.record.notation import AxisRule, LeafPattern, Part

Bound = dict[str, Any]
"""The index of each axis in a name; by a star and its name, the text of each placeholder of text."""

_NUMBER = "(0|[1-9][0-9]{0,9})"
_TO_ZERO = str.maketrans("123456789", "000000000")


def outline_of(name: str) -> str:
    """Return a name with all digits 0. Names of one outline fit the same rules, or almost."""
    return name.translate(_TO_ZERO)


def _digits_of(rule: AxisRule) -> Iterator[NumberAxis]:
    for leaf in (*rule.left, *rule.right):
        for part in leaf.parts:
            if isinstance(part, NumberHole):
                yield from part.digits


class KnownSizes:
    """The sizes of axes that a rule has before it sees an array.

    sizes    by axis: the number of its words, the number of its line, or its limit
    words    of these, the numbers of words
    radix    as `sizes`, without limits: how far the number in a name rises by the axis before
    """

    def __init__(self, rule: AxisRule, numbers: Numbers) -> None:
        self.numbers, self.radix = numbers, dict[str, int]()
        leaves = (*rule.left, *rule.right)
        names = {name for leaf in leaves for axis in leaf.axes or () for name in all_names(axis)}
        for name in sorted(names | {digit.axis for digit in _digits_of(rule)}):
            if name in numbers.lets and (value := numbers.named(name)) is not None:
                self.radix[name] = self.natural(value, name)
        words = (part for leaf in leaves for part in leaf.parts if isinstance(part, WordHole))
        self.words = {part.axis: len(part.words) for part in words}
        self.radix |= self.words
        limits = {digit.axis: digit.limit for digit in _digits_of(rule) if digit.limit}
        self.sizes = self.radix | {axis: self.number(limit) for axis, limit in limits.items()}

    def number(self, expression: Expression) -> int:
        return self.natural(self.numbers.require(expression), expression)

    @staticmethod
    def natural(value: float, source: object) -> int:
        if not isinstance(value, int) or value < 0:
            raise FormatError(f"{source} is {value}, expected a whole number")
        return value

    def radix_of(self, axis: str) -> int:
        if not self.radix.get(axis):
            raise FormatError(f"the number of {axis} is unknown; write a line {axis} = NUMBER")
        return self.radix[axis]


class Template:
    """The name of a leaf in a rule, ready to match names and to make them."""

    def __init__(self, leaf: LeafPattern, known: KnownSizes) -> None:
        self.leaf = leaf
        self.holes = {n: _hole(part, known) for n, part in enumerate(leaf.parts) if not isinstance(part, str)}
        self.texts = [part if isinstance(part, str) else "" for part in leaf.parts]
        self.regex = re.compile("".join(map(_pattern, leaf.parts)), re.DOTALL)
        self.outline = re.compile("".join(map(_outline, leaf.parts)), re.DOTALL)
        self.begin, self.end = outline_of(self.texts[0]), outline_of(self.texts[-1])

    def may_match(self, outline: str) -> bool:
        """Tell whether names of this outline may match."""
        return (
            outline.startswith(self.begin)
            and outline.endswith(self.end)
            and self.outline.fullmatch(outline) is not None
        )

    def match(self, name: str) -> Bound | None:
        """Return the indices and texts in a name; None if the name does not match."""
        match = self.regex.fullmatch(name)
        if match is None:
            return None
        bound: Bound = {}
        for hole, text in zip(self.holes.values(), match.groups(), strict=True):
            if not hole.read(text, bound):
                return None
        return bound

    def fill(self, bound: Mapping[str, Any]) -> str:
        """Return the name with these indices and texts."""
        parts = self.texts.copy()
        for number, hole in self.holes.items():
            parts[number] = hole.write(bound)
        return "".join(parts)

    def counts(self) -> dict[str, int]:
        """Return the number of indices of each placeholder that has an end."""
        ends = {hole.key: hole.count for hole in self.holes.values()}
        return {key: count for key, count in ends.items() if count is not None}


def _pattern(part: Part) -> str:
    if isinstance(part, str):
        return re.escape(part)
    if isinstance(part, WordHole):
        return f"({'|'.join(map(re.escape, part.words))})"
    return "(.+)" if isinstance(part, TextHole) else _NUMBER


def _outline(part: Part) -> str:
    if isinstance(part, NumberHole):
        return "0+"
    return re.escape(outline_of(part)) if isinstance(part, str) else outline_of(_pattern(part))


class _Hole:
    """A placeholder: reads its text into a bound value, and writes it."""

    key: str
    count: int | None = None

    def read(self, text: str, bound: Bound) -> bool:
        """Bind the text; return False if it does not fit."""
        raise NotImplementedError

    def write(self, bound: Mapping[str, Any]) -> str:
        raise NotImplementedError


class _FilledText(_Hole):
    def __init__(self, part: TextHole) -> None:
        self.key = f"*{part.name}"

    def read(self, text: str, bound: Bound) -> bool:
        bound[self.key] = text
        return True

    def write(self, bound: Mapping[str, Any]) -> str:
        text: str = bound[self.key]
        return text


class _FilledWord(_Hole):
    def __init__(self, part: WordHole) -> None:
        self.key, self.words, self.count = part.axis, part.words, len(part.words)
        self.indices = {word: index for index, word in enumerate(part.words)}

    def read(self, text: str, bound: Bound) -> bool:
        bound[self.key] = self.indices[text]
        return True

    def write(self, bound: Mapping[str, Any]) -> str:
        word: str = self.words[bound[self.key]]
        return word


class _FilledIndex(_Hole):
    """Any number, which is one axis."""

    def __init__(self, part: NumberHole) -> None:
        self.key = part.digits[0].axis

    def read(self, text: str, bound: Bound) -> bool:
        bound[self.key] = int(text)
        return True

    def write(self, bound: Mapping[str, Any]) -> str:
        return str(bound[self.key])


class _FilledNumber(_Hole):
    """A number with a start, an end, limits or several axes."""

    def __init__(self, part: NumberHole, known: KnownSizes) -> None:
        self.key = part.digits[0].axis
        self.start = known.number(part.start) if part.start else 0
        self.stop = known.number(part.stop) if part.stop else None
        if self.stop is not None and len(part.digits) == 1:
            self.count = max(0, self.stop - self.start)
        self.digits = [
            (
                digit,
                known.radix_of(digit.axis) if n else 0,
                known.number(digit.limit) if digit.limit else None,
            )
            for n, digit in enumerate(part.digits)
        ]

    def read(self, text: str, bound: Bound) -> bool:
        number = int(text)
        if number < self.start or (self.stop is not None and number >= self.stop):
            return False
        number -= self.start
        for digit, radix, limit in reversed(self.digits):
            number, index = divmod(number, radix) if radix else (0, number)
            if limit is not None and (index != limit if digit.is_fixed else index >= limit):
                return False
            if not digit.is_fixed:
                bound[digit.axis] = index
        return True

    def write(self, bound: Mapping[str, Any]) -> str:
        number = 0
        for digit, radix, limit in self.digits:
            number = number * radix + (limit or 0 if digit.is_fixed else bound[digit.axis])
        return str(number + self.start)


def _hole(part: TextHole | WordHole | NumberHole, known: KnownSizes) -> _Hole:
    if isinstance(part, TextHole):
        return _FilledText(part)
    if isinstance(part, WordHole):
        return _FilledWord(part)
    is_plain = len(part.digits) == 1 and not part.start and not part.stop
    return _FilledIndex(part) if is_plain else _FilledNumber(part, known)
