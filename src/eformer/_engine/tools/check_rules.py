"""Look at rules: their text, and whether they fit a checkpoint, both ways, by names and shapes alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.find import look_at
from eformer._engine.formats.model_config import given_config, model_config
from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.record.dtypes import name_of_dtype
from eformer._engine.record.names import readable, with_nearest
from eformer._engine.record.rename import parse_rules
from eformer._engine.record.rule_books import find_book, is_layout
from eformer._engine.record.text import count, few
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tools.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.model_config import ModelConfig
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rename import RenamingRules
    from eformer._engine.record.stages import Renamed

_MOST_LINES = 20  # of one kind of problem

Shape = tuple[int, ...]


def rules(name: str | os.PathLike[str]) -> NamedRules:
    """Return rules by the name of a book, such as "qwen3_moe/maxtext", as a file, or as text.

    The name of a layout alone, such as "maxtext", has a text as soon as `check` knows the family of a model.
    Raise a NotFoundError that names books near by if there is neither a book nor a file.

    Example:

        >>> book = checkpoint.rules("qwen3/tunix")
        >>> print(book.check("hf/qwen3"))
        qwen3/tunix fits hf/qwen3: 36 leaves become 36, and all come back
    """
    if isinstance(name, str):
        if "\n" in name or "->" in name:
            return NamedRules("rename", name)
        if is_layout(name):
            return NamedRules(name, find_book(name).text if "/" in name else None)
        if not Path(name).expanduser().exists():
            return NamedRules(name, find_book(name).text)  # which raises, and names books near by
    return NamedRules(os.fspath(name), Path(name).expanduser().read_text(encoding="utf-8-sig"))


@dataclass(frozen=True, slots=True)
class NamedRules:
    """Rules that can be shown and checked. `str` gives their text.

    name   the name of the book or of the file; "rename" for a text
    text   the rules; None for a layout of several families

    Example:

        >>> str(checkpoint.rules("llama/flax")).splitlines()[0]
        '# llama/flax, rules 1: Llama 2, 3, 3.1, 3.2 and 3.3, Mistral 7B, and models of the same form'
    """

    name: str
    text: str | None

    def __str__(self) -> str:
        return find_book(self.name).text if self.text is None else self.text

    @uninterrupted
    def check(
        self,
        source: str | os.PathLike[str],
        like: Any = None,
        *,
        config: ModelConfig | None = None,
        step: StepChoice = None,
        prefix: str | None = None,
    ) -> RuleCheck:
        """Check the rules against the names and shapes of the checkpoint at `source`, both ways. Reads no data.

        Every leaf must match a rule, get a name of its own, and come back with its name, shape and dtype. Problems do
        not raise an error; the result lists them.

        source   the path of a checkpoint or of a model of Hugging Face
        like     a tree, or the path of a checkpoint, with the leaves that the rules are to give
        config   config.json of the model, as a dict or a path; None for the file at `source`
        step     of a run: the number of another step than the newest, or "best"
        prefix   the tree, if the checkpoint has several

        Example:

            >>> checkpoint.rules("tunix").check("hf/qwen3").leaves["lm_head.w"]
            (8, 37)
        """
        wanted = None if like is None else _shapes_of(like)
        given = None if config is None else given_config(config)

        def checked(found: Found) -> RuleCheck:
            settings = model_config(found.store) if given is None else given
            name, text = self._for_model(settings)
            with View(
                found, prefix, holds=False, dequant="bfloat16"
            ) as view:  # quantised weights by their dense names
                return _Checking(name, text, found.path, view.arrays, settings, wanted).result()

        return look_at(source, checked, choose=partial(path_of_step, step=step))

    def _for_model(self, settings: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name and the text for a model with this configuration."""
        if self.text is not None:
            return self.name, self.text
        kind = settings.get("model_type")
        book = find_book(self.name, kind if isinstance(kind, str) else None)
        return book.name, book.text


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """The result of a check of rules. `print` shows all problems.

    name          the name of the rules
    path          the checkpoint
    leaves        shapes of the new leaves, by name
    number        number of leaves of the checkpoint
    left_out      names that a rule drops
    unmatched     names that no rule matches
    missing       names in `like` that the rules do not give
    unexpected    names that `like` does not have
    wrong_shapes  leaves whose shape differs in `like`
    not_back      leaves that do not come back, or with another shape or dtype
    errors        other problems of the rules, such as sizes that do not divide

    Example:

        >>> found = checkpoint.rules("qwen3/tunix").check("hf/qwen3")
        >>> found.ok, found.leaves["layers.0.attn.q_proj.w"]
        (True, (8, 4, 6))
    """

    name: str
    path: str
    leaves: dict[str, Shape]
    number: int
    left_out: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shapes: tuple[str, ...] = ()
    not_back: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether the rules fit, both ways."""
        return not any(problems for _, problems in self._problems())

    def _problems(self) -> list[tuple[str, tuple[str, ...]]]:
        return [
            ("error", self.errors),
            ("no rule matches", self.unmatched),
            ("missing, though like has it", self.missing),
            ("unexpected, because like does not have it", self.unexpected),
            ("another shape in like", self.wrong_shapes),
            ("does not come back", self.not_back),
        ]

    def __str__(self) -> str:
        fits = "fits" if self.ok else "does not fit"
        lines = [f"{self.name} {fits} {self.path}"]
        if self.ok:
            back = "and all come back"
            if self.left_out:
                lost = count(len(self.left_out), "leaf", "leaves")
                back = f"and come back but for {lost} left out: {few(self.left_out)}"
            lines[0] += f": {count(self.number, 'leaf', 'leaves')} become {len(self.leaves):,}, {back}"
        for what, problems in self._problems():
            lines += [f"! {what}: {problem}" for problem in problems[:_MOST_LINES]]
            if (more := len(problems) - _MOST_LINES) > 0:
                lines.append(f"! {what}: and {more:,} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Checking:
    """One check: forth, against `wanted`, and back."""

    name: str
    text: str
    path: str
    stored: Mapping[str, LazyArray]
    config: Mapping[str, Any]
    wanted: Mapping[str, Shape] | None

    def result(self) -> RuleCheck:
        found = RuleCheck(self.name, self.path, {}, len(self.stored))
        try:
            parsed = parse_rules(self.text, self.name)
            forth = parsed.apply(self.stored, (), self.config, self.wanted)
        except ValueError as error:
            return replace(found, errors=_problems_in(error))
        made = {readable(name): array.shape for name, array in forth.arrays.items()}
        found = replace(
            found, leaves=made, left_out=tuple(forth.left_out), unmatched=tuple(map(readable, forth.kept))
        )
        if self.wanted is not None:
            found = _compared(found, self.wanted)
        return self._with_way_back(found, replace(parsed, back=True), forth)

    def _with_way_back(self, found: RuleCheck, back: RenamingRules, forth: Renamed) -> RuleCheck:
        stored = self.stored
        shapes = {name: array.shape for name, array in stored.items()}
        dtypes = {name: name_of_dtype(array.dtype) for name, array in stored.items()}
        try:
            returned = back.apply(forth.arrays, (), self.config, shapes, dtypes).arrays
        except ValueError as error:
            return replace(found, errors=tuple(f"on the way back: {each}" for each in _problems_in(error)))
        expected = {name: array for name, array in stored.items() if name not in forth.left_out}
        return replace(found, not_back=tuple(_differences(expected, returned)))


def _problems_in(error: ValueError) -> tuple[str, ...]:
    """List the problems of one error."""
    problems = getattr(error, "problems", None)
    return tuple(dict.fromkeys(problems)) if problems else (str(error),)


def _compared(found: RuleCheck, wanted: Mapping[str, Shape]) -> RuleCheck:
    """Compare the new leaves with the leaves of `like`."""
    expected = {readable(name): shape for name, shape in wanted.items()}
    made = found.leaves
    return replace(
        found,
        missing=_hinted((name for name in expected if name not in made), made),
        unexpected=_hinted((name for name in made if name not in expected), expected),
        wrong_shapes=tuple(
            f"{name} is {list(shape)}, and {list(expected[name])} in like"
            for name, shape in made.items()
            if name in expected and tuple(expected[name]) != shape
        ),
    )


def _hinted(names: Iterable[str], existing: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}{hint}" for name, hint in with_nearest(names, existing))


def _differences(expected: Mapping[str, LazyArray], returned: Mapping[str, LazyArray]) -> list[str]:
    """List leaves that are lost, changed or new."""
    problems = [readable(name) for name in expected if name not in returned]
    problems += [f"{readable(name)}, which is new" for name in returned if name not in expected]
    for name, array in expected.items():
        if (back := returned.get(name)) is not None and (back.shape, back.dtype) != (
            array.shape,
            array.dtype,
        ):
            was, now = (f"{name_of_dtype(each.dtype)}{list(each.shape)}" for each in (array, back))
            problems.append(f"{readable(name)} is {was}, and comes back as {now}")
    return problems


def _shapes_of(like: Any) -> dict[str, Shape]:
    """Return the shapes of the leaves of a tree, or of the checkpoint at a path."""
    if isinstance(like, (str, os.PathLike)):
        return look_at(like, lambda found: {n: leaf.shape for n, leaf in found.tree(None).leaves.items()})
    from eformer._engine.trees.flatten import flatten  # late: it imports jax

    leaves, _ = flatten(like)
    return {name: tuple(leaf.shape) for name, leaf in leaves.items() if hasattr(leaf, "shape")}
