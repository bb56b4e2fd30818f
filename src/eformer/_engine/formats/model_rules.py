"""Settle the rules of a call: a book by its name, a file or a text, read forwards or backwards, for a model.

Tests: tests/engine/tools/test_back.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eformer._engine.record.origin import book_in, config_in, rules_in, trimmed_config
from eformer._engine.record.rename import RenamingRules, parse_book, rules_from
from eformer._engine.record.rule_books import is_layout
from eformer._engine.record.stages import ModelFacts
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from eformer._engine.record.origin import Origin
    from eformer._engine.record.rename import RenameRules
    from eformer._engine.record.rule_books import Book

Config = Mapping[str, Any]

_OF_WEIGHTS = ("bfloat16", "float16", "float32", "float64")
_NAME = re.compile(r"[\w-]+(?:/[\w-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelRules:
    """Rules for a model of this configuration."""

    rules: RenamingRules
    config: Config = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dtype_of_numbers(self) -> str | None:
        """Return the dtype that quantised weights get, if the rules are for a dense model."""
        return dtype_of_numbers(self.rules, self.config)

    @property
    def record(self) -> dict[str, Any]:
        """Return the record for the origin of a tree that got its names from these rules; empty if they are no book."""
        book = _book_of(self.rules)
        if book is None or self.rules.back:
            return {}
        numbers = {"version": book.version, "sha256": book.sha256, "layout": book.layout}
        return {"book": book.name, **numbers, "config": trimmed_config(self.config)}


def rules_for(rules: RenamingRules, config: Config, origin: Origin | None, path: str) -> ModelRules:
    """Return rules for a model. Raise ValueError if they would read another layout backwards than the origin has."""
    try:
        rules, recorded = rules.of_model(config), book_in(origin or {})
    except NotFoundError as error:
        raise NotFoundError(f"{path}: {error}") from error
    book = _book_of(rules)
    if rules.back and book and recorded and book.name != recorded:
        raise ValueError(
            f"{path} has the layout of the rules {recorded!r}, and rename= with {book.name!r} would read it as another "
            f"layout; pass {recorded!r}"
        )
    return ModelRules(rules, config, tuple(_changes(book, origin or {})) if rules.back else ())


def _book_of(rules: RenamingRules) -> Book | None:
    """Return the book that all of the rules are from."""
    return rules.books[0] if len(rules.texts) == len(rules.books) == 1 else None


def dtype_of_numbers(rules: RenamingRules, config: Config) -> str | None:
    """Return the dtype that quantised weights get by rules of a book, which is for the dense model: that of the
    configuration, else bfloat16. Return None for other rules, and for the way back."""
    if rules.back or not rules.have_book:
        return None
    named = ModelFacts(config).in_config("dtype", "torch_dtype")
    return named if named in _OF_WEIGHTS else "bfloat16"


def recorded_book(origin: Origin, path: str) -> str:
    """Return the book that gave the leaves their names. Raise ValueError if none is recorded."""
    if not (recorded := book_in(origin)):
        raise ValueError(
            f"{path} has no recorded rules that back=True could read from right to left; pass them by rename=, such as "
            'rename="llama/maxtext"'
        )
    return recorded


def rules_of_book(recorded: str, *, back: bool = False) -> RenamingRules:
    """Return the rules of a recorded book. It is never a file: the record comes with a checkpoint from anywhere."""
    return RenamingRules((parse_book(recorded),), back=back)


def model_rules(
    given: RenameRules | RenamingRules | None,
    *,
    back: bool | None,
    origin: Origin | None,
    configs: Sequence[Callable[[], Config]],
    path: str,
) -> ModelRules | None:
    """Return the rules of a call; None without rules.

    given      the caller's rules; None takes the recorded rules, if they are read backwards
    back       read them from right to left; None does so if the origin or the rules suggest it
    origin     the origin of the tree that the rules are for
    configs    where the configuration of the model may be, the first that has one counts; before the origin
    path       the checkpoint, for messages
    """
    origin = origin or {}
    if given is None and not (back or (back is None and book_in(origin))):
        return None
    if given is None:
        given = rules_of_book(recorded_book(origin, path))
    elif not isinstance(given, RenamingRules):
        given = rules_from(given)
    config = _first_of([*configs, lambda: config_in(origin)])
    rules = given.of_model(config)
    is_back = rules.are_two_way if back is None else back
    return rules_for(replace(rules, back=is_back), config, origin, path) if rules else None


def _first_of(configs: Sequence[Callable[[], Config]]) -> Config:
    return next((found for config in configs if (found := config())), {})


def is_book(given: str) -> bool:
    """Tell whether rules are the name of a book, or look like one, and are no text and no file."""
    name = given.strip()
    return is_layout(name) or (_NAME.fullmatch(name) is not None and not Path(name).expanduser().exists())


def _changes(book: Book | None, origin: Origin) -> list[str]:
    """Describe how a book has changed since it gave the leaves their names."""
    record = rules_in(origin)
    if book is None or record.get("book") != book.name or record.get("sha256") in (None, book.sha256):
        return []
    return [
        f"the rules {book.name} have changed since they gave the leaves their names: version {record.get('version')}, "
        f"now {book.version}"
    ]
