"""Where leaves go: from shardings by name, partition rules, or what was recorded when they were saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as _PartitionSpec

from eformer._engine.record.names import escape, split_name, unescape, with_nearest
from eformer._engine.trees.flatten import flatten
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from eformer._engine.record.manifest import RecordedSharding

PartitionSpec: Any = _PartitionSpec  # whose constructor has no types

Rules = Sequence[tuple[str, _PartitionSpec]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a placement is decided by: the shape that the user sees, what `like` says, and what was recorded.

    A numpy array goes to a device only if somebody says so; one that JAX cannot hold, only if it is meant.
    """

    shape: tuple[int, ...]
    like: Any = None
    recorded: RecordedSharding | None = None
    is_numpy: bool = False
    is_for_numpy_only: bool = False


def by_name(shardings: Any, leaves: Container[str], prefix: str | None = None) -> dict[str, Any]:
    """Shardings in a tree of any kind, or flat by dotted name, as {escaped name: value}. Names may begin with the
    prefix of the tree."""
    said, _ = flatten(shardings)
    return {_name_of(name, leaves, prefix): value for name, value in said.items()}


def _name_of(name: str, leaves: Container[str], prefix: str | None) -> str:
    # In a flat dict a whole path is one key, whose dots were escaped.
    names = [name, name.replace("%2E", ".")]
    if prefix:
        names += [n.removeprefix(f"{start}.") for n in names for start in (prefix, escape(prefix))]
    return next((n for n in names if n in leaves), names[1])


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a caller says about where leaves go.

    prefix         of the tree: names in `shardings` may begin with it
    every_leaf     `shardings` have to name every leaf, else KeyError
    replicate      a leaf that nothing is said about goes to every device of the mesh
    rules_are      what the caller's argument for the rules is called
    """

    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    prefix: str | None = None
    every_leaf: bool = False
    replicate: bool = False
    rules_are: str = "rules"


def place(
    leaves: Mapping[str, Leaf], said: PlacementRequest, ignored: Collection[str] = ()
) -> tuple[dict[str, Sharding], dict[str, Callable[[Any], Any]]]:
    """A sharding for every leaf that something is said about, and what to call on the loaded arrays.

    Shardings by name win over rules, rules over `like`, `like` over what was recorded. Whatever does not fit is
    reported at once. Shardings of `ignored` leaves are nobody's business here.
    """
    if said.rules is not None and said.mesh is None:
        raise ValueError(f"{said.rules_are}= need a mesh= to lay leaves out on")
    problems: list[str] = []
    named, after = _named(leaves, said, ignored, problems)
    if said.every_leaf and said.shardings is not None:
        _require_all(leaves, named.keys() | after.keys())
    specs = {name: leaf.like for name, leaf in leaves.items() if leaf.like is not None}
    specs |= _matched(leaves, said) | named
    if said.mesh is not None:
        unsaid = {name: leaf for name, leaf in leaves.items() if name not in specs}
        specs |= _rest(unsaid, said, said.mesh, problems)
    placed = {}
    for name, spec in specs.items():
        sharding = _fit(spec, said.mesh, leaves[name].shape)
        if isinstance(sharding, str):
            problems.append(f"leaf {name!r} {list(leaves[name].shape)}: {sharding}")
        else:
            placed[name] = sharding
    if problems:
        raise MismatchError(problems, context="the leaves cannot be placed so")
    return placed, after


def _named(
    leaves: Mapping[str, Leaf], said: PlacementRequest, ignored: Collection[str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Callable[[Any], Any]]]:
    shardings = said.shardings
    if shardings is None:
        return {}, {}
    if isinstance(shardings, (Sharding, PartitionSpec)) or callable(shardings):
        by_leaf = dict.fromkeys(leaves, shardings)
    else:
        by_leaf = by_name(shardings, {*leaves, *ignored}, said.prefix)
    unknown = [name for name in by_leaf if name not in leaves and name not in ignored]
    problems += [
        f"shardings name {n!r}, which is not an array of the checkpoint{hint}"
        for n, hint in with_nearest(unknown, leaves)
    ]
    specs, after = {}, {}
    for name, value in by_leaf.items():
        if name not in leaves:
            continue
        if isinstance(value, (Sharding, PartitionSpec)):
            specs[name] = value
        elif callable(value):
            after[name] = value
        else:
            problems.append(f"leaf {name!r}: {value!r} is no Sharding, PartitionSpec or callable")
    return specs, after


def _compiled(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}=: {pattern!r} is no regular expression: {error}") from error


def _matched(leaves: Mapping[str, Leaf], said: PlacementRequest) -> dict[str, Any]:
    """For each leaf that a rule is for, the spec of the first. A scalar has no axis to be cut along."""
    patterns = [(_compiled(pattern, said.rules_are), spec) for pattern, spec in said.rules or ()]
    found = {name: _first_match(name, patterns) for name, leaf in leaves.items() if leaf.shape}
    return {name: spec for name, spec in found.items() if spec is not None}


def _first_match(name: str, patterns: Sequence[tuple[re.Pattern[str], Any]]) -> Any:
    key = "/".join(unescape(part) for part in split_name(name))
    return next((spec for pattern, spec in patterns if pattern.search(key)), None)


def _rest(
    leaves: Mapping[str, Leaf], said: PlacementRequest, mesh: Mesh, problems: list[str]
) -> dict[str, Any]:
    """What nothing else is said about: with rules it goes everywhere, unless JAX cannot hold it."""
    if said.rules is not None:
        return {name: PartitionSpec() for name, leaf in leaves.items() if not leaf.is_for_numpy_only}
    return _recorded({n: leaf for n, leaf in leaves.items() if not leaf.is_numpy}, said, mesh, problems)


def _require_all(leaves: Mapping[str, Leaf], said: Collection[str]) -> None:
    missing = [f"{name!r}{hint}" for name, hint in with_nearest((n for n in leaves if n not in said), said)]
    if missing:
        raise KeyError(f"no sharding is given for {', '.join(missing)}, and mismatches are not allowed")


def _recorded(
    leaves: Mapping[str, Leaf], said: PlacementRequest, mesh: Mesh, problems: list[str]
) -> dict[str, _PartitionSpec]:
    specs = {}
    for name, leaf in leaves.items():
        spec = PartitionSpec(*leaf.recorded.spec) if leaf.recorded else None
        if spec is not None and not isinstance(_fit(spec, mesh, leaf.shape), str):
            specs[name] = spec
        elif said.replicate or len(mesh.axis_names) == 1 or not leaf.shape:
            specs[name] = PartitionSpec()
        else:
            was = f"; it was saved as {spec}, which this mesh cannot do" if spec is not None else ""
            problems.append(
                f"leaf {name!r}: no sharding is said for it on a mesh of axes {mesh.axis_names}{was}; "
                f"pass {said.rules_are}= or shardings="
            )
    return specs


def _fit(spec: Any, mesh: Mesh | None, shape: tuple[int, ...]) -> Sharding | str:
    """The sharding, or why there is none."""
    try:
        if isinstance(spec, PartitionSpec):
            if mesh is None:
                return f"{spec} needs a mesh="
            spec = NamedSharding(mesh, spec)
        if isinstance(spec, NamedSharding) and len(spec.spec) > len(shape):
            return f"{spec.spec} does not fit: it is for {len(spec.spec)} axes, the leaf has {len(shape)}"
        spec.shard_shape(shape)
    except Exception as error:  # noqa: BLE001  JAX has its own for unknown axes, axes named twice, sizes that do not divide
        return f"{getattr(spec, 'spec', spec)} does not fit: {(str(error) or repr(error)).splitlines()[0]}"
    sharding: Sharding = spec
    return sharding
