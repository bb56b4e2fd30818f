"""Compute the shapes that a load would return, and the bytes on each device, without reading data."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.formats.find import look_at
from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.loading.placement import current_mesh, jax_holds, refuse_on_devices
from eformer._engine.loading.request import PlacementRequest, Rules
from eformer._engine.loading.rules import PlaceableLeaf, place, warn_of_idle_rules
from eformer._engine.loading.select import key_dtype
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating
from eformer._engine.record.manifest import UNREADABLE, parse_structure
from eformer._engine.record.text import glance, size
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.trees.devices import is_key
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.unflatten import unflatten
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.sharding import Mesh, Sharding

    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.manifest import LeafEntry, TreeEntry

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A leaf as a load would place it. `spec` is None in host memory and on the default device."""

    dtype: str
    shape: tuple[int, ...]
    spec: Any
    shard: tuple[int, ...]
    shard_nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """List the bytes that a load would put on each device. `print` shows a table.

    per_device   bytes by device
    leaves       where each leaf would go, by name

    Example:

        >>> found = checkpoint.placement("run/step-100", mesh=mesh)
        >>> sorted(found.leaves)
        ['params.embedding', 'params.w']
    """

    per_device: Mapping[Any, int]
    leaves: Mapping[str, Placed]

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        lines = [_on(devices, nbytes) for nbytes, devices in self._by_bytes().items()]
        largest = sorted(self.leaves.items(), key=lambda pair: -pair[1].shard_nbytes)
        lines += [
            f"  {name} {p.dtype}{list(p.shape)} as {p.spec}: {size(p.shard_nbytes)} of {list(p.shard)} a device"
            for name, p in largest[:_MOST_SHOWN]
        ]
        if len(largest) > _MOST_SHOWN:
            lines.append(f"  ... and {len(largest) - _MOST_SHOWN} smaller leaves")
        return "\n".join(lines)

    def _by_bytes(self) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for device, nbytes in self.per_device.items():
            found.setdefault(nbytes, []).append(device)
        return found


def _on(devices: Sequence[Any], nbytes: int) -> str:
    if len(devices) == 1:
        return f"{devices[0]}: {size(nbytes)}"
    return f"{len(devices)} devices, {devices[0]} to {devices[-1]}: {size(nbytes)} each"


@dataclass(frozen=True, slots=True)
class _Leaf(PlaceableLeaf):
    """A leaf of a checkpoint or of a tree. `itemsize` is the bytes of an element that the user sees, such as a key."""

    dtype: str = ""
    itemsize: int = 0


def _leaf(shape: tuple[int, ...], dtype: str, itemsize: int, cast: str | None, **facts: Any) -> _Leaf:
    """Describe a leaf after a cast of floating elements."""
    if cast is not None and is_floating(dtype):
        dtype, itemsize = cast, dtype_from_name(cast).itemsize
    config: Any = jax.config  # without types
    is_held = dtype.startswith("key<") or jax_holds(dtype, config.jax_enable_x64)
    return _Leaf(shape, is_host_only=not is_held, dtype=dtype, itemsize=itemsize, **facts)


@uninterrupted
def placement(
    path: Any,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    prefix: str | None = None,
    dtype: Any = None,
) -> Placement:
    """Compute how many bytes `load` with the same arguments would put on each device of the mesh.

    Read no data. Raise the errors of `load`: one error lists all leaves that cannot be placed.

    path        the path of a checkpoint, or a tree of arrays or `ShapeDtypeStruct`s in its place
    mesh        the mesh to load onto; None for that of `jax.set_mesh`
    rules       where leaves go, by regular expressions; see `load`
    shardings   where leaves go, by name; see `load`
    prefix      the tree, if the checkpoint has several
    dtype       the dtype that floating leaves are cast to

    Example:

        >>> print(checkpoint.placement("run/step-100", mesh=mesh, rules=[("w", PartitionSpec("data"))]))
    """
    is_path = isinstance(path, (str, os.PathLike))
    cast = None if dtype is None else floating_dtype(dtype)
    leaves = _of_checkpoint(path, prefix, cast) if is_path else _of_tree(path, cast)
    used = current_mesh() if mesh is None else mesh
    if used is None:
        raise ValueError("placement needs a mesh: pass mesh=, or enter jax.set_mesh")
    request = PlacementRequest(mesh=used, rules=rules, shardings=shardings, is_current_mesh=mesh is None)
    warn_of_idle_rules(leaves, request)
    placed, _ = place(leaves, request, prefix=prefix)
    on_devices = ((name, leaves[name]) for name in placed)
    refuse_on_devices((name, leaf.dtype, leaf.shape) for name, leaf in on_devices if leaf.is_host_only)
    return _counted(leaves, placed, used)


