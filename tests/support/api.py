"""List the public names: what they are, and where the API pages have them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from support.pages import ROOT, blocks, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = [
    "eformer.checkpoint",
    "eformer.errors",
    "eformer.paths",
    "eformer.pytree._serialization",
    "eformer.serialization.async_manager",
    "eformer.serialization.checkpointer",
    "eformer.serialization.serialization",
    "eformer.serialization.utils",
]
_NEEDS_KERAS = "eformer.keras."  # tests/frameworks imports it
_DIRECTIVE = re.compile(
    r"^\.\. auto(?P<kind>function|class|exception|data|module):: (?P<name>\S+)(?P<options>(?:\n   :.*)*)",
    re.MULTILINE,
)


def public() -> dict[str, Any]:
    """Return the public names of all modules, and what they name."""
    return {
        f"{module}.{name}": getattr(import_module(module), name)
        for module in MODULES
        for name in _names_in(import_module(module))
    }


def _names_in(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name, value in vars(module).items() if _is_defined_in(module, value)]


def _is_defined_in(module: Any, value: Any) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__ and value.__name__[0] != "_"


def on_pages() -> dict[str, list[str]]:
    """Return the names that the API pages have, with the members of classes that they show."""
    found: dict[str, list[str]] = {}
    text = "\n".join(b.text for page in pages() if page.startswith("docs/api/") for b in blocks(page))
    for directive in _DIRECTIVE.finditer(text):
        name, members = directive["name"], _members_in(directive["options"])
        if directive["kind"] == "module":
            found |= {f"{name}.{each}": [] for each in _names_in(import_module(name))}
        else:
            found[name] = members
    return {name: members for name, members in found.items() if not name.startswith(_NEEDS_KERAS)}


def _members_in(options: str) -> list[str]:
    match = re.search(r":members:(.*)", options)
    return [member.strip() for member in match[1].split(",")] if match else []


def calls() -> Iterator[tuple[str, Any, str]]:
    """Return every public function, constructor and method that the pages show, with the text that documents it."""
    shown = on_pages()
    for name, value in public().items():
        if inspect.isclass(value):
            if not issubclass(value, Exception):
                yield name, value, inspect.getdoc(value) or ""
            yield from _methods(name, value, shown[name])
        elif callable(value):
            yield name, value, inspect.getdoc(value) or ""


def _methods(name: str, kind: type, members: list[str]) -> Iterator[tuple[str, Any, str]]:
    for member, value in vars(kind).items():
        function = getattr(value, "__func__", value)  # of static and class methods
        if inspect.isfunction(function) and (member in members or (members == [""] and member[0] != "_")):
            yield f"{name}.{member}", function, inspect.getdoc(value) or ""


def arguments(call: Any) -> list[str]:
    """Return the names of the arguments that a caller can give."""
    found = inspect.signature(call).parameters.values()
    plain = (p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [p.name for p in plain if p.name not in ("self", "cls") and p.name[0] != "_"]


def source_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")
