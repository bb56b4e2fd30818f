"""What a load would put on which device, without reading any data."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from eformer.checkpoint._device import is_key
from eformer.checkpoint._formats.find import find
from eformer.checkpoint._ndarray import dtype_from_name, floating_dtype, is_floating
from eformer.checkpoint._rules import Leaf, Rules, place
from eformer.checkpoint._tree import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax.sharding import Mesh

    from eformer.checkpoint._manifest import RecordedSharding

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A leaf as it would lie: `spec` is None for one that stays in host memory or goes to the default device."""

    dtype: str
    shape: tuple[int, ...]
    spec: Any
    shard: tuple[int, ...]
    shard_nbytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """Bytes by device, and every leaf by name."""

    per_device: Mapping[Any, int]
    leaves: Mapping[str, Placed]

    def __str__(self) -> str:
        lines = [f"{device}: {nbytes:,} bytes" for device, nbytes in self.per_device.items()]
        largest = sorted(self.leaves.items(), key=lambda item: -item[1].shard_nbytes)
        lines += [
            f"  {name} {p.dtype}{list(p.shape)} as {p.spec}: {p.shard_nbytes:,} bytes of {list(p.shard)} a device"
            for name, p in largest[:_MOST_SHOWN]
        ]
        if len(largest) > _MOST_SHOWN:
            lines.append(f"  ... and {len(largest) - _MOST_SHOWN} smaller leaves")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Known:
    dtype: str
    shape: tuple[int, ...]
    nbytes_each: int
    sharding: RecordedSharding | None = None
    is_numpy: bool = False


def dry_run(
    what: Any,
    mesh: Mesh,
    *,
    rules: Rules | None = None,
    shardings: Any = None,
    prefix: str | None = None,
    dtype: Any = None,
) -> DryRun:
    """How many bytes `load` with the same arguments would put on each device of the mesh. Reads no data.

    `what` is the path of a checkpoint, or a tree of arrays or `ShapeDtypeStruct`s. What does not fit is the same
    error as of `load`: all of it at once.
    """
    is_path = isinstance(what, (str, os.PathLike))
    known = _of_checkpoint(what, prefix) if is_path else _of_tree(what)
    cast = None if dtype is None else floating_dtype(dtype)
    leaves = {name: Leaf(k.shape, None, k.sharding, k.is_numpy) for name, k in known.items()}
    placed, _ = place(leaves, mesh=mesh, rules=rules, shardings=shardings)
    per_device: dict[Any, int] = defaultdict(int, dict.fromkeys(mesh.devices.flat, 0))
    result = {}
    for name, k in known.items():
        sharding = placed.get(name)
        shard = k.shape if sharding is None else sharding.shard_shape(k.shape)
        itemsize = dtype_from_name(cast).itemsize if cast and is_floating(k.dtype) else k.nbytes_each
        nbytes = itemsize * math.prod(shard)
        result[name] = Placed(k.dtype, k.shape, getattr(sharding, "spec", sharding), shard, nbytes)
        for device in sharding.device_set if sharding is not None else ():
            per_device[device] += nbytes
    return DryRun(dict(per_device), result)


def _of_checkpoint(path: str | os.PathLike[str], prefix: str | None) -> dict[str, _Known]:
    found = {}
    for name, entry in find(path).tree(prefix).leaves.items():
        inner = math.prod(entry.shape[len(entry.logical_shape) :])  # the numbers inside of a PRNG key
        itemsize = dtype_from_name(entry.dtype).itemsize * inner
        is_numpy = entry.home == "numpy"
        found[name] = _Known(entry.logical_dtype, entry.logical_shape, itemsize, entry.sharding, is_numpy)
    return found


def _of_tree(tree: Any) -> dict[str, _Known]:
    found = {}
    for name, leaf in flatten(tree)[0].items():
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            numbers = jax.eval_shape(_numbers, leaf) if is_key(leaf) else leaf
            inner = math.prod(numbers.shape[len(leaf.shape) :])
            found[name] = _Known(str(leaf.dtype), tuple(leaf.shape), numbers.dtype.itemsize * inner)
    return found


def _numbers(key: Any) -> Any:
    return jax.random.key_data(key)
