"""Decide where leaves go: by shardings per name, by partition rules, by `like`, or as recorded at the save."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as _PartitionSpec

from eformer._engine.record.names import escape, split_name, unescape, with_nearest
from eformer._engine.record.text import few
from eformer._engine.trees.flatten import flatten
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

    from eformer._engine.loading.request import PlacementRequest
    from eformer._engine.record.manifest import RecordedSharding

PartitionSpec: Any = _PartitionSpec  # its constructor has no types

logger = logging.getLogger("eformer")


@dataclass(frozen=True, slots=True)
class PlaceableLeaf:
    """The facts that decide where a leaf goes.

    shape           shape that the user sees
    like            sharding that `like` asks for
    recorded        sharding at the time of the save
    is_numpy        the leaf goes to a device only if an argument asks for it
    is_host_only    JAX cannot hold the leaf; a later step refuses it if an argument puts it on a device
    """

    shape: tuple[int, ...]
    like: Any = None
    recorded: RecordedSharding | None = None
    is_numpy: bool = False
    is_host_only: bool = False


def place(
    leaves: Mapping[str, PlaceableLeaf],
    request: PlacementRequest,
    *,
    prefix: str | None = None,
    ignored: Collection[str] = (),
) -> tuple[dict[str, Sharding], dict[str, Callable[[Any], Any]]]:
    """Return a sharding for every leaf that a request, `like` or a record places, and functions for loaded arrays.

    Shardings by name win over rules, rules over `like`, `like` over the record. Raise a MismatchError that lists all
    leaves that cannot be placed. Names in the shardings may start with `prefix`, and may name `ignored` leaves.
    """
    if request.rules is not None and request.mesh is None:
        raise ValueError(
            f"{request.rules_name}= need a mesh= to place leaves on, or the mesh of jax.set_mesh"
        )
    problems: list[str] = []
    named, functions = _by_shardings(leaves, request, prefix, ignored, problems)
    if request.every_leaf and request.shardings is not None:
        _require_every_leaf(leaves, named.keys() | functions.keys())
    fitted = _Fitted(request.mesh)
    specs = {name: leaf.like for name, leaf in leaves.items() if leaf.like is not None}
    specs |= _by_rules(leaves, request) | named
    if request.mesh is not None:
        others = {name: leaf for name, leaf in leaves.items() if name not in specs}
        specs |= _by_default(others, request, fitted, problems)
    placed = {}
    for name, spec in specs.items():
        sharding = fitted(spec, leaves[name].shape)
        if isinstance(sharding, str):
            problems.append(f"leaf {name!r} {list(leaves[name].shape)}: {sharding}")
        else:
            placed[name] = sharding
    if problems:
        raise MismatchError(problems, context="leaves cannot be placed as requested")
    return placed, functions


# ----------------------------------------------------------------------------------- shardings by name


def by_name(shardings: Any, leaves: Container[str], prefix: str | None = None) -> dict[str, Any]:
    """Flatten shardings in a tree of any kind, or in a flat dict by dotted name, to {name of a leaf: value}.

    Names may start with the prefix of the tree.
    """
    given, _ = flatten(shardings)
    return {_leaf_name(name, leaves, prefix): value for name, value in given.items()}


def _leaf_name(name: str, leaves: Container[str], prefix: str | None) -> str:
    # A flat dict has whole names as keys, and `flatten` has escaped their dots.
    names = [name, name.replace("%2E", ".")]
    if prefix:
        names += [n.removeprefix(f"{start}.") for n in names for start in (prefix, escape(prefix))]
    names += [f"{n}.value" for n in names]  # `nn.get_sharding` of flax leaves boxes out
    return next((n for n in names if n in leaves), names[1])


def _by_shardings(
    leaves: Mapping[str, PlaceableLeaf],
    request: PlacementRequest,
    prefix: str | None,
    ignored: Collection[str],
    problems: list[str],
) -> tuple[dict[str, Any], dict[str, Callable[[Any], Any]]]:
    shardings = request.shardings
    if shardings is None:
        return {}, {}
    if isinstance(shardings, (Sharding, PartitionSpec)) or callable(shardings):
        by_leaf = dict.fromkeys(leaves, shardings)
    else:
        by_leaf = by_name(shardings, {*leaves, *ignored}, prefix)
    unknown = [name for name in by_leaf if name not in leaves and name not in ignored]
    problems += [
        f"shardings name {name!r}, which is not an array of the checkpoint{hint}"
        for name, hint in with_nearest(unknown, leaves)
    ]
    specs, functions = {}, {}
    for name, value in by_leaf.items():
        if name not in leaves:
            continue
        if isinstance(value, (Sharding, PartitionSpec)):
            specs[name] = value
        elif callable(value):
            functions[name] = value
        else:
            problems.append(f"leaf {name!r}: {value!r} is not a Sharding, PartitionSpec or callable")
    return specs, functions


def _require_every_leaf(leaves: Mapping[str, PlaceableLeaf], named: Collection[str]) -> None:
    missing = [name for name in leaves if name not in named]
    if missing:
        hints = ", ".join(f"{name!r}{hint}" for name, hint in with_nearest(missing, named))
        raise KeyError(f"shardings= must name every leaf if mismatches are not allowed; missing: {hints}")


# ----------------------------------------------------------------------------------------------- rules


def _by_rules(leaves: Mapping[str, PlaceableLeaf], request: PlacementRequest) -> dict[str, Any]:
    """Return the spec of the first rule that matches, by leaf. Scalars match no rule: they have no axis to cut."""
    patterns = [(_compiled(pattern, request.rules_name), spec) for pattern, spec in request.rule_pairs]
    if not patterns:
        return {}
    found = {name: _first_match(name, patterns) for name, leaf in leaves.items() if leaf.shape}
    return {name: spec for name, spec in found.items() if spec is not None}


def warn_of_idle_rules(names: Iterable[str], request: PlacementRequest) -> None:
    """Log the rules that match none of these names: their pattern is probably misspelled."""
    keys = [_key(name) for name in names] if request.rules else []
    idle = [
        pattern
        for pattern, _ in request.rule_pairs
        if not any(map(_compiled(pattern, request.rules_name).search, keys))
    ]
    if idle:
        logger.warning(
            "%s= that match no leaf: %s; they are searched for in names such as %s",
            request.rules_name,
            few(list(map(repr, idle))),
            repr(keys[0]) if keys else "'params/kernel'",
        )


def _compiled(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}=: {pattern!r} is not a regular expression: {error}") from error


def _first_match(name: str, patterns: Sequence[tuple[re.Pattern[str], Any]]) -> Any:
    key = _key(name)
    return next((spec for pattern, spec in patterns if pattern.search(key)), None)


def _key(name: str) -> str:
    """Return the name in the form that rules match: its parts joined by "/"."""
    parts = split_name(name)
    return "/".join(map(unescape, parts) if "%" in name else parts)


# -------------------------------------------------------------------------------------------- defaults


def is_abstract(sharding: Any) -> bool:
    """Tell whether a sharding is on an `AbstractMesh`, which has axes but no devices."""
    return isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _by_default(
    leaves: Mapping[str, PlaceableLeaf], request: PlacementRequest, fitted: _Fitted, problems: list[str]
) -> dict[str, Any]:
    """Place leaves that no argument places: with rules, replicate them; otherwise follow the record."""
    moved = {name: leaf for name, leaf in leaves.items() if not _stays_on_host(leaf, request)}
    if request.rules is not None:
        return dict.fromkeys(moved, PartitionSpec())
    return _by_record(moved, request, fitted, problems)


def _stays_on_host(leaf: PlaceableLeaf, request: PlacementRequest) -> bool:
    if leaf.is_host_only:
        return leaf.is_numpy or request.is_current_mesh
    return leaf.is_numpy and request.rules is None and not request.moves_numpy


def _by_record(
    leaves: Mapping[str, PlaceableLeaf], request: PlacementRequest, fitted: _Fitted, problems: list[str]
) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    mesh = fitted.mesh
    assert mesh is not None
    replicate = request.replicate or request.is_current_mesh or len(mesh.axis_names) == 1
    for name, leaf in leaves.items():
        recorded = leaf.recorded if leaf.recorded and leaf.recorded.mesh else None
        spec = PartitionSpec(*recorded.spec) if recorded else None
        sharding = fitted(spec, leaf.shape) if recorded else ""
        if not isinstance(sharding, str):
            specs[name] = sharding
        elif replicate or not leaf.shape:
            specs[name] = NamedSharding(mesh, PartitionSpec())
        else:
            saved = f"; it was saved as {spec}, which does not fit this mesh" if recorded else ""
            problems.append(
                f"leaf {name!r}: no sharding is given for it on a mesh with axes {mesh.axis_names}{saved}; "
                f"pass {request.rules_name}= or shardings="
            )
        kind = leaf.recorded.memory_kind if leaf.recorded else None
        if kind and name in specs and has_memory(mesh.devices.flat, kind):
            specs[name] = specs[name].with_memory_kind(kind)
    return specs


def has_memory(devices: Iterable[Any], kind: str) -> bool:
    """Tell whether all of these devices that belong to this process have memory of this kind."""
    here = [device for device in devices if device.process_index == jax.process_index()]
    return all(kind in {memory.kind for memory in device.addressable_memories()} for device in here)


class _Fitted:
    """Return the sharding for a spec, or the reason why it does not fit a shape. Compute each answer once.

    Equal specs get the same sharding object, for every shape: the arrays of a tree may each have an equal sharding of
    their own, and later steps compare shardings by identity.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.by_identity: dict[int, Sharding | str] = {}
        self.by_value: dict[Any, Sharding | str] = {}
        self.misfits: dict[tuple[int, tuple[int, ...]], str | None] = {}
        self.specs: list[Any] = []  # kept alive: a new object could get the id of a deleted spec

    def __call__(self, spec: Any, shape: tuple[int, ...]) -> Sharding | str:
        sharding = self.by_identity.get(id(spec))
        if sharding is None:
            sharding = self.by_identity[id(spec)] = self._shared(spec)
        if isinstance(sharding, str):
            return sharding
        key = (id(sharding), shape)
        if key not in self.misfits:
            self.misfits[key] = _misfit(sharding, shape)
        return self.misfits[key] or sharding

    def _shared(self, spec: Any) -> Sharding | str:
        self.specs.append(spec)
        found = self.by_value.get(spec)
        if found is None:
            found = self.by_value[spec] = _sharding_or_problem(spec, self.mesh)
        return found


