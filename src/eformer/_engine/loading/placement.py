"""Place the arrays of a load: on a sharding, on the default device or in host memory."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding, Sharding

from eformer._engine.loading.device_put import default_device
from eformer._engine.loading.rules import (
    PartitionSpec,
    PlaceableLeaf,
    has_memory,
    is_abstract,
    place,
    warn_of_idle_rules,
)
from eformer._engine.record.boxes import Box
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.trees.devices import PACKED
from eformer._engine.trees.shardings import AnnotatedShape
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eformer._engine.loading.contents import Contents
    from eformer._engine.loading.request import PlacementRequest, Request
    from eformer._engine.loading.select import LeafTarget

_config: Any = jax.config  # without types

logger = logging.getLogger("eformer")

_WORTH_BROADCASTING = 2**20  # bytes on a device: smaller leaves are read by every process
_WORTH_READING_PARTS = 2**18  # bytes of an array: smaller arrays are read whole and cut afterwards


def place_targets(targets: Sequence[LeafTarget], contents: Contents, request: Request) -> None:
    """Give every target a sharding, the default device or host memory, and the boxes that its devices need.

    Targets that become plain numbers stay in host memory.
    """
    targets = [target for target in targets if target.like_scalar is None]
    asked = request.placement
    arguments = (asked.mesh, asked.rules, asked.shardings, *(target.sharding for target in targets))
    if any(argument is not None for argument in arguments):
        _follow_request(targets, contents, request)
    x64 = _config.jax_enable_x64
    if too_wide := [t for t in targets if not t.as_numpy and not jax_holds(t.dtype, x64)]:
        _keep_on_host(too_wide)
    for target in targets:
        recorded = target.entry.sharding if target.sharding is None else None
        if recorded and recorded.memory_kind and request.like is None:  # `like` decides about memory, too
            _keep_memory(target, recorded.memory_kind)
        if target.sharding is not None and not target.as_numpy and target.new_shape is None:
            if request.options.broadcast and not target.entry.key:
                dtype = dtype_from_name(target.dtype)
                target.read_sharding = _disjoint(target.sharding, target.entry.shape, dtype)
            elif request.whole_of:
                target.read_sharding = _as_saved(target)
            _assign_boxes(target)


def _follow_request(targets: Sequence[LeafTarget], contents: Contents, request: Request) -> None:
    leaves = {target.name: _as_placeable(target, keep_memory=request.like is None) for target in targets}
    deselected = contents.arrays.keys() - leaves.keys()  # not in `keys`, or not in `like`
    asked = request.placement
    placed, functions = place(leaves, asked, prefix=request.prefix, ignored=deselected)
    warn_of_idle_rules(contents.names, asked)
    for target in targets:
        target.transform = functions.get(target.name)
        if target.name in placed:
            target.sharding, target.as_numpy, target.is_explicit = placed[target.name], False, True
        elif asked.moves_numpy and asked.mesh is not None:
            target.as_numpy = False  # JAX cannot hold it: `_keep_on_host` undoes this, with a warning


def _as_placeable(target: LeafTarget, *, keep_memory: bool) -> PlaceableLeaf:
    recorded = target.entry.sharding
    if recorded is not None and not keep_memory:
        recorded = msgspec.structs.replace(recorded, memory_kind=None)
    is_host_only = not jax_holds(target.dtype, _config.jax_enable_x64)
    return PlaceableLeaf(target.shape, target.sharding, recorded, target.as_numpy, is_host_only)


def _keep_memory(target: LeafTarget, kind: str) -> None:
    """Put a leaf that no argument places into memory of the kind that it was saved from, on the default device."""
    device = default_device(_config.jax_default_device)
    if has_memory([device], kind):
        target.sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


class DeviceBoxes(msgspec.Struct, frozen=True):
    """The boxes of an array that the devices of this process get.

    boxes     the distinct boxes, as they are read; None for the whole array
    devices   the devices, in the order of the sharding
    numbers   the number of the box of each device
    cuts      the slices of each box, if the whole array is read for several boxes
    """

    boxes: list[Box] | None
    devices: list[Any]
    numbers: list[int]
    cuts: list[tuple[slice, ...]] | None = None

    @property
    def is_one_each(self) -> bool:
        return len(self.numbers) == 1


def _assign_boxes(target: LeafTarget) -> None:
    entry = target.entry
    nbytes = math.prod(entry.shape) * dtype_from_name(target.dtype).itemsize
    sharding = target.read_sharding or target.sharding
    boxes = _boxes(sharding, entry.logical_shape, entry.shape, nbytes <= _WORTH_READING_PARTS)
    target.device_boxes, target.boxes = boxes, boxes.boxes


@lru_cache(4096)
def _boxes(
    sharding: Sharding, shape: tuple[int, ...], stored: tuple[int, ...], is_small: bool
) -> DeviceBoxes:
    """Return the distinct boxes of the devices of this process, and the box of each device.

    `stored` is the shape of the numbers: a PRNG key has a few numbers, which are never cut. If this process needs all
    elements of a small array, the array is read as a whole, and cut afterwards.
    """
    numbers: dict[Box, int] = {}
    devices, held = [], []
    inner = stored[len(shape) :]
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True)]
        box = Box((*(a for a, _ in bounds), *(0 for _ in inner)), (*(b for _, b in bounds), *inner))
        devices.append(device)
        held.append(numbers.setdefault(box, len(numbers)))
    boxes = list(numbers)
    if boxes == [Box.whole(stored)]:
        return DeviceBoxes(None, devices, held)
    if is_small and boxes and sum(box.size for box in boxes) == math.prod(stored):
        return DeviceBoxes(None, devices, held, [box.slices for box in boxes])
    return DeviceBoxes(boxes, devices, held)


def _as_saved(target: LeafTarget) -> Sharding | None:
    """Return the sharding that a leaf was saved with, on the mesh that it goes to.

    Return None if this is the wanted sharding, or is not known. The answer is the same in every process.
    """
    saved, wanted = target.entry.sharding, target.sharding
    if saved is None or not isinstance(wanted, NamedSharding) or wanted.is_fully_addressable:
        return None
    if dict(wanted.mesh.shape) != saved.mesh or dtype_from_name(target.dtype) in PACKED:
        return None
    if saved.memory_kind is not None or wanted.memory_kind not in (None, default_memory(wanted)):
        return None
    found = NamedSharding(wanted.mesh, PartitionSpec(*saved.spec))
    return None if found.is_equivalent_to(wanted, len(target.entry.logical_shape)) else found


# ---------------------------------------------------------------------------------------- current mesh


def on_current_mesh(placement: PlacementRequest, like: Mapping[str, Any] | None) -> PlacementRequest:
    """Return the request on the mesh of `jax.set_mesh`, if one is set and the request has none.

    A mesh with devices of other processes is used only if an argument needs a mesh: then all these processes have to
    call `load`, and a load without such an argument may be the call of a single process.
    """
    mesh = current_mesh() if placement.mesh is None else None
    if mesh is None:
        return placement
    is_shared = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
    if is_shared and not _needs_mesh(placement, like):
        return placement
    return replace(placement, mesh=mesh, is_current_mesh=True)


def current_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh of `jax.set_mesh`; None if no mesh is set."""
    try:
        mesh: jax.sharding.Mesh = jax.sharding.get_mesh()
    except ValueError:  # inside of jit, where only an abstract mesh is current
        return None
    return None if mesh.empty else mesh


