"""Turn docstrings as this project writes them into reStructuredText, which autodoc expects.

A table of arguments (`name   what it means`, continued on lines that are indented) becomes a list of fields, and an
indented paragraph becomes a block of code. Everything else is left as it is.
"""

import re
from collections.abc import Iterable, Iterator

_ROW = re.compile(r"(\w+(?:, \w+)*)(?: {2,}(\S.*))?")
_INDENTED = re.compile(r" {4,}\S")
_PLURAL = re.compile(r"(`[^`]+`)s\b")  # which has to be marked: `array`s


def as_rst(lines: Iterable[str], field: str = "param") -> list[str]:
    """Return the lines of a docstring as reStructuredText. `field` is the role of a table's rows."""
    converted = (
        line
        for paragraph in _paragraphs(lines)
        for line in (*_converted(paragraph, field), "")
    )
    return [_PLURAL.sub(r"\1\\ s", line) for line in converted]


def rows(docstring: str) -> dict[str, str]:
    """Return the rows of a docstring's tables: names, and what is said of them."""
    return {
        name: text
        for paragraph in _paragraphs(docstring.splitlines())
        if _is_table(paragraph)
        for names, text in _table(paragraph)
        for name in names.split(", ")
    }


def _paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in (*lines, ""):
        # "Example:" is a heading, whether a blank line follows it or not.
        if not line.strip() or paragraph == ["Example:"]:
            if paragraph:
                yield paragraph
            paragraph = []
        if line.strip():
            paragraph.append(line)


def _converted(paragraph: list[str], field: str) -> list[str]:
    if paragraph == ["Example:"]:
        return [".. rubric:: Example"]
    if _is_table(paragraph):
        return [f":{field} {name}: {text}" for name, text in _table(paragraph)]
    if _INDENTED.match(paragraph[0]):
        language = (
            "pycon" if paragraph[0].lstrip().startswith(">>>") else "python"
        )
        return [f".. code-block:: {language}", "", *paragraph]
    return paragraph


def _is_table(paragraph: list[str]) -> bool:
    first = _ROW.fullmatch(paragraph[0])
    return bool(first and first[2]) and all(
        _ROW.fullmatch(x) or x.startswith("  ") for x in paragraph
    )


def _table(paragraph: list[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in paragraph:
        if line.startswith("  "):
            name, text = found.pop()
            found.append((name, f"{text} {line.strip()}".strip()))
        else:
            name, text = _ROW.fullmatch(line).groups(default="")
            found.append((name, text))
    return found
