"""Where the arrays of a load go: a sharding, the default device or host memory; and how they get there."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from eformer._engine.loading.device_put import put_on, put_on_default
from eformer._engine.loading.rules import Leaf, PartitionSpec, PlacementRequest
from eformer._engine.loading.rules import place as place_by_rules
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.regions import Region
from eformer._engine.trees.devices import PACKED, bits_of, resharded, takes_host_memory
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eformer._engine.loading.select import LeafTarget, Request
    from eformer._engine.record.manifest import TreeEntry

_config: Any = jax.config  # whose attributes have no types

logger = logging.getLogger("eformer")

_WORTH_BROADCASTING = 2**20  # bytes on a device


# --------------------------------------------------------------------------------------------- place


def place_items(items: Sequence[LeafTarget], tree: TreeEntry, request: Request) -> None:
    """A sharding, the default device or host memory for every item, and the boxes that each device needs."""
    said = (request.mesh, request.rules, request.shardings, *(i.sharding for i in items))
    if any(argument is not None for argument in said):
        _follow_arguments(items, tree, request)
    _keep_on_host(
        [item for item in items if not item.as_numpy and not jax_holds(item.dtype, _config.jax_enable_x64)]
    )
    for item in items:
        if item.sharding is not None and not item.as_numpy and item.new_shape is None:
            if request.broadcast and not item.entry.key:
                item.spread = _spread(item.sharding, item.entry.shape, dtype_from_name(item.dtype))
            _cut_up(item)


def processes_of(request: Request, like: Mapping[str, Any] | None) -> set[int]:
    """The processes whose devices are asked for, if there are others among them, and this one is."""
    said = {id(s): s for s in _said_shardings(request, like)}
    if not said:
        return set()
    devices: set[Any] = {device for sharding in set(said.values()) for device in _devices(sharding)}
    processes: set[int] = {device.process_index for device in devices}
    return processes if len(processes) > 1 and jax.process_index() in processes else set()


def _said_shardings(request: Request, like: Mapping[str, Any] | None) -> Iterable[Any]:
    yield from (leaf for leaf in jax.tree.leaves(request.shardings) if isinstance(leaf, Sharding))
    if request.mesh is not None:
        yield request.mesh
    for leaf in (like or {}).values():
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, Sharding):
            yield sharding


def _devices(where: Any) -> Iterable[Any]:
    mesh = getattr(where, "mesh", where)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat
    if isinstance(mesh, jax.sharding.AbstractMesh):  # which says nothing about devices
        return ()
    return where.device_set if isinstance(where, Sharding) else ()


@lru_cache(1024)
def _spread(sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sharding | None:
    """The same sharding, cut further by those axes of the mesh that it does not use; None if that is not possible, or
    no two processes hold the same, or it is not worth the while."""
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (
        None,
        _default_memory(sharding),
    ):
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


def _default_memory(sharding: Sharding) -> str:
    device: Any = next(iter(sharding.device_set))
    return str(device.default_memory().kind)


def _is_shared(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether several processes hold the same box."""
    holders: dict[Any, int] = {}
    placed: Any = sharding.devices_indices_map(shape)  # devices have no types
    for device, index in placed.items():
        box = tuple((s.start, s.stop) for s in index)
        if holders.setdefault(box, device.process_index) != device.process_index:
            return True
    return False


def _follow_arguments(items: Sequence[LeafTarget], tree: TreeEntry, request: Request) -> None:
    leaves = {item.name: _as_leaf(item) for item in items}
    said = PlacementRequest(
        mesh=request.mesh,
        rules=request.rules,
        shardings=request.shardings,
        prefix=request.prefix,
        every_leaf=request.every_leaf,
        replicate=request.replicate,
        rules_are=request.rules_are,
    )
    placed, after = place_by_rules(
        leaves, said, ignored=tree.leaves.keys() - leaves.keys()
    )  # which `keys` leave out
    for item in items:
        item.after = after.get(item.name)
        if item.name in placed:
            item.sharding, item.as_numpy, item.is_explicit = placed[item.name], False, True


def _as_leaf(item: LeafTarget) -> Leaf:
    stays = item.as_numpy and not jax_holds(item.dtype, _config.jax_enable_x64)
    return Leaf(item.shape, item.sharding, item.entry.sharding, item.as_numpy, stays)


@lru_cache
def jax_holds(dtype: str, x64: bool) -> bool:  # noqa: ARG001  x64 is for the cache
    """Whether JAX has this dtype. Without x64 it would cut 64 bits to 32 without a word; some it never has."""
    try:
        found: Any = jax.device_put(np.zeros(1, dtype_from_name(dtype)))
    except Exception:  # noqa: BLE001  JAX has several for dtypes that it or its compiler does not know
        return False
    return bool(found.dtype == dtype_from_name(dtype))


