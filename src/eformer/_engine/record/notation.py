"""Parse rules that name axes: `layers.{l}.q.weight [(h k) d] <-> query [d l h k] | scale 1 / sqrt(k)`.

A rule becomes leaves, axes and steps, and knows no arrays. `docs/guides/renaming.md` describes the notation.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eformer._engine.record.dtypes import DTYPES, floating_dtype, is_floating
from eformer._engine.record.expressions import Expression, parse_expression
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_DEPTH = 16  # of groups in groups
_MOST_TEXTS = 3  # placeholders for text in a name: matching takes the square of its length or more with each
_MOST_WORDS = 8  # placeholders of words in a name: words may begin alike, and matching tries all of them

ONE = "1"
REST = "..."


@dataclass(frozen=True, slots=True)
class Group:
    """An axis made of several axes, the last one fastest: `(h k)`."""

    parts: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.parts))})"


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Blocks behind each other on one axis: `(h k)+(g k)`."""

    blocks: tuple[Axis, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.blocks))


Axis = str | Group | Concatenation
"""An axis of an array: the name of an axis, `1`, `...`, or axes combined."""


@dataclass(frozen=True, slots=True)
class TextHole:
    """A placeholder for any text: `{*q}`."""

    name: str


@dataclass(frozen=True, slots=True)
class WordHole:
    """A placeholder for one of some words, which are an axis: `{c=gate|up}`."""

    axis: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NumberAxis:
    """An axis in a number. `limit` is the end of its indices; with `is_fixed`, its only index, and it is no axis."""

    axis: str
    limit: Expression | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class NumberHole:
    """A placeholder for a number, which is one axis or several, the last one fastest: `{l}`, `{(b i)}`, `{N + l<M}`.

    The number begins at `start`, and is below `stop`.
    """

    digits: tuple[NumberAxis, ...]
    start: Expression | None = None
    stop: Expression | None = None


Part = str | TextHole | WordHole | NumberHole


@dataclass(frozen=True, slots=True)
class LeafPattern:
    """The name of a leaf, with placeholders, and its axes; None if the rule leaves the array as it is.

    `tied` is the leaf that is read where this one is missing.
    """

    text: str
    parts: tuple[Part, ...]
    axes: tuple[Axis, ...] | None
    tied: LeafPattern | None = None

    def __str__(self) -> str:
        return self.text if self.axes is None else f"{self.text} [{' '.join(map(str, self.axes))}]"

    @property
    def count(self) -> int:
        """Return the number of blocks."""
        return max((_count(axis) for axis in self.axes or ()), default=1)

    @property
    def texts(self) -> set[str]:
        return {part.name for part in self.parts if isinstance(part, TextHole)}

    def named(self) -> list[str]:
        """List the axes in the name."""
        words = (part.axis for part in self.parts if isinstance(part, WordHole))
        indices = (part for part in self.parts if isinstance(part, NumberHole))
        return [*(d.axis for index in indices for d in index.digits if not d.is_fixed), *words]

    def axes_of(self, block: int) -> list[str]:
        """List the axes of one block, in the name and in the brackets."""
        return self.named() + [name for axis in self.axes or () for name in names_in(axis, block)]


@dataclass(frozen=True, slots=True)
class ScalesPattern:
    """The leaf with the scales of quantised elements. `shared` has the elements along an axis that share a scale."""

    text: str
    leaf: LeafPattern
    shared: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ValueStep:
    """A step that changes values: scale, add, pad, cast, fill or dequant."""

    verb: str
    number: Expression | None = None
    axis: str = ""
    dtype: str = ""
    scales: ScalesPattern | None = None

    def __str__(self) -> str:
        words = (self.verb, self.axis, self.dtype, str(self.number or ""), str(self.scales or ""))
        return " ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One line: leaves on both sides, steps, and the condition under which the line counts."""

    where: str
    text: str
    left: tuple[LeafPattern, ...]
    right: tuple[LeafPattern, ...]
    steps: tuple[ValueStep, ...] = ()
    is_two_way: bool = True
    condition: Expression | None = None

    def __str__(self) -> str:
        return f"{self.where}, {self.text}"

    @property
    def scales(self) -> ScalesPattern | None:
        """Return the leaf with the scales, if the rule computes numbers from quantised elements."""
        return self.steps[0].scales if self.steps else None

    @property
    def cannot_go_back(self) -> str:
        """Tell why the rule cannot be read from right to left; "" if it can."""
        if self.scales:
            return "has dequant, and nothing is quantised on the way back"
        return "" if self.is_two_way else "has -> and cannot be read from right to left"

    @property
    def literal(self) -> str:
        """Return a name that the left side could match, to find the nearest existing one."""
        parts = self.left[0].parts if self.left else ()
        return "".join(
            p if isinstance(p, str) else p.words[0] if isinstance(p, WordHole) else "0" for p in parts
        )


