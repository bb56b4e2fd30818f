"""Match the names of leaves with the placeholders of rules, and fill placeholders in.

Tests: tests/engine/record/test_rename_axes.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from eformer._engine.record.axes import all_names
from eformer._engine.record.notation import Digit, Index, Text, Words
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.record.expressions import Expression, Numbers
    from eformer._engine.record.notation import AxisRule, Leaf, Part

Bound = dict[str, Any]
"""The index of each axis in a name; by a star and its name, the text of each placeholder of text."""

_NUMBER = "(0|[1-9][0-9]{0,9})"
_TO_ZERO = str.maketrans("123456789", "000000000")


def outline_of(name: str) -> str:
    """Return a name with all digits 0. Names of one outline fit the same rules, or almost."""
    return name.translate(_TO_ZERO)


def _digits_of(rule: AxisRule) -> Iterator[Digit]:
    for leaf in (*rule.left, *rule.right):
        for part in leaf.parts:
            if isinstance(part, Index):
                yield from part.digits


class KnownSizes:
    """The sizes of axes that a rule has before it sees an array.

    sizes    by axis: the number of its words, the number of its line, or its limit
    radix    as `sizes`, without limits: how far the number in a name rises by the axis before
    """

    def __init__(self, rule: AxisRule, numbers: Numbers) -> None:
        self.numbers, self.radix = numbers, dict[str, int]()
        leaves = (*rule.left, *rule.right)
        names = {name for leaf in leaves for axis in leaf.axes or () for name in all_names(axis)}
        for name in sorted(names | {digit.axis for digit in _digits_of(rule)}):
            if name in numbers.lets and (value := numbers.named(name)) is not None:
                self.radix[name] = self.natural(value, name)
        words = (part for leaf in leaves for part in leaf.parts if isinstance(part, Words))
        self.radix |= {part.axis: len(part.words) for part in words}
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

    def __init__(self, leaf: Leaf, known: KnownSizes) -> None:
        self.leaf = leaf
        self.holes = [_Hole(part, known) for part in leaf.parts if not isinstance(part, str)]
        patterns = [_pattern(part) for part in leaf.parts]
        self.regex = re.compile("".join(patterns), re.DOTALL)
        self.outline = re.compile("".join(_outline(part) for part in leaf.parts), re.DOTALL)
        holes = iter(self.holes)
        self.pieces = [part if isinstance(part, str) else next(holes) for part in leaf.parts]
        first, last = leaf.parts[0], leaf.parts[-1]
        self.begin = outline_of(first) if isinstance(first, str) else ""
        self.end = outline_of(last) if isinstance(last, str) else ""

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
        for hole, text in zip(self.holes, match.groups(), strict=True):
            if not hole.read(text, bound):
                return None
        return bound

    def fill(self, bound: Mapping[str, Any]) -> str:
        """Return the name with these indices and texts."""
        return "".join(piece if isinstance(piece, str) else piece.write(bound) for piece in self.pieces)


def _pattern(part: Part) -> str:
    if isinstance(part, str):
        return re.escape(part)
    if isinstance(part, Words):
        return f"({'|'.join(map(re.escape, part.words))})"
    return "(.+)" if isinstance(part, Text) else _NUMBER


def _outline(part: Part) -> str:
    if isinstance(part, Index):
        return "0+"
    return re.escape(outline_of(part)) if isinstance(part, str) else outline_of(_pattern(part))


class _Hole:
    """A placeholder: reads its text into indices, and writes it."""

    def __init__(self, part: Part, known: KnownSizes) -> None:
        assert not isinstance(part, str)
        self.part = part
        self.start, self.stop = 0, None
        self.digits: list[tuple[str, int, int | None, bool]] = []  # name, radix, limit, whether the limit is the index
        if isinstance(part, Text):
            self.key = f"*{part.name}"
        elif isinstance(part, Words):
            self.key, self.numbers = part.axis, {word: n for n, word in enumerate(part.words)}
        else:
            self.start = known.number(part.start) if part.start else 0
            self.stop = known.number(part.stop) if part.stop else None
            for number, digit in enumerate(part.digits):
                radix = known.radix_of(digit.axis) if number else 0
                limit = known.number(digit.limit) if digit.limit else None
                self.digits.append((digit.axis, radix, limit, digit.is_fixed))
            self.key = part.digits[0].axis
            self.is_plain = len(part.digits) == 1 and not part.start and not part.stop

    def read(self, text: str, bound: Bound) -> bool:
        part = self.part
        if isinstance(part, Text):
            bound[self.key] = text
        elif isinstance(part, Words):
            bound[self.key] = self.numbers[text]
        elif self.is_plain:
            bound[self.key] = int(text)
        else:
            return self._read_number(int(text), bound)
        return True

    def _read_number(self, number: int, bound: Bound) -> bool:
        if number < self.start or (self.stop is not None and number >= self.stop):
            return False
        number -= self.start
        for name, radix, limit, is_fixed in reversed(self.digits):
            number, index = divmod(number, radix) if radix else (0, number)
            if limit is not None and (index != limit if is_fixed else index >= limit):
                return False
            if not is_fixed:
                bound[name] = index
        return True

    def write(self, bound: Mapping[str, Any]) -> str:
        part = self.part
        if isinstance(part, Text):
            text: str = bound[self.key]
            return text
        if isinstance(part, Words):
            return part.words[bound[self.key]]
        number = 0
        for name, radix, limit, is_fixed in self.digits:
            number = number * radix + (limit or 0 if is_fixed else bound[name])
        return str(number + self.start)

    @property
    def size(self) -> int | None:
        """Return the number of indices of a plain placeholder; None if any number fits."""
        return None if self.stop is None or len(self.digits) > 1 else max(0, self.stop - self.start)
