"""Plan the leaves that rules with axes make: which sources each has, and where their elements go.

Nothing is read. `Assembly` takes the leaves that match, one by one, and makes the new ones at the end.

Tests: tests/engine/record/test_rename_axes.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eformer._engine.record.axes import Layout, all_names, lattice, size_of, solve
from eformer._engine.record.dequant_step import dequantized_by, digits_of
from eformer._engine.record.dtypes import dtype_from_name, is_floating, name_of_dtype
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.lazy_arrays import Computed, Rearranged, Resized, Shared, SourceBlock
from eformer._engine.record.notation import REST, NumberHole, blocks_of, names_in
from eformer._engine.record.templates import KnownSizes, Template
from eformer._engine.record.text import few
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from eformer._engine.record.axes import Sizes
    from eformer._engine.record.expressions import Numbers
    from eformer._engine.record.notation import Axis, AxisRule, LeafPattern, ValueStep
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.templates import Bound


class Pair(NamedTuple):
    """A block of a source and the block of a target that it goes to.

    numbered   axes in the name of the source alone: sources are stacked along them
    chosen     axes in the name of the target alone: each index is a target of its own
    """

    source: int
    source_block: int
    target: int
    target_block: int
    numbered: tuple[str, ...]
    chosen: tuple[str, ...]


_MOST_LEAVES = 2**20
_TO_NUMBER = re.compile(r"\d")


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """The axes and sizes of sources of one shape and dtype."""

    axes: tuple[Axis, ...]
    sizes: Sizes
    dtype: np.dtype[Any]


class _Undivided(str):
    """A problem: too few sizes are known. The shapes of the targets may help."""


class Member(NamedTuple):
    """A leaf on its way into a target."""

    name: str
    array: LazyArray
    solved: Solved


Members = dict[tuple[int, ...], Member]
"""Sources by their indices on the numbered axes."""


@dataclass(slots=True)
class Target:
    """A leaf to be made: its rule, the number of its name in the rule, and its sources by the number of the pair."""

    rule: ReadyRule
    leaf: int
    bound: Bound
    members: dict[int, Members] = field(default_factory=dict)

    @property
    def first(self) -> Member:
        return next(iter(next(iter(self.members.values())).values()))


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a target, and the layouts of its sources by the number of the pair. Targets alike share it."""

    shape: tuple[int, ...]
    layouts: Mapping[int, Layout]


