"""Assemble loaded bytes into arrays: put them on their devices, join shards, wrap PRNG keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from eformer._engine.loading.device_put import PutShards, Shards, as_weak, put_on_default, put_sharded
from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.tasks.interrupts import called
from eformer._engine.trees.devices import bits_of, resharded
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.loading.select import LeafTarget


def assemble(targets: Sequence[LeafTarget], put: PutShards | None = None) -> dict[str, Any]:
    """Return the arrays by name. JAX may alias the buffers of the targets, so no other code may write to them."""
    plain: list[Any] = []
    sharded: list[Shards] = []
    for target in targets:
        if target.as_numpy or target.new_shape is not None:
            continue
        if target.read_sharding is not None:
            target.arrays = [array.view(bits_of(array.dtype)) for array in target.arrays]
        for array in target.arrays:
            array.flags.writeable = False
        if target.sharding is None:
            plain.append(target.arrays[0])
        else:
            sharded.append(_shards(target))
    on_default = iter(put_on_default(plain))
    on_devices = iter(put_sharded(sharded, put) if sharded else ())
    leaves = {}
    for target in targets:
        if target.as_numpy:
            leaf = target.arrays[0]
        elif target.new_shape is not None:
            leaf = _put_reshaped(target)
        elif target.sharding is None:
            leaf = next(on_default)
        else:
            leaf = next(on_devices)
            if target.read_sharding is not None:
                leaf.block_until_ready()  # before a program reads the array, see `Transfer`
                leaf = resharded(leaf, target.sharding, dtype_from_name(target.dtype))
        if target.entry.key and not target.as_numpy:
            leaf = _as_keys(leaf, target)
        elif target.is_weak and not target.as_numpy:
            leaf = as_weak(leaf)
        leaves[target.name] = leaf
    return leaves


def _shards(target: LeafTarget) -> Shards:
    """Describe an array that goes to the devices of its sharding."""
    sharding, boxes, arrays = target.read_sharding or target.sharding, target.device_boxes, target.arrays
    assert boxes is not None
    if target.entry.key:
        sharding = _of_key_data(sharding, len(target.entry.logical_shape))
    if boxes.cuts:
        (whole,) = arrays
        arrays = [np.ascontiguousarray(whole[cut]) for cut in boxes.cuts]
    parts = arrays if boxes.is_one_each else [arrays[number] for number in boxes.numbers]
    dtype = arrays[0].dtype if arrays else dtype_from_name(target.dtype)
    return Shards(target.entry.shape, dtype, sharding, parts, boxes.devices)


def change_shapes(targets: Sequence[LeafTarget]) -> None:
    """Give arrays their new shape: reshape them, or call the caller's functions to resize them."""
    for target in targets:
        if target.new_shape is not None:
            target.arrays = [_with_new_shape(target, target.arrays[0])]


def _with_new_shape(target: LeafTarget, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if target.resize is None:
        return whole.reshape(target.shape)
    resized = np.array(called(target.resize, whole))  # a copy: the caller may write to his array later
    expected, found = (f"{a.dtype}{list(a.shape)}" for a in (np.empty(target.shape, whole.dtype), resized))
    if expected != found:
        raise MismatchError([f"leaf {target.name!r}: resize= returned {found}, expected {expected}"])
    return resized


def _put_reshaped(target: LeafTarget) -> Any:
    """Put a reshaped leaf on its devices.

    Across processes, use a callback: `jax.device_put` would make the processes compare their arrays.
    """
    whole = target.arrays[0]
    if target.sharding is None or target.sharding.is_fully_addressable:
        return jax.device_put(whole, target.sharding)
    return jax.make_array_from_callback(whole.shape, target.sharding, lambda index: whole[index])


def _of_key_data(sharding: Sharding, ndim: int) -> Sharding:
    """Return the sharding of the numbers of PRNG keys, which have one axis more than the keys."""
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None for _ in range(ndim - len(sharding.spec))), None)
        return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    return sharding


def _as_keys(array: Any, target: LeafTarget) -> Any:
    try:
        return jax.random.wrap_key_data(array, impl=target.entry.key)
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"leaf {target.name!r}: JAX cannot make PRNG keys of kind {target.entry.key!r}: {error}"
        ) from error