def _needs_mesh(placement: PlacementRequest, like: Mapping[str, Any] | None) -> bool:
    if placement.rules is not None:
        return True
    asked = [*jax.tree.leaves(placement.shardings), *(like or {}).values()]
    return any(
        isinstance(leaf, (PartitionSpec, AnnotatedShape))
        or is_abstract(leaf)
        or is_abstract(getattr(leaf, "sharding", None))
        for leaf in asked
    )


# ------------------------------------------------------------------------------------------- processes


def processes_of(placement: PlacementRequest, like: Mapping[str, Any] | None) -> set[int]:
    """Return the processes whose devices a request names; empty unless they are this process and at least one more."""
    if placement.shardings is None and placement.mesh is None and not like:
        return set()
    shardings = {id(sharding): sharding for sharding in _requested(placement, like)}
    if not shardings:
        return set()
    devices: set[Any] = {device for sharding in set(shardings.values()) for device in _devices(sharding)}
    processes: set[int] = {device.process_index for device in devices}
    return processes if len(processes) > 1 and jax.process_index() in processes else set()


def _requested(placement: PlacementRequest, like: Mapping[str, Any] | None) -> Iterable[Any]:
    """Yield the shardings and meshes that the arguments of a load name."""
    yield from (leaf for leaf in jax.tree.leaves(placement.shardings) if isinstance(leaf, Sharding))
    if placement.mesh is not None:
        yield placement.mesh
    for leaf in (like or {}).values():
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, Sharding):
            yield sharding


