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