def _keep_on_host(items: Sequence[LeafTarget]) -> None:
    """Leaves that JAX cannot hold as they are stay numpy arrays, unless somebody wants them on a device."""
    refuse_on_devices((item.name, item.dtype, item.entry.shape) for item in items if item.is_explicit)
    for item in items:
        item.as_numpy = True
    if items:
        logger.warning(
            "%d leaves are returned as numpy arrays, because JAX would change them (64 bits need jax_enable_x64); "
            "the first is %r, %s",
            len(items), items[0].name, items[0].dtype,
        )  # fmt: skip


def refuse_on_devices(leaves: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
    """For names, dtypes and shapes of what is wanted on devices and cannot be there."""
    problems = [f"leaf {name!r} is {dtype}{list(shape)}" for name, dtype, shape in leaves]
    if problems:
        raise MismatchError(
            problems,
            context="JAX cannot hold these as they are; set jax_enable_x64, or pass dtype= or numpy arrays in like=",
        )


def _cut_up(item: LeafTarget) -> None:
    """The distinct boxes that this process's devices hold, and which device holds which."""
    sharding, shape = item.spread or item.sharding, item.entry.logical_shape
    assert sharding is not None
    numbers: dict[Region, int] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True)]
        inner = item.entry.shape[len(shape) :]  # the numbers of a PRNG key are never cut
        region = Region((*(a for a, _ in bounds), *(0 for _ in inner)), (*(b for _, b in bounds), *inner))
        item.devices.append((device, numbers.setdefault(region, len(numbers))))
    item.regions = list(numbers)


def accelerator_of(item: LeafTarget) -> Any:
    """One of the devices that the item goes to, if it goes nowhere else than into the memory of accelerators: into
    memory that is not the host's. None if it does not."""
    return None if item.as_numpy else _accelerator(item.sharding, _config.jax_default_device)


@lru_cache(1024)
def _accelerator(sharding: Sharding | None, default: Any) -> Any:
    if sharding is None:
        devices = [default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]]
    elif sharding.memory_kind in (None, _default_memory(sharding)):
        devices = list(sharding.addressable_devices)
    else:
        devices = []
    if any(device.platform == "cpu" or takes_host_memory(device) for device in devices):
        return None
    return next(iter(devices), None)


# ------------------------------------------------------------------------------------------ assemble


def assemble(items: Sequence[LeafTarget]) -> dict[str, Any]:
    """The arrays by name. Memory that JAX takes as it is, is private and never written again."""
    buffers: list[Any] = []
    devices: list[Any] = []
    plain: list[Any] = []
    for item in items:
        if item.new_shape is not None:
            item.arrays = [item.arrays[0].reshape(item.new_shape)]
        if item.as_numpy or item.new_shape is not None:
            continue
        if item.spread is not None:
            item.arrays = [array.view(bits_of(array.dtype)) for array in item.arrays]
        for array in item.arrays:
            array.flags.writeable = False
        if item.sharding is None:
            plain.append(item.arrays[0])
        else:
            buffers += [item.arrays[number] for _, number in item.devices]
            devices += [_memory_of(device, item.sharding) for device, _ in item.devices]
    on_default = iter(put_on_default(plain))
    on_devices = iter(put_on(buffers, devices))
    leaves = {}
    for item in items:
        if item.as_numpy:
            leaf = item.arrays[0]
        elif item.new_shape is not None:
            leaf = _cut_and_put(item)
        elif item.sharding is None:
            leaf = _keyed(next(on_default), item)
        else:
            shards = [next(on_devices) for _ in item.devices]
            leaf = _keyed(_joined(shards, item), item)
        leaves[item.name] = leaf
    return leaves


def _memory_of(device: Any, sharding: Any) -> Any:
    """The device, or that memory of it that the sharding asks for."""
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _joined(shards: list[Any], item: LeafTarget) -> Any:
    sharding = item.spread or item.sharding
    assert sharding is not None
    if item.entry.key:
        sharding = _of_key_data(sharding, len(item.entry.logical_shape))
    dtype = shards[0].dtype if shards else dtype_from_name(item.dtype)
    array = jax.make_array_from_single_device_arrays(item.entry.shape, sharding, shards, dtype=dtype)
    return array if item.spread is None else resharded(array, item.sharding, dtype_from_name(item.dtype))


def _cut_and_put(item: LeafTarget) -> Any:
    """A leaf that was reshaped. JAX would compare what several processes put, which is slow."""
    whole = item.arrays[0]
    if item.sharding is None or item.sharding.is_fully_addressable:
        return jax.device_put(whole, item.sharding)
    return jax.make_array_from_callback(whole.shape, item.sharding, lambda index: whole[index])


def _of_key_data(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of the numbers inside keys that lie so."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = (*sharding.spec, *(None for _ in range(ndim - len(sharding.spec))), None)
        return jax.sharding.NamedSharding(
            sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind
        )
    return sharding


def _keyed(array: Any, item: LeafTarget) -> Any:
    if not item.entry.key:
        return array
    try:
        return jax.random.wrap_key_data(array, impl=item.entry.key)
    except (TypeError, ValueError) as error:
        raise FormatError(f"leaf {item.name!r}: JAX has no such keys: {error}") from error