def _devices(where: Any) -> Iterable[Any]:
    mesh = getattr(where, "mesh", where)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat
    if isinstance(mesh, jax.sharding.AbstractMesh):  # has no devices
        return ()
    return where.device_set if isinstance(where, Sharding) else ()


# ------------------------------------------------------------------------------------------- broadcast


@lru_cache(1024)
def _disjoint(sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sharding | None:
    """Cut a sharding further, by axes of the mesh that it does not use, until no two processes hold the same box.

    Return None if this is not possible, not needed, or not worth it.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    if sharding.memory_kind not in (None, default_memory(sharding)):
        return None
    nbytes = dtype.itemsize * math.prod(sharding.shard_shape(shape))
    if nbytes < _WORTH_BROADCASTING or not _is_shared(sharding, shape) or dtype in PACKED:
        return None
    mesh = sharding.mesh
    spec = [_axes(entry) for entry in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    used = {axis for axes in spec for axis in axes}
    unused = tuple(axis for axis in mesh.axis_names if axis not in used and mesh.shape[axis] > 1)
    for number, size in enumerate(shape):
        axes = (*spec[number], *unused)
        if size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return NamedSharding(mesh, PartitionSpec(*spec[:number], axes, *spec[number + 1 :]))
    return None


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _is_shared(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Tell whether several processes hold the same box."""
    holders: dict[Any, int] = {}
    indices: Any = sharding.devices_indices_map(shape)  # devices have no types
    for device, index in indices.items():
        box = tuple((s.start, s.stop) for s in index)
        if holders.setdefault(box, device.process_index) != device.process_index:
            return True
    return False


# --------------------------------------------------------------------------------------------- devices


@lru_cache
def jax_holds(dtype: str, x64: bool) -> bool:  # noqa: ARG001  x64 is for the cache
    """Tell whether JAX has this dtype. Without x64 it silently cuts 64 bits to 32; it lacks some other dtypes."""
    try:
        found: Any = jax.device_put(np.zeros(1, dtype_from_name(dtype)))
    except Exception:  # noqa: BLE001  JAX raises errors of several types for dtypes that it or its compiler does not know
        return False
    return bool(found.dtype == dtype_from_name(dtype))


def _keep_on_host(targets: Sequence[LeafTarget]) -> None:
    """Make numpy arrays of leaves that JAX cannot hold unchanged; refuse leaves that an argument puts on devices."""
    refuse_on_devices((t.name, t.dtype, t.entry.shape) for t in targets if t.is_explicit)
    for target in targets:
        target.as_numpy = True
    logger.warning(
        "%d leaves are returned as numpy arrays, because JAX would change them (64 bits need jax_enable_x64); "
        "the first is %r, %s",
        len(targets), targets[0].name, targets[0].dtype,
    )  # fmt: skip


def refuse_on_devices(leaves: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
    """Raise a MismatchError that lists these leaves, by name, dtype and shape; do nothing without leaves."""
    problems = [f"leaf {name!r} is {dtype}{list(shape)}" for name, dtype, shape in leaves]
    if problems:
        raise MismatchError(
            problems,
            context="JAX cannot hold these as they are; set jax_enable_x64, or pass dtype= or numpy arrays in like=",
        )


def default_memory(sharding: Sharding) -> str:
    """Return the kind of memory that a device of the sharding uses by default."""
    device: Any = next(iter(sharding.device_set))
    return str(device.default_memory().kind)