def _sharding_or_problem(spec: Any, mesh: Mesh | None) -> Sharding | str:
    """Return the sharding for a spec, or the reason why the spec needs a mesh."""
    if isinstance(spec, PartitionSpec):
        if mesh is None:
            return f"{spec} needs a mesh=, or the mesh of jax.set_mesh"
        return _named(mesh, spec)
    if is_abstract(spec):
        if mesh is None:
            return f"{spec.spec} is on an AbstractMesh, which has no devices; pass mesh=, or use jax.set_mesh"
        return _named(mesh, spec.spec, spec.memory_kind)
    return spec if isinstance(spec, Sharding) else f"{spec!r} is not a PartitionSpec or a Sharding"


def _named(mesh: Mesh, spec: Any, memory_kind: str | None = None) -> Sharding | str:
    try:
        return NamedSharding(mesh, spec, memory_kind=memory_kind)
    except Exception as error:  # noqa: BLE001  JAX raises errors of several types for unknown and repeated axes
        return _does_not_fit(spec, error)


def _misfit(sharding: Sharding, shape: tuple[int, ...]) -> str | None:
    """Say why a sharding does not fit a shape; None if it does."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        return f"{sharding.spec} does not fit: it is for {len(sharding.spec)} axes, the leaf has {len(shape)}"
    try:
        sharding.shard_shape(shape)
    except Exception as error:  # noqa: BLE001  JAX raises errors of several types for sizes that do not divide
        return _does_not_fit(getattr(sharding, "spec", sharding), error)
    return None


def _does_not_fit(spec: Any, error: Exception) -> str:
    return f"{spec} does not fit: {(str(error) or repr(error)).splitlines()[0]}"
