"""Where leaves go: from shardings by name, partition rules, or what was recorded when they were saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as _PartitionSpec

from eformer.checkpoint._leaf import split_name, unescape, with_nearest
from eformer.checkpoint._manifest import RecordedSharding
from eformer.checkpoint._tree import flatten
from eformer.errors import MismatchError

PartitionSpec: Any = _PartitionSpec  # whose constructor has no types

Rules = Sequence[tuple[str, _PartitionSpec]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a placement is decided by: the shape that the user sees, what `like` says, and what was recorded.

    A numpy array goes to a device only if somebody says so.
    """

    shape: tuple[int, ...]
    like: Any = None
    recorded: RecordedSharding | None = None
    is_numpy: bool = False


def recorded_sharding(sharding: Sharding) -> RecordedSharding | None:
    """How an array lies on its mesh; None for one that lies on none."""
    if not isinstance(sharding, NamedSharding):
        return None
    spec = tuple(sharding.spec)
    if not all(axes is None or isinstance(axes, (str, tuple)) for axes in spec):
        return None  # such as UNCONSTRAINED
    return RecordedSharding(spec, dict(sharding.mesh.shape))


def by_name(shardings: Any, leaves: Container[str]) -> dict[str, Any]:
    """Shardings in a tree of any kind, or flat by dotted name, as {escaped name: value}."""
    said, _ = flatten(shardings)
    # In a flat dict a whole path is one key, whose dots were escaped.
    return {name if name in leaves else name.replace("%2E", "."): value for name, value in said.items()}


def place(
    leaves: Mapping[str, Leaf],
    *,
    mesh: Mesh | None,
    rules: Rules | None,
    shardings: Any,
    ignored: Container[str] = (),
    every_leaf: bool = False,
    replicate: bool = False,
) -> tuple[dict[str, Sharding], dict[str, Callable[[Any], Any]]]:
    """A sharding for every leaf that something is said about, and what to call on the loaded arrays.

    Shardings by name win over rules, rules over `like`, `like` over what was recorded. Whatever does not fit is
    reported at once. Shardings of `ignored` leaves are nobody's business here. With `every_leaf` a leaf that the
    shardings do not name is a KeyError; with `replicate` one that nothing is said about goes everywhere.
    """
    if rules is not None and mesh is None:
        raise ValueError("rules= need a mesh= to lay leaves out on")
    problems: list[str] = []
    specs, after = _named(leaves, shardings, ignored, problems)
    if every_leaf and shardings is not None:
        _require_all(leaves, specs.keys() | after.keys())
    if rules is not None:
        patterns = [(_compiled(pattern), spec) for pattern, spec in rules]
        specs = {name: _match(name, leaf, patterns) for name, leaf in leaves.items()} | specs
    specs = {name: leaf.like for name, leaf in leaves.items() if leaf.like is not None} | specs
    if mesh is not None:
        unsaid = {name: leaf for name, leaf in leaves.items() if name not in specs and not leaf.is_numpy}
        specs |= _recorded(unsaid, mesh, replicate, problems)
    placed = {}
    for name, spec in specs.items():
        sharding = _fit(spec, mesh, leaves[name].shape)
        if isinstance(sharding, str):
            problems.append(f"leaf {name!r} {list(leaves[name].shape)}: {sharding}")
        else:
            placed[name] = sharding
    if problems:
        raise MismatchError(problems, context="the leaves cannot be placed so")
    return placed, after


def _named(
    leaves: Mapping[str, Leaf], shardings: Any, ignored: Container[str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Callable[[Any], Any]]]:
    if shardings is None:
        return {}, {}
    if isinstance(shardings, (Sharding, PartitionSpec)) or callable(shardings):
        said = dict.fromkeys(leaves, shardings)
    else:
        said = by_name(shardings, leaves)
    unknown = [name for name in said if name not in leaves and name not in ignored]
    problems += [
        f"shardings name {n!r}, which is not an array of the checkpoint{hint}"
        for n, hint in with_nearest(unknown, leaves)
    ]
    specs, after = {}, {}
    for name, value in said.items():
        if name not in leaves:
            continue
        if isinstance(value, (Sharding, PartitionSpec)):
            specs[name] = value
        elif callable(value):
            after[name] = value
        else:
            problems.append(f"leaf {name!r}: {value!r} is no Sharding, PartitionSpec or callable")
    return specs, after


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rules=: {pattern!r} is no regular expression: {error}") from error


def _match(name: str, leaf: Leaf, patterns: Sequence[tuple[re.Pattern[str], Any]]) -> Any:
    key = "/".join(unescape(part) for part in split_name(name))
    found = (spec for pattern, spec in patterns if pattern.search(key))
    spec = next(found, None) if leaf.shape else None  # a scalar has no axis to be cut along
    return PartitionSpec() if spec is None else spec


def _require_all(leaves: Mapping[str, Leaf], said: Collection[str]) -> None:
    missing = [f"{name!r}{hint}" for name, hint in with_nearest((n for n in leaves if n not in said), said)]
    if missing:
        raise KeyError(f"no sharding is given for {', '.join(missing)}, and mismatches are not allowed")


def _recorded(
    leaves: Mapping[str, Leaf], mesh: Mesh, replicate: bool, problems: list[str]
) -> dict[str, _PartitionSpec]:
    specs = {}
    for name, leaf in leaves.items():
        spec = PartitionSpec(*leaf.recorded.spec) if leaf.recorded else None
        if spec is not None and not isinstance(_fit(spec, mesh, leaf.shape), str):
            specs[name] = spec
        elif replicate or len(mesh.axis_names) == 1 or not leaf.shape:
            specs[name] = PartitionSpec()
        else:
            was = f"; it was saved as {spec}, which this mesh cannot do" if spec is not None else ""
            problems.append(
                f"leaf {name!r}: no sharding is said for it on a mesh of axes {mesh.axis_names}{was}; "
                "pass rules= or shardings="
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
