"""Turn docstrings as this project writes them into reStructuredText, which autodoc expects.

A table of arguments (`name   what it means`, continued on lines that are indented) becomes a list of definitions with
their types, a line such as `Where to:` before a table its heading, and an indented paragraph a block of code. Names of
the API between backticks become links. Everything else is left as it is.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

_ROW = re.compile(r"(\w+(?:, \w+)*)(?: {2,}(\S.*))?")
_INDENTED = re.compile(r" {4,}\S")
# The plural of code has to be marked: `array`s. A URL without an address, such as s3://, is no link.
_MARKED = re.compile(r"`(?P<name>[^`]+)`(?P<plural>s\b)?|://")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
# Types by the short names that annotations have.
_READABLE = {
    "Path": "str | os.PathLike[str]",
    "Key": "str | os.PathLike[str] | bytes",
    "Format": 'Literal["safetensors", "zarr"]',
    "Rules": "Mapping[str, PartitionSpec] | Sequence[tuple[str, PartitionSpec]]",
    "RenameRules": "str | os.PathLike[str] | Sequence | Mapping[str, str | None]",
    "Snapshot": 'Literal["auto", "device", "host"]',
    "Resize": "Mapping[str, Callable] | Callable",
    "Progress": "bool | Callable[[int, int], object] | None",
}

Find = Callable[[str], str | None]


def as_rst(
    lines: Iterable[str],
    *,
    types: Mapping[str, str] | None = None,
    find: Find = lambda name: None,
) -> list[str]:
    """Return the lines of a docstring as reStructuredText. `types` are those of arguments and fields by name, and
    `find` returns the full name of a name of the API."""
    paragraphs = list(_paragraphs(lines))
    converted: list[str] = []
    for paragraph, following in zip(
        paragraphs, [*paragraphs[1:], None], strict=True
    ):
        if following and _is_heading(paragraph) and _is_table(following):
            converted += [f".. rubric:: {paragraph[0].rstrip(':')}", ""]
        else:
            converted += [*_converted(paragraph, types or {}, find), ""]
    return converted


def typed(annotation: str, find: Find) -> str:
    """Return a type as text in which the names of the API are links."""
    readable = re.sub(
        r"(?<![\w.])[A-Z]\w+(?![\w.])",
        lambda found: _READABLE.get(found[0], found[0]),
        annotation,
    )
    parts = re.split(rf"({_NAME.pattern})", readable.replace('"', "'"))
    return "".join(
        f"\\ {_link(part, find(part))}\\ " if find(part) else _escaped(part)
        for part in parts
    )


def _escaped(text: str) -> str:
    return re.sub(r"([*|`_])", r"\\\1", text)


def _link(name: str, target: str) -> str:
    return f":py:obj:`{name} <{target}>`"


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


def _converted(
    paragraph: list[str], types: Mapping[str, str], find: Find
) -> list[str]:
    if paragraph == ["Example:"]:
        return [".. rubric:: Example"]
    if _is_table(paragraph):
        return [
            line
            for names, text in _table(paragraph)
            for line in _definition(names, text, types, find)
        ]
    if _INDENTED.match(paragraph[0]):
        is_session = paragraph[0].lstrip().startswith(">>>")
        language = "pycon" if is_session else "python"
        return [f".. code-block:: {language}", "", *paragraph]
    return [_with_links(line, find) for line in paragraph]


def _definition(
    names: str, text: str, types: Mapping[str, str], find: Find
) -> list[str]:
    term = ", ".join(f"**{name}**" for name in names.split(", "))
    if annotation := types.get(names.split(", ")[0]):
        term += f" : {typed(annotation, find)}"
    return [term, f"    {_with_links(text, find)}"]


def _with_links(line: str, find: Find) -> str:
    return _MARKED.sub(lambda found: _shown(found, find), line)


def _shown(found: re.Match[str], find: Find) -> str:
    if not found["name"]:
        return f"\\{found[0]}"
    name, plural = found["name"], r"\ s" if found["plural"] else ""
    target = find(name) if _NAME.fullmatch(name) else None
    return (_link(name, target) if target else f"`{name}`") + plural


def _is_heading(paragraph: list[str]) -> bool:
    return len(paragraph) == 1 and paragraph[0].endswith(":")


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