class ReadyRule:
    """A rule read in one direction, with the numbers of a model."""

    def __init__(self, rule: AxisRule, numbers: Numbers, *, back: bool) -> None:
        self.rule, self.back = rule, back
        self.known = KnownSizes(rule, numbers)
        left, right = (
            [Template(leaf, self.known) for leaf in rule.left],
            [Template(leaf, self.known) for leaf in rule.right],
        )
        self.sources, self.targets = (right, left) if back else (left, right)
        self.tied = Template(rule.left[0].tied, self.known) if rule.left and rule.left[0].tied else None
        self.pairs = list(self._pairs()) if self.sources and self.targets else []
        self.pairs_of = [
            [(n, p) for n, p in enumerate(self.pairs) if p.source == i] for i in range(len(self.sources))
        ]
        self.alternates = any(map(self._alternates, self.pairs))
        self.pads = {s.axis: s for s in rule.steps if s.verb == "pad"}
        self.scales = Template(rule.scales.leaf, self.known) if rule.scales else None
        self.solved: dict[tuple[object, ...], Solved | str] = {}
        self.divided: dict[int, Solved] = {}
        self.plans: dict[tuple[object, ...], Plan] = {}

    def _pairs(self) -> Iterator[Pair]:
        left, right = [t.leaf for t in self.sources], [t.leaf for t in self.targets]
        for (i, block), (j, other) in zip(blocks_of(left), blocks_of(right), strict=True):
            here, there = left[i].named(), right[j].named()
            numbered = tuple(name for name in here if name not in there)
            yield Pair(i, block, j, other, numbered, tuple(name for name in there if name not in here))

    def _alternates(self, pair: Pair) -> bool:
        """Tell whether the elements of several targets alternate on an axis of a source."""
        axes = self.sources[pair.source].leaf.axes or ()
        return any(
            name in pair.chosen for axis in axes for name in list(names_in(axis, pair.source_block))[1:]
        )

    @property
    def where(self) -> str:
        return self.rule.where

    @lazy_property
    def described(self) -> str:
        """Describe the change of a leaf: its axes before and behind, and the steps."""
        leaves = (self.sources[0].leaf, self.targets[0].leaf)
        sides = [" ".join(map(str, leaf.axes)) for leaf in leaves if leaf.axes is not None]
        moved = [f"[{sides[0]}] to [{sides[1]}]"] if sides and sides[0] != sides[1] else []
        steps = (
            [f"{step} undone" for step in self.rule.steps[::-1]] if self.back else map(str, self.rule.steps)
        )
        return ", ".join([*moved, *steps])

    @lazy_property
    def stacks_numbers(self) -> bool:
        """Tell whether sources are stacked by numbers in their names, each of which is one axis."""
        holes = [part for t in self.sources for part in t.leaf.parts if isinstance(part, NumberHole)]
        stacked = {name for pair in self.pairs for name in pair.numbered}
        return any(len(hole.digits) == 1 and hole.digits[0].axis in stacked for hole in holes)

    @lazy_property
    def moves_nothing(self) -> bool:
        """Tell whether all elements stay in their places."""
        if len(self.pairs) != 1 or self.scales:
            return False
        (pair,) = self.pairs
        return (
            not pair.numbered and not pair.chosen and self.sources[0].leaf.axes == self.targets[0].leaf.axes
        )


def _kind_of(members: Members) -> tuple[object, ...]:
    """Return everything that the layout of some sources depends on."""
    if len(members) == 1:
        ((index, member),) = members.items()
        return index, id(member.solved)
    indices = zip(*members, strict=True)
    return len(members), tuple(map(max, indices)), *sorted({id(member.solved) for member in members.values()})


def _expanded(axes: Sequence[Axis], ndim: int) -> tuple[Axis, ...]:
    """Return the axes of an array with `ndim` axes, with names in the place of `...`."""
    rest = [f"{REST}{number}" for number in range(ndim - len(axes) + 1)]
    return tuple(each for axis in axes for each in (rest if axis == REST else [axis]))


def _fits(axes: Sequence[Axis] | None, array: LazyArray | None) -> bool:
    """Tell whether an array, or None for a plain value, has as many axes as a rule names."""
    if axes is None or array is None:
        return axes is None
    ndim = len(array.shape)
    return ndim >= len(axes) - 1 if REST in axes else ndim == len(axes)


fits = _fits