def _counted(leaves: Mapping[str, _Leaf], placed: Mapping[str, Sharding], mesh: Mesh) -> Placement:
    per_device: dict[Any, int] = dict.fromkeys(mesh.devices.flat, 0)
    result = {}
    for name, leaf in leaves.items():
        sharding = placed.get(name)
        shard = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        nbytes = leaf.itemsize * math.prod(shard)
        result[name] = Placed(leaf.dtype, leaf.shape, getattr(sharding, "spec", sharding), shard, nbytes)
        devices: set[Any] = set() if sharding is None else sharding.device_set
        for device in devices:
            per_device[device] = per_device.get(device, 0) + nbytes
    return Placement(per_device, result)


def _of_checkpoint(path: str | os.PathLike[str], prefix: str | None, cast: str | None) -> dict[str, _Leaf]:
    found = {}
    for name, entry in look_at(path, lambda found: found.listed(prefix).leaves).items():
        shape = entry.logical_shape
        inner = math.prod(entry.shape[len(shape) :])  # the numbers of a PRNG key
        itemsize, is_numpy = dtype_from_name(entry.dtype).itemsize * inner, entry.home == "numpy"
        found[name] = _leaf(
            shape, entry.logical_dtype, itemsize, cast, recorded=entry.sharding, is_numpy=is_numpy
        )
    return found


def _of_tree(tree: Any, cast: str | None) -> dict[str, _Leaf]:
    found = {}
    for name, leaf in flatten(tree)[0].items():
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            numbers = jax.eval_shape(_numbers, leaf) if is_key(leaf) else leaf
            itemsize = numbers.dtype.itemsize * math.prod(numbers.shape[len(leaf.shape) :])
            like = leaf.sharding if getattr(leaf, "committed", True) and hasattr(leaf, "sharding") else None
            is_numpy = isinstance(leaf, np.ndarray)
            found[name] = _leaf(
                tuple(leaf.shape), str(leaf.dtype), itemsize, cast, like=like, is_numpy=is_numpy
            )
    return found


def _numbers(key: Any) -> Any:
    return jax.random.key_data(key)


# -------------------------------------------------------------------------------- shapes and dtypes


@uninterrupted
def abstract(
    path: str | os.PathLike[str], *, step: StepChoice = None, prefix: str | None = None, plain: bool = False
) -> Any:
    """Return the tree saved at `path` with a `ShapeDtypeStruct` in the place of every array. Read no data.

    The structure is that of `load` without `like`, and plain values are themselves. Shardings are left out, because
    they belong to the mesh of the save.

    step     of a run: the number of another step than the newest, or "best", see `load`
    prefix   the tree, if the checkpoint has several
    plain    nested dicts in the place of classes that this program cannot build, see `load`

    Example:

        >>> checkpoint.abstract("run/step-100")["params"]["w"]
        ShapeDtypeStruct(shape=(8, 4), dtype=float32)
    """
    choose = partial(path_of_step, step=step)
    return look_at(path, lambda found: _described(found.listed(prefix), plain), choose=choose)


def _described(tree: TreeEntry, plain: bool) -> Any:
    structure = parse_structure(tree.structure)
    if isinstance(structure, dict) and UNREADABLE in structure:
        raise StructureError(structure[UNREADABLE])
    leaves = {name: _struct(leaf) for name, leaf in tree.leaves.items()} | tree.values
    return unflatten(structure, leaves, plain=plain)


_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct  # without types


def _struct(leaf: LeafEntry) -> Any:
    dtype = key_dtype(leaf.key) if leaf.key else dtype_from_name(leaf.dtype)
    return _ShapeDtypeStruct(leaf.logical_shape, dtype, weak_type=leaf.home == "weak")