# --------------------------------------------------------------------------------------------- axes


def names_in(axis: Axis, block: int) -> Iterator[str]:
    """Yield the names of the axes in one block."""
    if isinstance(axis, str):
        if axis != ONE:
            yield axis
    elif isinstance(axis, Concatenation):
        yield from names_in(axis.blocks[block], block)
    else:
        for part in axis.parts:
            yield from names_in(part, block)


def _count(axis: Axis) -> int:
    if isinstance(axis, Group):
        return max(map(_count, axis.parts))
    return len(axis.blocks) if isinstance(axis, Concatenation) else 1


def _concatenations(axis: Axis) -> int:
    if isinstance(axis, str):
        return 0
    inner = axis.parts if isinstance(axis, Group) else axis.blocks
    return isinstance(axis, Concatenation) + sum(map(_concatenations, inner))


_AXIS_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\.\.\.|1(?!\w)|[()+])", re.ASCII)


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Parse the text between brackets."""
    tokens, at = [], 0
    while at < len(text.rstrip()):
        if not (match := _AXIS_TOKEN.match(text, at)):
            raise FormatError(f"[{text}]: unexpected {text[at:].lstrip()[:1]!r}; an axis is a name, 1 or ...")
        tokens.append(match[1])
        at = match.end()
    axes, rest = _axes_until(tokens, 0, text, 0)
    if rest < len(tokens):
        raise FormatError(f"[{text}]: unexpected {tokens[rest]!r}")
    if axes.count(REST) > 1 or any(
        REST in names_in(a, j) for a in axes if a != REST for j in range(_count(a))
    ):
        raise FormatError(f"[{text}]: ... stands once, and in no group")
    if sum(map(_concatenations, axes)) > 1:
        raise FormatError(f"[{text}]: a leaf has at most one axis with +")
    return axes


def _axes_until(tokens: Sequence[str], at: int, text: str, depth: int) -> tuple[tuple[Axis, ...], int]:
    axes: list[Axis] = []
    while at < len(tokens) and tokens[at] != ")":
        blocks: list[Axis] = []
        while not blocks or (at < len(tokens) and tokens[at] == "+"):
            block, at = _block(tokens, at + bool(blocks), text, depth)
            blocks.append(block)
        axes.append(blocks[0] if len(blocks) == 1 else Concatenation(tuple(blocks)))
    return tuple(axes), at


def _block(tokens: Sequence[str], at: int, text: str, depth: int) -> tuple[Axis, int]:
    if at == len(tokens) or tokens[at] in "+)" or depth > _MOST_DEPTH:
        raise FormatError(
            f"[{text}]: expected an axis {'at the end' if at == len(tokens) else 'before ' + tokens[at]}"
        )
    if tokens[at] != "(":
        return tokens[at], at + 1
    parts, at = _axes_until(tokens, at + 1, text, depth + 1)
    if at == len(tokens) or not parts:
        raise FormatError(f"[{text}]: a group is {'not closed' if parts else 'empty'}")
    return Group(parts), at + 1


# ------------------------------------------------------------------------------------- placeholders

_HOLE = re.compile(r"\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INDEX = re.compile(r"(?:(?P<start>.+)\+)?\s*(?P<digits>\w+|\([^()]*\))\s*(?:<(?P<stop>.+))?", re.ASCII)
_DIGIT = re.compile(r"(\w+)(?:([<=])(\S+))?", re.ASCII)


def _parse_hole(text: str) -> TextHole | WordHole | NumberHole:
    if text.startswith("*"):
        return TextHole(_word(text[1:], text))
    axis, equals, words = text.partition("=")
    if equals and "(" not in axis:
        return _words(_word(axis, text), words.split("|"), text)
    if not (match := _INDEX.fullmatch(text.strip())):
        raise FormatError(
            f"{{{text}}} is no placeholder; expected {{l}}, {{(b i)}}, {{N + l}}, {{l<N}}, {{c=k|v}} or {{*q}}"
        )
    digits = tuple(_digit(digit, text) for digit in match["digits"].strip("()").split())
    if not digits or digits[0].limit:
        raise FormatError(f"{{{text}}}: only an inner axis of a number has a limit, such as {{(b i<5)}}")
    start, stop = (parse_expression(match[key]) if match[key] else None for key in ("start", "stop"))
    return NumberHole(digits, start, stop)


def _digit(text: str, hole: str) -> NumberAxis:
    match = _DIGIT.fullmatch(text)
    if not match:
        raise FormatError(
            f"{{{hole}}}: {text!r} is no axis; expected a name, or a name with a limit such as i<5"
        )
    limit = parse_expression(match[3]) if match[3] else None
    return NumberAxis(_word(match[1], hole), limit, match[2] == "=")


def _words(axis: str, words: Sequence[str], hole: str) -> WordHole:
    if not all(words) or len(set(words)) < len(words):
        raise FormatError(f"{{{hole}}}: the words differ from each other, and none is empty")
    return WordHole(axis, tuple(words))


def _word(text: str, hole: str) -> str:
    if not _WORD.fullmatch(text):
        raise FormatError(f"{{{hole}}}: {text!r} is not a name")
    return text


# -------------------------------------------------------------------------------------------- lines

_ARROW = re.compile(r"(?:^|\s+)(<->|->)(?:\s+|$)")
_LET = re.compile(r"([A-Za-z_]\w*)\s*=(.*)", re.ASCII)
_TEMPLATE = re.compile(r"\{[A-Za-z(*_]|\s\[[^\]]*\]$")
_NAME = re.compile(r"(?:\{[^{}]*\}|[^\s{}\[\],]|,(?!\s|$))+")
_COMMENT = re.compile(r"(?:^|\s)#.*")


def without_comment(line: str) -> str:
    return _COMMENT.sub("", line).strip()


def is_notation(line: str) -> bool:
    """Tell whether a line is a rule that names axes or has placeholders, and not a regular expression."""
    left, *rest = _ARROW.split(line, maxsplit=1)
    return bool(rest) and (rest[0] == "<->" or not left or _TEMPLATE.search(left) is not None)


def parse_let(line: str) -> tuple[str, Expression] | None:
    """Parse `NAME = EXPRESSION`; return None for other lines."""
    match = _LET.fullmatch(line)
    return (match[1], parse_expression(match[2])) if match and not _ARROW.search(line) else None


def parse_rule(where: str, line: str) -> AxisRule:
    """Parse a rule. Raise FormatError if it can fit no leaf."""
    body, _, condition = line.partition(" if ")
    body, *steps = re.split(r"\s+\|\s+", body)
    sides = _ARROW.split(body)
    if len(sides) != 3:
        raise FormatError("a rule is NAME [AXES] <-> NAME [AXES], with spaces around the arrow")
    rule = AxisRule(
        where,
        line,
        _parse_side(sides[0]),
        _parse_side(sides[2]),
        tuple(map(_parse_step, steps)),
        sides[1] == "<->",
        parse_expression(condition) if condition else None,
    )
    _check(rule)
    return rule


def _parse_side(text: str) -> tuple[LeafPattern, ...]:
    leaves: list[LeafPattern] = []
    at = 0
    while at < len(text):
        names, at = _parse_names(text, at)
        axes, at = _parse_brackets(text, at)
        tied = _leaf(names[1], axes) if len(names) > 1 else None
        leaves.append(_leaf(names[0], axes, tied))
        comma = re.compile(r"\s*,\s+|\s*$").match(text, at)
        if not comma:
            raise FormatError(
                f"unexpected {text[at:].strip()[:40]!r}; leaves are set apart by a comma and a space"
            )
        at = comma.end()
    return tuple(leaves)


def _parse_names(text: str, at: int) -> tuple[list[str], int]:
    names: list[str] = []
    while True:
        match = _NAME.match(text, at)
        if not match:
            raise FormatError(f"expected the name of a leaf, found {text[at:][:40]!r}")
        names.append(match[0])
        either = re.compile(r"\s+or\s+").match(text, match.end())
        if not either or len(names) == 2:
            return names, match.end()
        at = either.end()


def _parse_brackets(text: str, at: int) -> tuple[tuple[Axis, ...] | None, int]:
    match = re.compile(r"\s*\[([^\[\]]*)\]").match(text, at)
    return (parse_axes(match[1]), match.end()) if match else (None, at)


def _leaf(name: str, axes: tuple[Axis, ...] | None, tied: LeafPattern | None = None) -> LeafPattern:
    split = _HOLE.split(name)  # text and holes in turn
    parts = tuple(_parse_hole(part) if n % 2 else part for n, part in enumerate(split) if n % 2 or part)
    texts = [part.name for part in parts if isinstance(part, TextHole)]
    if len(texts) > _MOST_TEXTS or len(set(texts)) < len(texts):
        raise FormatError(f"{name} has more than {_MOST_TEXTS} placeholders of text, or one twice")
    if any(isinstance(a, NumberHole) and isinstance(b, NumberHole) for a, b in itertools.pairwise(parts)):
        raise FormatError(
            f"{name} has two numbers side by side, so that 12 could be 1 and 2; write text between them"
        )
    if sum(isinstance(part, WordHole) for part in parts) > _MOST_WORDS:
        raise FormatError(f"{name} has more than {_MOST_WORDS} placeholders of words")
    return LeafPattern(name, parts, axes, tied)


_STEPS = "scale X, add X, pad AXIS N, cast DTYPE, fill X, dequant NAME [AXES]"
_SHARED = re.compile(r"([A-Za-z_]\w*)\s*/\s*([1-9][0-9]{0,9})(?!\w)", re.ASCII)


def _parse_step(text: str) -> ValueStep:
    verb, _, rest = text.strip().partition(" ")
    if verb in ("scale", "add", "fill") and rest:
        return ValueStep(verb, parse_expression(rest))
    if verb == "pad" and (match := re.fullmatch(r"\s*([A-Za-z_]\w*)\s+(.+)", rest)):
        return ValueStep(verb, parse_expression(match[2]), axis=match[1])
    if verb == "cast" and rest:
        return ValueStep(verb, dtype=_dtype(rest))
    if verb == "dequant" and (match := re.fullmatch(r"(.+?)\s*\[([^\[\]]*)\]", rest)):
        return ValueStep(verb, scales=_parse_scales(rest.strip(), match[1].strip(), match[2]))
    raise FormatError(f"unknown step {text.strip()!r}; expected one of {_STEPS}")


def _parse_scales(text: str, name: str, brackets: str) -> ScalesPattern:
    if not _NAME.fullmatch(name):
        raise FormatError(f"dequant: expected the name of a leaf, found {name[:40]!r}")
    shared = tuple((axis, int(number)) for axis, number in _SHARED.findall(brackets))
    return ScalesPattern(text, _leaf(name, parse_axes(_SHARED.sub(r"\1", brackets))), shared)


def _dtype(text: str) -> str:
    if text in DTYPES and not is_floating(text):
        return text
    try:
        return floating_dtype(text)
    except ValueError as error:
        raise FormatError(f"cast: {error}") from error


# ------------------------------------------------------------------------------------------- checks


def blocks_of(leaves: Sequence[LeafPattern]) -> list[tuple[int, int]]:
    """List the blocks of a side in order, as the numbers of leaf and block."""
    return [(n, block) for n, leaf in enumerate(leaves) for block in range(leaf.count)]


def _check(rule: AxisRule) -> None:
    """Raise FormatError if the sides of a rule do not agree."""
    fills = [step for step in rule.steps if step.verb == "fill"]
    if not rule.right:
        if rule.steps or not rule.left:
            raise FormatError("a rule without a new name leaves the leaf out, and can have no steps")
        return
    if bool(fills) == bool(rule.left) or any(leaf.axes is None for leaf in rule.right if fills):
        raise FormatError("a constant leaf has nothing on the left, and axes and fill on the right")
    if fills:
        if [step.verb for step in rule.steps] not in (["fill"], ["fill", "cast"]):
            raise FormatError("fill is the first step, and only cast can follow it")
        return
    _check_brackets(rule)
    left, right = blocks_of(rule.left), blocks_of(rule.right)
    if len(left) != len(right):
        raise FormatError(f"{len(left)} blocks on the left, {len(right)} on the right")
    for (i, block), (j, other) in zip(left, right, strict=True):
        _check_axes(rule.left[i], block, rule.right[j], other)
        _check_words(rule.left[i], rule.right[j])
        if rule.left[i].texts ^ rule.right[j].texts and (
            rule.is_two_way or rule.right[j].texts - rule.left[i].texts
        ):
            raise FormatError("both sides have the same placeholders of text")


def _check_brackets(rule: AxisRule) -> None:
    leaves = [*rule.left, *rule.right]
    if len({leaf.axes is None for leaf in leaves}) > 1:
        raise FormatError("both sides have brackets, or neither has; write [...] for all axes")
    if leaves[0].axes is not None and len({REST in (leaf.axes or ()) for leaf in leaves}) > 1:
        raise FormatError("... stands on both sides, or on neither")
    if leaves[0].axes is None and any(step.verb == "pad" for step in rule.steps):
        raise FormatError("pad needs brackets with the axis on both sides")
    if any(leaf.tied for leaf in leaves) and (
        len(leaves) > 2 or rule.right[0].tied or rule.left[0].count > 1
    ):
        raise FormatError("`A or B` stands alone on the left, with one leaf on the right")
    _check_scales(rule)
    for step in rule.steps:
        if step.verb == "pad" and not any(step.axis in (leaf.axes or ()) for leaf in rule.right):
            raise FormatError(f"pad: {step.axis} is not an axis of its own on the right")


def _check_scales(rule: AxisRule) -> None:
    if not any(step.scales for step in rule.steps):
        return
    (leaf, *more), scales = rule.left, rule.scales
    if scales is None or any(step.scales for step in rule.steps[1:]):
        raise FormatError("dequant is the first step, and stands once")
    if more or leaf.axes is None or leaf.tied or leaf.count > 1:
        raise FormatError("dequant needs one leaf on the left, with brackets and without +")
    axes = [name for axis in leaf.axes for name in names_in(axis, 0)]
    names = [name for axis in scales.leaf.axes or () for name in names_in(axis, 0)]
    if scales.leaf.count > 1 or REST in names or len(set(names)) < len(names):
        raise FormatError("dequant: the scales have each axis once, and neither + nor ...")
    if unknown := [name for name in names if name not in axes]:
        raise FormatError(f"dequant: {unknown[0]} is no axis between the brackets of {leaf}")
    if set(scales.leaf.named()) - set(leaf.named()) or scales.leaf.texts - leaf.texts:
        raise FormatError(f"dequant: {scales.leaf.text} has placeholders that {leaf.text} lacks")


def _check_axes(left: LeafPattern, block: int, right: LeafPattern, other: int) -> None:
    sides = {"left": left.axes_of(block), "right": right.axes_of(other)}
    if left.tied and set(left.tied.named()) != set(left.named()):
        raise FormatError(f"{left.text} and {left.tied.text} have different placeholders")
    for side, names in sides.items():
        if twice := [name for name in names if names.count(name) > 1]:
            raise FormatError(f"axis {twice[0]} is twice on the {side}")
        others = sides["right" if side == "left" else "left"]
        if alone := [name for name in names if name not in others]:
            listed = ", ".join(f"{side}: {' '.join(names)}" for side, names in sides.items())
            axes = "axis" if len(alone) == 1 else "axes"
            are = "is" if len(alone) == 1 else "are"
            raise FormatError(
                f"{axes} {' '.join(alone)} {are} on the {side} only; both sides name the same axes ({listed})"
            )


def _check_words(left: LeafPattern, right: LeafPattern) -> None:
    words = {part.axis: part.words for part in left.parts if isinstance(part, WordHole)}
    for part in right.parts:
        if isinstance(part, WordHole) and len(words.get(part.axis, part.words)) != len(part.words):
            raise FormatError(
                f"{part.axis} has {len(words[part.axis])} words on the left, {len(part.words)} on the right"
            )