class Assembly:
    """The targets of one stage.

    shapes   returns the shapes that leaves must have, by name, as far as they are known
    find     returns a leaf by its name, for the scales of another; None if it is missing
    """

    def __init__(
        self,
        numbers: Numbers,
        lines: Mapping[str, str],
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        find: Callable[[str], LazyArray | None],
    ) -> None:
        self.numbers, self.lines, self.shapes, self.find = numbers, lines, shapes, find
        self.targets: dict[str, Target] = {}
        self.problems: dict[str, None] = {}

    # ----------------------------------------------------------------------------------- take leaves

    def add(self, ready: ReadyRule, number: int, bound: Bound, name: str, array: LazyArray) -> None:
        """Take a leaf that matches a source of a rule."""
        if ready.back and ready.rule.steps:
            array = self._without_steps(ready, name, array)
        solved = self._solve(ready, number, bound, name, array)
        if isinstance(solved, str):
            self.problems[solved] = None
            return
        if ready.scales:
            try:
                array, solved = self._dequantized(ready, bound, name, array, solved)
            except FormatError as error:
                self.problems[f"{ready.where}: {error}"] = None
                return
        if ready.alternates:
            array = Shared(array)
        member = Member(name, array, solved)
        for pair_number, pair in ready.pairs_of[number]:
            index = tuple([bound[axis] for axis in pair.numbered])
            try:
                for whole in self._chosen(pair, bound, solved.sizes):
                    self._put(ready, pair_number, whole, index, member)
            except FormatError as error:
                self.problems[f"{ready.where}: {error}"] = None

    def _dequantized(
        self, ready: ReadyRule, bound: Bound, name: str, array: LazyArray, solved: Solved
    ) -> tuple[LazyArray, Solved]:
        """Return quantised elements as numbers, and the axes of the result."""
        assert ready.scales
        assert ready.rule.scales
        there = ready.scales.fill(bound)
        if (found := self.find(there)) is None:
            raise FormatError(f"{name} has no scales: {there} is missing")
        numbers = dequantized_by(ready.rule.scales, name, array, solved.axes, solved.sizes, found)
        known = ready.divided.get(id(solved))
        if known is None:
            known = ready.divided[id(solved)] = Solved(digits_of(solved.axes), solved.sizes, numbers.dtype)
        return numbers, known

    @staticmethod
    def _chosen(pair: Pair, bound: Bound, sizes: Sizes) -> Iterator[Bound]:
        """Yield the bound indices, with each index by which a target is chosen."""
        if not pair.chosen:
            yield bound
            return
        for index in _indices(pair.chosen, sizes):
            yield {**bound, **dict(zip(pair.chosen, index, strict=True))}

    def _put(
        self, ready: ReadyRule, number: int, bound: Bound, index: tuple[int, ...], member: Member
    ) -> None:
        leaf = ready.pairs[number].target
        new = ready.targets[leaf].fill(bound)
        target = self.targets.get(new)
        if target is None:
            target = self.targets[new] = Target(ready, leaf, bound)
        elif target.rule is not ready:
            self.problems[f"{new}: written by {target.rule.where} and by {ready.where}"] = None
            return
        members = target.members.get(number)
        if members is None:
            target.members[number] = {index: member}
        elif (there := members.setdefault(index, member)) is not member:
            self.problems[f"{new}: {ready.where} makes it of {there.name} and of {member.name}"] = None

    def add_constants(self, ready: ReadyRule) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the constant leaves of a rule."""
        for template in ready.targets:
            found = {name: shape for name, shape in self.shapes().items() if template.match(name) is not None}
            yield from (found or dict(self._counted(ready, template))).items()

    def _counted(self, ready: ReadyRule, template: Template) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of constant leaves by the numbers of their axes."""
        sizes = ready.known.sizes | template.counts()
        axes = template.leaf.axes or ()
        names = template.leaf.named()
        missing = [n for n in (*names, *(n for axis in axes for n in all_names(axis))) if n not in sizes]
        if missing or template.leaf.texts:
            self.problems[
                f"{ready.where}: the size of {' and '.join(missing) or '...'} is unknown; pass like="
            ] = None
            return
        shape = tuple(size_of(axis, sizes) for axis in axes)
        for index in _indices(names, sizes):
            yield template.fill(dict(zip(names, index, strict=True))), shape

    # ----------------------------------------------------------------------------------------- sizes

    def _solve(
        self, ready: ReadyRule, number: int, bound: Bound, name: str, array: LazyArray
    ) -> Solved | str:
        """Return the sizes of the axes of a leaf, or the problem with them. Leaves alike share them."""
        key: tuple[object, ...] = (number, array.shape, array.dtype)
        found = ready.solved.get(key)
        if found is None:
            found = ready.solved[key] = self._solved(ready, number, array, (), name)
        if isinstance(found, _Undivided) and self.shapes():
            wanted = self._wanted(ready, bound)
            found = ready.solved.get((*key, wanted))
            if found is None:
                found = ready.solved[*key, wanted] = self._solved(ready, number, array, wanted, name)
        return found

    def _wanted(self, ready: ReadyRule, bound: Bound) -> tuple[tuple[int, ...] | None, ...]:
        """Return the shapes of the targets of a leaf, as far as they are known."""
        first = dict.fromkeys((name for pair in ready.pairs for name in pair.chosen), 0) | bound
        names = [
            template.fill(first)
            if set(template.leaf.named()) <= first.keys()
            and {f"*{t}" for t in template.leaf.texts} <= first.keys()
            else ""
            for template in ready.targets
        ]
        return tuple(map(self.shapes().get, names))

    def _solved(
        self,
        ready: ReadyRule,
        number: int,
        array: LazyArray,
        wanted: Sequence[tuple[int, ...] | None],
        name: str,
    ) -> Solved | str:
        """Solve the axes of a leaf, with the shapes of its targets as far as they are known."""
        axes = _expanded(ready.sources[number].leaf.axes or (REST,), len(array.shape))
        equations = list(zip(axes, array.shape, strict=True))
        try:
            sizes = self._sizes(ready, equations, wanted, name)
        except FormatError as error:
            return f"{ready.where}: {error}"
        for axis, total in equations:
            if unknown := sorted({n for n in all_names(axis) if n not in sizes}):
                return _Undivided(f"{ready.where}: {self._undivided(axis, total, unknown)}")
        return Solved(axes, sizes, array.dtype)

    def _sizes(
        self,
        ready: ReadyRule,
        equations: Sequence[tuple[Axis, int]],
        wanted: Sequence[tuple[int, ...] | None],
        name: str,
    ) -> Sizes:
        sizes = dict(ready.known.sizes)
        others = [
            pair
            for template, shape in zip(ready.targets, wanted, strict=False)
            for pair in self._equations(ready, template.leaf, shape)
        ]
        before = -1
        while len(sizes) > before:
            before = len(sizes)
            for number, (axis, total) in enumerate(equations):
                self._solve_source(axis, total, sizes, name, number)
            for axis, total in others:
                if sum(n not in sizes for n in all_names(axis)) == 1:
                    _try_solve(axis, total, sizes)
        return sizes

    def _equations(
        self, ready: ReadyRule, leaf: LeafPattern, shape: tuple[int, ...] | None
    ) -> Iterator[tuple[Axis, int]]:
        """Yield the axes of a target whose sizes are known, without stacked and padded ones."""
        numbered = {name for pair in ready.pairs for name in pair.numbered}
        if (
            shape is None
            or leaf.axes is None
            or not (len(shape) >= len(leaf.axes) - 1 if REST in leaf.axes else len(shape) == len(leaf.axes))
        ):
            return
        for axis, total in zip(_expanded(leaf.axes, len(shape)), shape, strict=True):
            if not (numbered | (set() if ready.back else set(ready.pads))) & set(all_names(axis)):
                yield axis, total

    def _solve_source(self, axis: Axis, total: int, sizes: Sizes, name: str, number: int) -> None:
        given = dict(sizes)
        try:
            solve(axis, total, sizes)
        except FormatError as error:
            raise FormatError(self._contradiction(axis, total, given, name, number, str(error))) from error

    def _contradiction(
        self, axis: Axis, total: int, sizes: Sizes, name: str, number: int, problem: str
    ) -> str:
        if isinstance(axis, str) and axis in self.lines:
            return (
                f"{axis} is {sizes[axis]} by {self.lines[axis]}, and an axis of {total} in {name}; use another letter "
                "for one of them"
            )
        known = [self._shown(n, sizes[n]) for n in dict.fromkeys(all_names(axis)) if n in sizes]
        rows = "rows" if number == 0 else f"elements along axis {number}"
        because = f", and {', '.join(known)}" if known else ""
        return f"{total} {rows} of {name} are {axis}{because}: {problem}"

    def _shown(self, axis: str, size: int) -> str:
        expression = self.numbers.lets.get(axis)
        return f"{axis} is {size}{f' ({expression})' if expression and str(expression) != str(size) else ''}"

    def _undivided(self, axis: Axis, total: int, unknown: Sequence[str]) -> str:
        neither = f"neither {' nor '.join(unknown)} is" if len(unknown) > 1 else f"{unknown[0]} is not"
        lets = [n for n in unknown if n in self.numbers.lets]
        if lets:
            advice = f"config.json lacks {', '.join(str(self.numbers.lets[n]) for n in lets)}; pass config= or like="
        else:
            advice = f"Write a line {unknown[0]} = NUMBER, such as {unknown[0]} = num_attention_heads, or pass like="
        return f"{axis} of {total} cannot be divided, because {neither} known. {advice}"

    # ----------------------------------------------------------------------------------- make leaves

    def make(self) -> Iterator[tuple[str, Target, LazyArray]]:
        """Yield the new leaves. Add a problem for each that cannot be made."""
        for name, target in self.targets.items():
            try:
                array = self._made(name, target)
                yield name, target, array if target.rule.back else _with_steps(array, target, name)
            except FormatError as error:
                self.problems[str(error)] = None

    def ragged(self) -> Iterator[str]:
        """Yield a note for each rule that stacks fewer leaves in some of its targets than in others beside them."""
        numbers = defaultdict[tuple[str, str], dict[int, str]](dict)
        for name, target in self.targets.items():
            if target.rule.stacks_numbers:
                beside = _TO_NUMBER.split(target.first.name, maxsplit=1)[0]
                for members in target.members.values():
                    numbers[target.rule.where, beside].setdefault(len(members), name)
        for (where, _), names in numbers.items():
            if len(names) > 1:
                found = few([f"{name} of {number}" for number, name in sorted(names.items())])
                yield f"{where} stacks different numbers of leaves: {found}; some may be missing"

    def _made(self, name: str, target: Target) -> LazyArray:
        ready = target.rule
        if ready.moves_nothing:
            return target.first.array
        key = (target.leaf, *((n, *_kind_of(members)) for n, members in target.members.items()))
        plan = ready.plans.get(key)
        if plan is None:
            plan = ready.plans[key] = self._planned(name, target)
        parts = []
        for number, members in target.members.items():
            chosen = {axis: target.bound[axis] for axis in ready.pairs[number].chosen}
            sources = {index: member.array for index, member in members.items()}
            parts.append(SourceBlock(plan.layouts[number], sources, chosen))
        if len(parts) == 1 and parts[0].is_all and target.first.array.shape == plan.shape:
            return target.first.array  # a first block has the places of the whole
        return Rearranged(parts, plan.shape)

    def _planned(self, name: str, target: Target) -> Plan:
        ready = target.rule
        some = [next(iter(members.values())) for members in target.members.values()]
        sizes = self._merged(name, target)
        leaf = ready.targets[target.leaf].leaf
        rest = sum(isinstance(axis, str) and axis.startswith(REST) for axis in some[0].solved.axes)
        axes = _expanded(
            leaf.axes or (REST,),
            len(leaf.axes or (REST,)) + (rest - 1 if REST in (leaf.axes or (REST,)) else 0),
        )
        self._require_all(name, target, sizes, axes)
        layouts = {}
        for number, member in zip(target.members, some, strict=True):
            pair = ready.pairs[number]
            source = tuple(lattice(axis, pair.source_block, sizes) for axis in member.solved.axes)
            there = tuple(lattice(axis, pair.target_block, sizes) for axis in axes)
            layouts[number] = Layout(source, there, pair.numbered)
        return Plan(tuple(size_of(axis, sizes) for axis in axes), layouts)

    def _merged(self, name: str, target: Target) -> Sizes:
        """Return the sizes of all axes of a target, with the numbers of its sources."""
        every = [member for members in target.members.values() for member in members.values()]
        kinds = {member.solved.dtype: member.name for member in every}
        by = f"{name}, by {target.rule.where}"
        if len(kinds) > 1:
            listed = " and ".join(sorted(f"{dtype} ({leaf})" for dtype, leaf in kinds.items())[:4])
            raise FormatError(
                f"{by}: its sources must have one dtype, found {listed}; convert the checkpoint with dtype= first"
            )
        sizes: Sizes = {}
        origin: dict[str, Member] = {}
        for member in {id(member.solved): member for member in every}.values():
            for axis, size in member.solved.sizes.items():
                first = origin.setdefault(axis, member)
                if sizes.setdefault(axis, size) != size:
                    raise FormatError(
                        f"{by}: {axis} is {sizes[axis]} in {first.name} {list(first.array.shape)}, and {size} in "
                        f"{member.name} {list(member.array.shape)}"
                    )
        for number, members in target.members.items():
            for position, axis in enumerate(target.rule.pairs[number].numbered):
                counted = max(index[position] for index in members) + 1
                told = target.rule.known.sizes.get(axis, 0)
                sizes[axis] = max(counted, told)
                if axis in self.lines and 0 < told < counted:
                    last = members[max(members, key=lambda index: index[position])].name
                    raise FormatError(f"{by}: {axis} is {told} by {self.lines[axis]}, and there is {last}")
        return sizes

    def _require_all(self, name: str, target: Target, sizes: Sizes, axes: Sequence[Axis]) -> None:
        """Raise FormatError if a source of a target is missing, or the size of an axis is unknown."""
        ready = target.rule
        shown = f"{name} [{' '.join(map(str, ready.targets[target.leaf].leaf.axes or ()))}], by {ready.where}"
        order = [name for axis in axes for name in all_names(axis)]
        for number, pair in enumerate(ready.pairs):
            if pair.target != target.leaf:
                continue
            members = target.members.get(number, {})
            if not members or math.prod(sizes[axis] for axis in pair.numbered) != len(members):
                index = dict(zip(pair.numbered, _first_missing(pair, sizes, members), strict=True))
                in_order = sorted(index.items(), key=lambda item: order.index(item[0]))
                at = f" for {', '.join(f'{axis}={i}' for axis, i in in_order)}" if index else ""
                missing = ready.sources[pair.source].fill({**target.bound, **index})
                raise FormatError(f"{shown}: no source{at} ({missing} is missing)")
        if unknown := sorted({n for axis in axes for n in all_names(axis) if n not in sizes}):
            raise FormatError(
                f"{shown}: the size of {' and '.join(unknown)} is unknown; pass config= or like="
            )

    # ----------------------------------------------------------------------------------------- steps

    def _without_steps(self, ready: ReadyRule, name: str, array: LazyArray) -> LazyArray:
        """Return an array with the steps of a rule undone, the last one first."""
        for step in reversed(ready.rule.steps):
            try:
                array = self._undo(step, ready, name, array)
            except FormatError as error:
                self.problems[f"{ready.where}: {error}"] = None
        return array

    def _undo(self, step: ValueStep, ready: ReadyRule, name: str, array: LazyArray) -> LazyArray:
        if step.verb == "pad":
            return self._cut(step, ready, name, array)
        if step.verb == "cast":
            return array
        number = _factor(step, ready, name, array)
        return Computed(
            array, np.dtype(np.float32), step.verb, 1 / number if step.verb == "scale" else -number
        )

    def _cut(self, step: ValueStep, ready: ReadyRule, name: str, array: LazyArray) -> LazyArray:
        for template in ready.sources:
            bound = template.match(name)
            axes = template.leaf.axes
            if bound is None or axes is None or step.axis not in axes:
                continue
            axes = _expanded(axes, len(array.shape))
            size = ready.known.sizes.get(step.axis) or self._size_in_like(ready, bound, step.axis)
            if size is None:
                raise FormatError(
                    f"the rows that `{step}` added to {name} are unknown, because {step.axis} is; write a line "
                    f"{step.axis} = NUMBER, such as {step.axis} = vocab_size, or pass like="
                )
            at = axes.index(step.axis)
            if array.shape[at] < size:
                raise FormatError(
                    f"{name} has {array.shape[at]} elements along {step.axis}, fewer than {size}"
                )
            return _resized(array, at, size)
        return array

    def _size_in_like(self, ready: ReadyRule, bound: Bound, axis: str) -> int | None:
        for template, shape in zip(ready.targets, self._wanted(ready, bound), strict=True):
            for other, size in self._equations(ready, template.leaf, shape):
                if other == axis:
                    return size
        return None


