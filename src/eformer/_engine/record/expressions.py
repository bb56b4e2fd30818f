"""Compute the numbers of rules from a model's config.json: `head_dim or hidden_size / num_attention_heads`.

An expression has numbers, keys of config.json with dots, names of other lines, + - * / % ( ), sqrt(), bf16(), and `or`,
which takes the first number that exists. It is parsed here and never passed to Python.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Number = int | float

_MOST_CHARACTERS = 500
_MOST_DEPTH = 32  # of parentheses, and of names that refer to names
_MOST = 2**63

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*(?:\.\w+)*|\d+(?:\.\d+)?|[-+*/%()])", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]")


def _divide(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _bf16(number: Number) -> float:
    with np.errstate(over="ignore"):  # `_computed` refuses infinity
        return float(np.float32(number).astype(ml_dtypes.bfloat16))


_BINARY: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Number], Number]] = {"sqrt": math.sqrt, "bf16": _bf16}


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: its text, and its operands and operators in the order of their evaluation."""

    text: str
    code: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return self.text


def parse_expression(text: str) -> Expression:
    """Parse an expression. Raise FormatError if it is none."""
    if len(text) > _MOST_CHARACTERS:
        raise FormatError(
            f"an expression has at most {_MOST_CHARACTERS} characters, and this one {len(text):,}"
        )
    parser = _Parser(text, _tokens(text))
    parser.alternatives()
    if parser.at < len(parser.tokens):
        raise parser.error(f"unexpected {parser.tokens[parser.at]!r}")
    return Expression(text.strip(), tuple(parser.code))


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise FormatError(f"{text.strip()!r} is not an expression: unexpected {text[at:].lstrip()[:1]!r}")
        found.append(match[1])
        at = match.end()
    return found


class _Parser:
    """Write the tokens of an expression in the order of their evaluation."""

    def __init__(self, text: str, tokens: Sequence[str]) -> None:
        self.text, self.tokens = text, tokens
        self.at = self.depth = 0
        self.code: list[tuple[str, Any]] = []

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.text.strip()!r} is not an expression: {problem}")

    def take(self, *expected: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in expected:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def alternatives(self) -> None:
        self.sum()
        while self.take("or"):
            self.sum()
            self.code.append(("or", None))

    def sum(self) -> None:
        self.product()
        while sign := self.take("+", "-"):
            self.product()
            self.code.append(("binary", sign))

    def product(self) -> None:
        self.operand()
        while sign := self.take("*", "/", "%"):
            self.operand()
            self.code.append(("binary", sign))

    def operand(self) -> None:
        if self.take("-"):
            self.code.append(("number", 0))
            self.atom()
            self.code.append(("binary", "-"))
        else:
            self.atom()

    def atom(self) -> None:
        if self.at == len(self.tokens):
            raise self.error("it ends too early")
        word, self.at = self.tokens[self.at], self.at + 1
        if word == "(":
            self.nested()
        elif word[0].isdigit():
            self.code.append(("number", float(word) if "." in word else int(word)))
        elif not _NAME.match(word) or word == "or":
            raise self.error(f"unexpected {word!r}")
        elif self.take("("):
            if word not in _FUNCTIONS:
                raise self.error(f"unknown function {word!r}; expected sqrt or bf16")
            self.nested()
            self.code.append(("function", word))
        else:
            self.code.append(("name", word))

    def nested(self) -> None:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise self.error(f"more than {_MOST_DEPTH} parentheses")
        self.alternatives()
        self.depth -= 1
        if not self.take(")"):
            raise self.error("a parenthesis is not closed")


class Numbers:
    """The numbers that rules can refer to: names with expressions, and the keys of config.json."""

    def __init__(self, lets: Mapping[str, Expression], config: Mapping[str, Any]) -> None:
        self.lets, self.config = lets, config
        self._values: dict[str, Number | None] = {}
        self._open: list[str] = []

    def get(self, expression: Expression) -> Number | None:
        """Return the value; None if config.json lacks a key. Raise FormatError if there can be no value."""
        stack: list[Number | None] = []
        for kind, operand in expression.code:
            if kind == "number":
                stack.append(operand)
            elif kind == "name":
                stack.append(self.named(operand))
            elif kind == "function":
                stack.append(_computed(expression, _FUNCTIONS[operand], stack.pop()))
            else:
                second, first = stack.pop(), stack.pop()
                is_or = kind == "or"
                either = second if first is None else first
                stack.append(either if is_or else _computed(expression, _BINARY[operand], first, second))
        return stack[0]

    def require(self, expression: Expression) -> Number:
        """Return the value. Raise FormatError if config.json lacks a key."""
        value = self.get(expression)
        if value is None:
            missing = [n for kind, n in expression.code if kind == "name" and self.named(n) is None]
            lacks = (
                f"config.json has no {' and no '.join(dict.fromkeys(missing))}"
                if self.config
                else "no config.json"
            )
            raise FormatError(
                f"{expression} is unknown ({lacks}); pass config= with it, or write a line NAME = NUMBER"
            )
        return value

    def named(self, name: str) -> Number | None:
        """Return the number of a name, or of a key of config.json; None without either."""
        if name not in self.lets or name == (self._open[-1] if self._open else None):
            return self._in_config(name)
        if name not in self._values:
            if name in self._open or len(self._open) >= _MOST_DEPTH:
                raise FormatError(
                    f"the numbers of these names need each other: {' -> '.join([*self._open, name])}"
                )
            self._open.append(name)
            try:
                self._values[name] = self.get(self.lets[name])
            finally:
                self._open.pop()
        return self._values[name]

    def _in_config(self, name: str) -> Number | None:
        found: Any = self.config
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            return None
        if not isinstance(found, (int, float)) or not math.isfinite(found):
            raise FormatError(f"{name} of config.json is {str(found)[:60]!r}, which is not a number")
        return int(found) if isinstance(found, bool) else found


def _computed(
    expression: Expression, function: Callable[..., Number], *operands: Number | None
) -> Number | None:
    """Return the result; None if an operand does not exist, an integer where the result is integral."""
    if None in operands:
        return None
    try:
        value = function(*operands)
    except (ArithmeticError, ValueError) as error:
        raise FormatError(f"{expression} has no value: {error}") from error
    if not math.isfinite(value) or abs(value) >= _MOST:
        raise FormatError(f"{expression} is too large")
    return int(value) if value == int(value) else value
