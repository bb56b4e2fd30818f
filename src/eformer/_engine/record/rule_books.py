"""Find the rule books: texts that say how the leaves of a family of models are laid out in another program.

A file `eformer/rules/FAMILY.rules` serves some model types and has a section for each layout:

    # llama: Llama 2 and 3, Mistral 7B             the first line of the comment is the title
    # rules 1; tested with transformers 5.22.2     version and programs
    for llama, mistral                             model types, as `model_type` of config.json names them
    h = num_attention_heads                        numbers, for all layouts
    model.rotary.inv_freq ->                       rules above all layouts are a first stage of each
    [maxtext-unscanned]                            a layout
    [maxtext] after maxtext-unscanned              a layout with further stages, after another layout

`as llama` takes over the layouts of another file. The layouts of flax.rules, which names no model types, serve all
models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from eformer._engine.record.names import nearest
from eformer.errors import FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.resources.abc import Traversable

_GENERIC = "flax"  # the file that serves all model types
_MOST_NAMED = 12

_LAYOUT = re.compile(r"\[([\w-]+)\](?:\s+after\s+([\w-]+))?\s*(?:#.*)?")
_VERSION = re.compile(r"#\s*rules (\d+); tested with (.+)")
_WORDS = re.compile(r"(for|as)\s+([\w-]+(?:\s*,\s*[\w-]+)*)")
_NUMBER = re.compile(r"(\w+)\s*=\s*\S.*")


@dataclass(frozen=True, slots=True)
class Book:
    """The rules of one layout of a family.

    name         such as "qwen3_moe/maxtext"
    version      the version of the file
    sha256       of the text
    text         numbers and rules, with a line `---` between stages
    title        the models that the file is for
    tested_with  the programs that the file was tested with, such as "maxtext 0.2.5"
    """

    name: str
    version: int
    sha256: str
    text: str = field(repr=False)
    title: str = field(repr=False, default="")
    tested_with: tuple[str, ...] = field(repr=False, default=())

    @property
    def layout(self) -> str:
        return self.name.partition("/")[2]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Family:
    """A file of rules: the layouts of a family of models.

    name         the name of the file
    model_types  the model types that it serves; none for a file that serves all
    layouts      the names of its layouts
    """

    name: str
    title: str
    version: int
    tested_with: tuple[str, ...]
    model_types: tuple[str, ...]
    layouts: tuple[str, ...]


def books() -> tuple[Family, ...]:
    """List the families of the rule book with their layouts, the family for all models first."""
    found = [_listed(file) for file in _files().values()]
    return tuple(sorted(found, key=lambda family: (bool(family.model_types), family.name)))


def book_names() -> list[str]:
    """List the names of all books, such as "llama/maxtext", by model type."""
    return [
        f"{kind}/{layout}"
        for each in books()
        for kind in (each.model_types or (each.name,))
        for layout in each.layouts
    ]


def find_book(name: str, model_type: str | None = None) -> Book:
    """Return the book "FAMILY/LAYOUT", or of a LAYOUT for a model of the given type. A family is a model type, or the
    name of a file.

    Raise a NotFoundError that names books near by if there is none.
    """
    family, slash, layout = name.strip().partition("/")
    if not slash:
        if model_type is None:
            return _without_family(family)
        family, layout = model_type, family
    file = _serving(family)
    if file is None and not slash and layout in _files()[_GENERIC].layouts:
        family, file = _GENERIC, _files()[_GENERIC]
    if file is None or not _has(file, layout):
        raise NotFoundError(_unknown(name, family, layout, file))
    return _composed(family, file, layout)


def other_book(book: Book, model_type: str) -> str | None:
    """Return the name of the book of this layout for a model type, if it has other rules than the given book."""
    family, _, layout = book.name.partition("/")
    here, there = _serving(family), _serving(model_type)
    if there is None or here is there or not _has(there, layout):
        return None
    other = _composed(model_type, there, layout)
    is_same = book.text.splitlines()[1:] == other.text.splitlines()[1:]  # behind the title
    return None if is_same else other.name


def is_layout(name: str) -> bool:
    """Tell whether a name is the layout of some book, such as "maxtext", or the name of a book."""
    if "/" not in name:
        return any(name in file.layouts for file in _files().values())
    return name in book_names()


def _without_family(layout: str) -> Book:
    if (file := _serving(layout)) is not None and not is_layout(layout):
        named = ", ".join(
            f"{layout}/{each}" for each in dict.fromkeys((*_files()[_GENERIC].layouts, *file.layouts))
        )
        raise NotFoundError(f"{layout!r} is a family of models; name a layout of it as well: {named}")
    known = [name for name in book_names() if name.endswith(f"/{layout}")]
    if not known:
        raise NotFoundError(_unknown(layout, "", layout, None))
    listed = ", ".join(map(repr, known[:_MOST_NAMED]))
    raise NotFoundError(
        f"{layout!r} is a layout of several families, and no config.json says the family of this model; name "
        f"both, such as {listed}"
    )


def _unknown(name: str, family: str, layout: str, file: _File | None) -> str:
    names = book_names()
    if file is not None:
        have = sorted({*file.layouts, *_files()[_GENERIC].layouts})
        return f"no rules for the layout {layout!r} of {family!r}, which has {', '.join(have)}"
    if layout in {each.partition("/")[2] for each in names} and family:
        near = nearest(family, [each.partition("/")[0] for each in names])
        like = [each for each in names if each == f"{near}/{layout}"] or [
            n for n in names if n.endswith(f"/{layout}")
        ]
    else:
        near = nearest(name, names) or nearest(name, {each.partition("/")[2] for each in names})
        like = [near] if near else []
    hint = f"; near are {', '.join(like[:_MOST_NAMED])}" if like else ""
    return f"no rule book {name!r}{f' for {family!r}' if family not in name else ''}{hint}; `eformer rules` lists all"


# ------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class _Layout:
    after: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _File:
    """A parsed file. `first` are the rules above all layouts."""

    name: str
    title: str
    version: int
    tested_with: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    same_as: str | None = None
    numbers: tuple[str, ...] = ()
    first: str = ""
    layouts: Mapping[str, _Layout] = field(default_factory=dict)


@cache
def _files() -> Mapping[str, _File]:
    """Parse all files, by name."""
    found = {}
    for each in sorted(files("eformer").joinpath("rules").iterdir(), key=lambda file: file.name):
        if each.name.endswith(".rules"):
            name = each.name.removesuffix(".rules")
            found[name] = parse_file(name, _text(each))
    return {name: _with_layouts_of(file, found) for name, file in found.items()}


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def parse_file(name: str, text: str) -> _File:
    """Parse the text of a file of rules; raise a FormatError for a line that belongs nowhere."""
    above, sections = _sections(name, text)
    comments = [line for line in above if line.startswith("#")]
    version = next(filter(None, map(_VERSION.fullmatch, comments)), None)
    if version is None:
        raise FormatError(f"{name}.rules has no line '# rules VERSION; tested with PROGRAM VERSION, ...'")
    words = {m[1]: m[2] for m in map(_WORDS.fullmatch, above) if m}
    numbers = tuple(line for line in above if _NUMBER.fullmatch(line) and "->" not in line)
    first = [line for line in above if "->" in line and not line.startswith("#")]
    if other := [
        line
        for line in above
        if line and line not in (*comments, *numbers, *first) and not _WORDS.fullmatch(line)
    ]:
        raise FormatError(
            f"{name}.rules: {other[0]!r} is above all layouts, and is no number, rule, `for` or `as`"
        )
    return _File(
        name,
        title=comments[0].lstrip("# ").removeprefix(f"{name}: "),
        version=int(version[1]),
        tested_with=tuple(part.strip() for part in version[2].split(",")),
        model_types=tuple(part.strip() for part in words.get("for", "").split(",") if part.strip()),
        same_as=words.get("as"),
        numbers=numbers,
        first="\n".join(first),
        layouts=sections,
    )


def _sections(name: str, text: str) -> tuple[list[str], dict[str, _Layout]]:
    """Split a file into the lines above all layouts and the layouts."""
    above: list[str] = []
    lines, found = above, {}
    for line in map(str.strip, text.splitlines()):
        if not line.startswith("["):
            lines.append(line)
            continue
        layout = _LAYOUT.fullmatch(line)
        if layout is None or layout[1] in found:
            raise FormatError(
                f"{name}.rules: {line!r} is no new layout; expected [NAME], or [NAME] after OTHER"
            )
        lines = []
        found[layout[1]] = (layout[2], lines)
    return above, {each: _Layout(after, "\n".join(lines).strip()) for each, (after, lines) in found.items()}


def _with_layouts_of(file: _File, others: Mapping[str, _File]) -> _File:
    """Return a file with the layouts of the file that it is `as`."""
    if file.same_as is None:
        return file
    same = others[file.same_as]
    return replace(
        file,
        numbers=(*same.numbers, *file.numbers),
        first="\n".join(filter(None, [same.first, file.first])),
        layouts={**same.layouts, **file.layouts},
    )


def _listed(file: _File) -> Family:
    """Describe a file. The layouts for all models are among the layouts of every family."""
    layouts = dict.fromkeys((*_files()[_GENERIC].layouts, *file.layouts))
    return Family(file.name, file.title, file.version, file.tested_with, file.model_types, tuple(layouts))


def _serving(family: str) -> _File | None:
    found = [file for file in _files().values() if family in file.model_types]
    return found[0] if found else _files().get(family)


def _has(file: _File, layout: str) -> bool:
    return layout in file.layouts or layout in _files()[_GENERIC].layouts


# ------------------------------------------------------------------------------------------- stages


def _composed(family: str, file: _File, layout: str) -> Book:
    """Return the stages of a layout and of all layouts before it as one text."""
    chain = _chain(file, layout)
    numbers = dict.fromkeys(line for each, _ in chain for line in each.numbers)
    stages: list[str] = []
    for number, (each, section) in enumerate(chain):
        if number == 0 and each.first:
            stages.append(each.first)
        stages.append(section.text)
    title = f"# {family}/{layout}, rules {file.version}: {file.title}"
    text = "\n".join([title, *numbers, "\n---\n".join(stages)]) + "\n"
    digest = sha256(text.encode()).hexdigest()
    return Book(f"{family}/{layout}", file.version, digest, text, file.title, file.tested_with)


def _chain(file: _File, layout: str) -> Sequence[tuple[_File, _Layout]]:
    """List a layout and the layouts before it, the first one first, with the file that has them."""
    found: list[tuple[_File, _Layout]] = []
    wanted: str | None = layout
    while wanted is not None:
        holder = file if wanted in file.layouts else _files()[_GENERIC]
        section = holder.layouts.get(wanted)
        if section is None or len(found) > len(file.layouts) + 2:
            raise FormatError(f"{file.name}.rules: layout {layout!r} is after {wanted!r}, which is not there")
        found.insert(0, (holder, section))
        wanted = section.after
    return found