def _indices(names: Sequence[str], sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Yield all indices of some axes, each of which is a leaf."""
    if math.prod(sizes[name] for name in names) > _MOST_LEAVES:
        axes = ", ".join(f"{name} is {sizes[name]:,}" for name in names)
        raise FormatError(f"a rule makes at most {_MOST_LEAVES:,} leaves of one, and {axes}")
    return itertools.product(*(range(sizes[name]) for name in names))


def _first_missing(pair: Pair, sizes: Sizes, members: Members) -> tuple[int, ...]:
    """Return the first index on the numbered axes that has no source. A number in a name may be very large."""
    counts = [sizes.get(axis, 1) for axis in pair.numbered]
    for number in itertools.count():
        rest, index = number, list[int]()
        for count in reversed(counts):
            rest, digit = divmod(rest, count)
            index.insert(0, digit)
        if tuple(index) not in members:
            return tuple(index)
    raise AssertionError


def _try_solve(axis: Axis, total: int, sizes: Sizes) -> None:
    """Solve an axis of `like`. A contradiction is found later, when the shapes are compared."""
    with suppress(FormatError):
        solve(axis, total, sizes)


def _with_steps(array: LazyArray, target: Target, name: str) -> LazyArray:
    """Return an array with the values that the steps of a rule give it. Raise FormatError if a step does not fit."""
    ready = target.rule
    leaf = ready.targets[target.leaf].leaf
    for step in ready.rule.steps[1:] if ready.scales else ready.rule.steps:
        try:
            array = _with_step(step, array, ready, leaf, name)
        except FormatError as error:
            raise FormatError(f"{ready.where}: {error}") from error
    return array


def _with_step(
    step: ValueStep, array: LazyArray, ready: ReadyRule, leaf: LeafPattern, name: str
) -> LazyArray:
    if step.verb == "pad":
        return _padded(step, array, ready, leaf, name)
    if step.verb == "cast":
        _require_wide(step, array, name)
        array = Computed(array, dtype_from_name(step.dtype))
        array.keeps_dtype = True
        return array
    return Computed(array, np.dtype(np.float32), step.verb, _factor(step, ready, name, array))


def _factor(step: ValueStep, ready: ReadyRule, name: str, array: LazyArray) -> float:
    assert step.number
    number = ready.known.numbers.require(step.number)
    if step.verb == "scale" and number == 0:
        raise FormatError(f"`{step}` is 0, and could not be undone")
    if not is_floating(name_of_dtype(array.dtype)):
        raise FormatError(f"`{step}` needs floating numbers, and {name} is {array.dtype}")
    return number


def _padded(step: ValueStep, array: LazyArray, ready: ReadyRule, leaf: LeafPattern, name: str) -> LazyArray:
    assert step.number
    if step.axis not in (leaf.axes or ()):
        return array
    size = ready.known.number(step.number)
    at = _expanded(leaf.axes or (), len(array.shape)).index(step.axis)
    if size < array.shape[at]:
        raise FormatError(f"`{step}` is {size}, and {name} has {array.shape[at]} elements along {step.axis}")
    return _resized(array, at, size)


def _resized(array: LazyArray, axis: int, size: int) -> Resized:
    return Resized(array, (*array.shape[:axis], size, *array.shape[axis + 1 :]))


def _require_wide(step: ValueStep, array: LazyArray, name: str) -> None:
    """Refuse a cast to a narrower integer, or of a fraction to an integer."""
    new = dtype_from_name(step.dtype)
    if new.kind in "iu" and not np.can_cast(array.dtype, new):
        raise FormatError(f"`{step}` would cut the numbers of {name}, which is {array.dtype}")
