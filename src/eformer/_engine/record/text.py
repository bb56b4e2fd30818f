"""Format numbers and names for display."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MOST_PROBLEMS = 5
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MOST_LINES = 30
_WIDTH = 160


def size(nbytes: float) -> str:
    """Format a number of bytes with three digits and a unit."""
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1000, unit + 1
    shown = f"{nbytes:.0f}" if unit == 0 or nbytes >= 99.95 else f"{nbytes:.3g}"
    return f"{shown} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """Return the number of bytes of a text such as 500MB, 2GB or 1.5GiB. Raise ValueError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write 500MB, 2GB or 1.5GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def printable(text: str) -> str:
    """Escape characters that a terminal would interpret or cannot show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun, in the plural if needed: `plural`, or the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def bar(part: float, width: int, *, ascii_only: bool = False) -> str:
    """Draw a bar for a fraction, in eighths of a character. A fraction above zero is always visible."""
    if ascii_only:
        return "#" * max(round(part * width), int(part > 0))
    eighths = round(part * width * 8)
    if part > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def shortened(text: str, width: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= width or width < 3:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def glance(text: str) -> str:
    """Cut a text to the lines that fit a prompt or a notebook, and escape it."""
    lines = text.split("\n")
    shown = [shortened(printable(line), _WIDTH) for line in lines[:_MOST_LINES]]
    more = len(lines) - _MOST_LINES
    return "\n".join([*shown, f"... and {count(more, 'more line')}"] if more > 0 else shown)


def few(problems: Sequence[str]) -> str:
    """Join the first few texts, and count the rest."""
    shown = "; ".join(problems[:_MOST_PROBLEMS])
    more = len(problems) - _MOST_PROBLEMS
    return f"{shown}; and {more:,} more" if more > 0 else shown
