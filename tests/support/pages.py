"""Read the documents: blocks of code and how they are marked, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"<!-- (?P<kind>not run|file): (?P<text>.+?) -->\s*")
_GENERATED = re.compile(
    r"^<!-- (?:bench|faults): (\w+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL
)
_MODULE = re.compile(r"(?<![\w/:.])(?:[\w*-]+/)+[\w*-]+\.py\b")


@dataclass(frozen=True)
class Block:
    """A block of code in a page. A comment before it may say why it is `not_run`, or which `file` it is."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    file: str = ""


def pages() -> list[str]:
    """Return all documents, by their paths in the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found if not {"_build", "_site"} & set(path.parts))


@cache
def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in their order. Indented ones are shell if they begin with a command of eformer."""
    return list(_blocks(page))


def _blocks(page: str) -> Iterator[Block]:
    mark = None
    for token in MarkdownIt().parse((ROOT / page).read_text("utf-8")):
        if token.type in ("fence", "code_block"):
            kind, text = (mark["kind"], mark["text"]) if mark else ("", "")
            yield Block(
                page,
                (token.map or [0])[0] + 1,
                _language(token),
                token.content,
                not_run=text if kind == "not run" else "",
                file=text if kind == "file" else "",
            )
        mark = _MARK.fullmatch(token.content) if token.type == "html_block" else None


def _language(token: Token) -> str:
    if token.type == "code_block":
        return "sh" if token.content.startswith("eformer ") else "text"
    return "pycon" if token.info == "python" and ">>>" in token.content else token.info


def anchors(page: str) -> set[str]:
    """Return the anchors that the headings of a page get, on GitHub as on the site."""
    tokens = MarkdownIt().parse((ROOT / page).read_text("utf-8"))
    titles = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open"]
    found: set[str] = set()
    for title in titles:
        slug = _slug("".join(child.content for child in title.children or ()))
        found.add(next(each for each in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if each not in found))
    return found


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def links(page: str) -> list[str]:
    """Return where the links and pictures of a page lead."""
    tokens = [t for t in MarkdownIt("commonmark").enable("table").parse(_text(page)) if t.type == "inline"]
    children = [child for token in tokens for child in token.children or ()]
    return [str(child.attrGet("href") or child.attrGet("src") or "") for child in children if child.attrs]


def long_lines(page: str, most: int) -> list[tuple[int, str]]:
    """Return the lines of more than `most` characters, by number, outside of code and of generated tables."""
    lines = _text(page).splitlines()
    exempt: set[int] = set()
    for token in MarkdownIt().parse("\n".join(lines)):
        if token.type in ("fence", "code_block") and token.map:
            exempt.update(range(*token.map))
    for found in _GENERATED.finditer("\n".join(lines)):
        first = found.string.count("\n", 0, found.start())
        exempt.update(range(first, first + found[0].count("\n") + 1))
    return [(at + 1, line) for at, line in enumerate(lines) if len(line) > most and at not in exempt]


def modules(page: str) -> list[str]:
    """Return the paths of Python modules that a page names in code between backticks."""
    tokens = [t for t in MarkdownIt("commonmark").enable("table").parse(_text(page)) if t.type == "inline"]
    code = [child.content for t in tokens for child in t.children or () if child.type == "code_inline"]
    return [name for text in code for name in _MODULE.findall(text)]


def _text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def in_navigation() -> set[str]:
    """Return the pages that the navigation of the site has, as paths in the repository."""
    blocks = re.findall(
        r"^```\{toctree\}\n(.*?)^```", _text("docs/_site/navigation.md"), re.MULTILINE | re.DOTALL
    )
    entries = [line for block in blocks for line in block.splitlines() if line and line[0] != ":"]
    names = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
    return {str(_page(ROOT / "docs" / name).relative_to(ROOT)) for name in names}


def _page(path: Path) -> Path:
    """Return the file of a page: a notebook, if there is one of that name."""
    notebook = path.with_name(f"{path.name}.ipynb")
    return notebook if notebook.exists() else path.with_name(f"{path.name}.md").resolve()
