"""Move many leaves to an accelerator by one transfer: a compiled program cuts the bytes of a slot into arrays there.

Starting a transfer takes several times as long as the transfer of 2 MB, and each start waits for the interpreter lock.
A program is compiled in the background for each sequence of leaves that fills several slots. Until it is compiled,
leaves are moved one by one.

Tests: tests/engine/loading/test_pinned_stream.py.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from eformer._engine.loading.device_put import put_on, put_on_default
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.trees.devices import PACKED, bits_of
from eformer._engine.trees.programs import place_of, program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from eformer._engine.loading.select import LeafTarget

# These are partly without types.
_lax: Any = jax.lax
_jit: Any = jax.jit
_described: Any = jax.ShapeDtypeStruct

_LEAST_LEAVES = 4  # in a slot: fewer leaves are moved as quickly one by one
_MOST_LEAVES = 128  # in a program, which takes about 2 ms to compile for each leaf
_LEAST_SLOTS = 4  # with the same leaves: for fewer slots, compiling a program takes longer than it saves
_MOST_PROGRAMS = 8  # begun by one load: compiling takes cores from reading

# Shape and dtype of each leaf, and the id of its sharding: equal kinds can use one program.
Kinds = tuple[tuple[tuple[int, ...], str, int], ...]


class Slice(NamedTuple):
    """The bytes of a slot that become one array."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class Sent(NamedTuple):
    """The bytes of a slot on their way to a device, the program that cuts them into arrays there, and the leaves of the
    slot that the program does not make."""

    data: Any
    names: Sequence[str]
    program: Any
    others: Sequence[LeafTarget]

    def cut(self) -> dict[str, Any]:
        """Return the arrays by name. Wait for the bytes in the same thread before, see `Transfer`."""
        return dict(zip(self.names, self.program(self.data), strict=True))


class Split:
    """The leaves of a group that a program makes."""

    def __init__(
        self, targets: Sequence[LeafTarget], others: Sequence[LeafTarget], default: Any, x64: bool
    ) -> None:
        self.targets, self.others, self.x64 = targets, others, x64
        boxes = targets[0].device_boxes
        self.device, self.is_committed = (default, False) if boxes is None else (boxes.devices[0], True)

    def send(self, memory: np.ndarray[Any, Any]) -> Sent | None:
        """Begin to move the leaves, which were read into `memory`. Return None if the program is not compiled yet."""
        slices = _slices(self.targets, memory)
        if slices is None:
            return None
        made = _program(slices, self.device, self.is_committed, self.x64)
        if (
            not made.done() or made.exception() is not None
        ):  # never waits: moving one by one is faster than compiling
            return None
        data = memory[: slices[-1].stop]
        data.flags.writeable = False  # JAX may read the memory until the transfer ends
        (there,) = put_on([data], [self.device]) if self.is_committed else put_on_default([data])
        return Sent(there, [target.name for target in self.targets], made.result(), self.others)


def splits_of(
    groups: Sequence[Sequence[LeafTarget]], block: int, default: Any, *, x64: bool
) -> list[Split | None]:
    """Return, for each group of leaves that share a slot, the leaves that a program makes; None if no program is worth
    compiling.

    Leaves of up to `block` bytes are not read into slots. `default` is the device of leaves without a sharding.
    """
    could = [[_can_be_split(target, block) for target in group] for group in groups]
    divided = [
        (list(compress(group, can)), [target for target, c in zip(group, can, strict=True) if not c])
        for group, can in zip(groups, could, strict=True)
    ]
    kinds = [_kinds(targets) for targets, _ in divided]
    counts = Counter(kind for kind in kinds if kind is not None)
    worth = {kind for kind, count in counts.most_common(_MOST_PROGRAMS) if count >= _LEAST_SLOTS}
    return [
        Split(targets, others, default, x64) if kind in worth else None
        for kind, (targets, others) in zip(kinds, divided, strict=True)
    ]


def _kinds(targets: Sequence[LeafTarget]) -> Kinds | None:
    """Return the facts that the program for these leaves depends on; None if one program cannot make them."""
    if not _LEAST_LEAVES <= len(targets) <= _MOST_LEAVES:
        return None
    if (
        len({None if target.device_boxes is None else target.device_boxes.devices[0] for target in targets})
        > 1
    ):
        return None
    return tuple((target.entry.shape, target.dtype, id(target.sharding)) for target in targets)


def _can_be_split(target: LeafTarget, block: int) -> bool:
    """Tell whether the array has the bytes of the leaf as they lie in a slot, and is on one device."""
    boxes, entry = target.device_boxes, target.entry
    is_on_one = boxes is None or (boxes.is_one_each and not boxes.cuts)
    is_plain = not entry.key and not target.is_weak and _is_bits(target.dtype)
    return is_on_one and is_plain and entry.nbytes > block


@lru_cache(64)
def _is_bits(name: str) -> bool:
    """Tell whether a program can make elements of this dtype out of bytes."""
    dtype = dtype_from_name(name)
    return dtype not in PACKED and dtype.isnative and dtype.kind in "iufV"


def _slices(targets: Sequence[LeafTarget], memory: np.ndarray[Any, Any]) -> tuple[Slice, ...] | None:
    """Return the position of each leaf in memory; None if a leaf is elsewhere, or was not read as a whole."""
    start, room, slices = _address(memory), memory.nbytes, []
    for target in targets:
        (array,) = target.arrays
        offset = _address(array) - start
        if not 0 <= offset <= room - array.nbytes or array.shape != target.entry.shape:
            return None
        slices.append(Slice(offset, array.shape, array.dtype, target.sharding))
    return tuple(slices)


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _program(slices: tuple[Slice, ...], device: Any, is_committed: bool, x64: bool) -> Future[Any]:
    """Begin to compile a program that makes arrays of the bytes of a slot."""
    return program(_lowered, slices, place_of(device, is_committed=is_committed), device=device, x64=x64)


def _lowered(slices: tuple[Slice, ...], place: Any) -> Any:
    def split(data: Any) -> list[Any]:
        return [_array(data, part) for part in slices]

    splitting = _jit(split, out_shardings=[part.sharding for part in slices])
    return splitting.lower(_described((slices[-1].stop,), np.uint8, sharding=place))


def _array(data: Any, part: Slice) -> Any:
    """Make an array of some bytes. They become integers first: XLA may compute with floats, which changes the bits of a
    nan."""
    inner = (part.dtype.itemsize,) if part.dtype.itemsize > 1 else ()
    found = _lax.reshape(_lax.slice(data, (part.offset,), (part.stop,)), (*part.shape, *inner))
    bits = _lax.bitcast_convert_type(found, bits_of(part.dtype))
    return bits if bits.dtype == part.dtype else _lax.bitcast_convert_type(bits, part.dtype)
