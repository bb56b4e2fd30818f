"""Write the card of an exported model: its licence and base model, and how it was made. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eformer._engine.record.origin import book_in, rules_in
from eformer._engine.record.text import few, size
from eformer._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_COPIED = ("license", "license_name", "license_link", "pipeline_tag", "language")
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_ENTRY = re.compile(r"([A-Za-z0-9_-]+):(.*)")
_MOST_LINES = 64
_MOST_LINE = 500  # characters
_STEP = re.compile(r"step-\d+$")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_IN_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a directory of the Hub's cache


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts that a card states.

    base      the id of the model on the Hub that `like` is; "" for a directory of this machine
    front     the entries of the front matter of like's card
    steps     lines about how the weights were made
    """

    base: str
    front: Mapping[str, Sequence[str]]
    parameters: int
    nbytes: int
    dtype: str
    steps: Sequence[str] = field(default_factory=tuple)


def front_matter(card: str) -> dict[str, list[str]]:
    """Return the entries of a card's front matter by name: their lines, as they are."""
    match = _FRONT.match(card)
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in match[1].splitlines() if match else []:
        if entry := _ENTRY.fullmatch(line):
            lines = entries[entry[1]] = []
        lines.append(line)
    return {name: lines for name, lines in entries.items() if _is_short(lines)}


def _is_short(lines: Sequence[str]) -> bool:
    return len(lines) <= _MOST_LINES and all(len(line) <= _MOST_LINE and line.isprintable() for line in lines)


def hub_id(url: str) -> str:
    """Return the id of a model on the Hub, from its URL or from its place in the Hub's cache; "" for other places."""
    if url.startswith("hf://"):
        name = url.removeprefix("hf://").partition("@")[0]
        return "/".join(name.split("/")[:2])
    found = _IN_CACHE.search(url)
    return f"{found[1]}/{found[2]}" if found else ""


def model_card(facts: CardFacts) -> str:
    """Return the text of the card."""
    made = [f"- {line}" for line in facts.steps]
    amount = f"{facts.parameters:,} parameters, {size(facts.nbytes)}, mostly {facts.dtype}"
    head = [*_head(facts)]
    title = facts.base.rpartition("/")[2] or "Model"
    return "\n".join(
        ["---", *head, "---", "", f"# {title}", "", f"{amount}.", "", "## Origin", "", *made, ""]
    )


def _head(facts: CardFacts) -> Iterator[str]:
    if _HUB_ID.fullmatch(facts.base):
        yield f"base_model: {facts.base}"
    else:
        yield from facts.front.get("base_model", ())
    for name in _COPIED:
        yield from facts.front.get(name, ())
    yield "library_name: transformers"


def card_lines(origin: Mapping[str, Any], parents: Sequence[Mapping[str, Any]], like: str) -> list[str]:
    """Return the lines about how the weights were made. Paths of this machine stay out of a card that is published.

    origin    the origin of the tree that is exported
    parents   the checkpoint that has the tree, or the checkpoints that are merged
    """
    known = [_parent_words(parent) for parent in parents if parent.get("digest")]
    lines = [f"Exported by eformer {__version__}{f' from {known[0]}' if known else ''}."]
    if len(parents) > 1:
        lines = [
            f"Merged by eformer {__version__} from {len(parents)} checkpoints{': ' * bool(known)}{few(known)}."
        ]
    if book := book_in(origin):
        version = f", version {rules_in(origin)['version']}" if rules_in(origin).get("version") else ""
        lines.append(f"Names and layouts by the rules {book}{version}, read backwards.")
    if like:
        lines.append(f"Configuration and tokenizer are those of {like}.")
    lines.append("`manifest.json` has a digest of every piece of the weights: `eformer verify` checks them.")
    return lines


def _parent_words(parent: Mapping[str, Any]) -> str:
    """Describe a checkpoint without its path, which may be of this machine."""
    name = f"{match[0]}, " if (match := _STEP.search(str(parent.get("path", "")))) else ""
    return f"{name}a checkpoint with the digest {parent['digest']}"
