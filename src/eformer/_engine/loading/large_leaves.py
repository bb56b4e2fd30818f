"""Bring large leaves to accelerators in parts: each part is put on the device, and written into the array there.

A leaf needs no host memory of its size then, and is read and copied at the same time. The array is made and written by
compiled programs, which are compiled in the background, once for each shape.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import msgspec
import numpy as np

from eformer._engine.loading.device_put import Transfer, put_on, put_on_default
from eformer._engine.loading.placement import DeviceBoxes
from eformer._engine.loading.read_plan import Want, plan_reads
from eformer._engine.record.boxes import Box
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import ALIGNMENT, bounding, pieces, shifted
from eformer._engine.trees.devices import PACKED, bits_of
from eformer._engine.trees.programs import place_of, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import LeafEntry, TreeEntry

_lax: Any = jax.lax  # not all of it has types


# What parts may read more than the leaf as a whole: pieces, and what is encoded, are read once for each part of them.
_MOST_READ_AGAIN = 0.5
_MOST_LENGTH = 2**31 - 1  # of an axis: positions in an array are 32 bits on a device

Boxed = tuple[int, Box]  # a box of a part, and the number of the box of the leaf that it is in


class LargeLeaf:
    """A leaf that arrives in parts, in any order and from any thread. The last one puts it among the `loaded`."""

    def __init__(
        self,
        target: LeafTarget,
        boxes: DeviceBoxes,
        cuts: Sequence[Sequence[Boxed]],
        loaded: dict[str, Any],
        *,
        x64: bool,
    ) -> None:
        self.target, self.loaded, self.boxes = target, loaded, boxes
        self.cuts, self.left = cuts, len(cuts)
        self.lock = threading.Lock()
        dtype, is_committed = dtype_from_name(target.dtype), target.sharding is not None
        wanted = target.wanted
        parts: list[list[Box]] = [[] for _ in wanted]
        for cut in cuts:
            for number, box in cut:
                parts[number].append(box)
        self.shards = [
            _Shard(wanted[number], device, dtype, parts[number], is_committed, x64)
            for number, device in zip(boxes.numbers, boxes.devices, strict=True)
        ]

    @staticmethod
    def of(
        target: LeafTarget, default: Any, most: int, tree: TreeEntry, loaded: dict[str, Any], *, x64: bool
    ) -> LargeLeaf | None:
        """Return the leaf in parts of at most so many bytes, if it can be had so, and begin to compile its programs.

        `default` is the device of leaves without a sharding.
        """
        boxes, dtype = target.device_boxes or DeviceBoxes(None, [default], [0]), dtype_from_name(target.dtype)
        if boxes.cuts or target.entry.key or target.is_weak or dtype in PACKED or not dtype.isnative:
            return None
        if max(target.entry.shape) > _MOST_LENGTH:
            return None
        cuts = _cuts(target, most, tree)
        return None if cuts is None else LargeLeaf(target, boxes, cuts, loaded, x64=x64)

    def parts(self) -> Iterator[Part]:
        for cut in self.cuts:
            yield Part(self, cut)

    def arrived(self) -> None:
        """Count a part; make the array when all of them have arrived."""
        with self.lock:
            self.left -= 1
            is_last = self.left == 0
        if is_last:
            target = self.target
            arrays = [shard.finish() for shard in self.shards]
            self.loaded[target.name] = (
                arrays[0]
                if target.sharding is None
                else jax.make_array_from_single_device_arrays(target.entry.shape, target.sharding, arrays)
            )


class Part:
    """Boxes of a large leaf that are read together. The space that they take was claimed before, by the leaf."""

    def __init__(self, leaf: LargeLeaf, cut: Sequence[Boxed]) -> None:
        self.leaf, self.cut = leaf, cut
        boxes = [box for _, box in cut]
        self.targets = [msgspec.structs.replace(leaf.target, boxes=boxes, arrays=())]

    def move(self, memory: np.ndarray[Any, Any]) -> Transfer:
        """Put each box on every device that holds it; when the boxes have arrived, write them into the arrays there."""
        sent = [
            on_device
            for (number, box), array in zip(self.cut, self.targets[0].arrays, strict=True)
            for on_device in self.put_box(number, box, array)
        ]
        return Transfer([array for _, *arrays in sent for array in arrays], partial(self.write, sent))

    def put_box(
        self, number: int, box: Box, array: np.ndarray[Any, Any]
    ) -> Iterator[tuple[_Shard, Any, Any]]:
        """Put a box, and where it begins in the array, which the program reads as well."""
        leaf = self.leaf
        part = array.view(bits_of(array.dtype))
        part.flags.writeable = False
        shards = [s for s, n in zip(leaf.shards, leaf.boxes.numbers, strict=True) if n == number]
        count = len(shards)
        start = np.array(box.inside(shards[0].box).start, np.int32)
        both = [part] * count + [start] * count
        if leaf.target.sharding is None:
            arrays = put_on_default(both)
        else:
            arrays = put_on(both, [shard.device for shard in shards] * 2)
        return zip(shards, arrays[:count], arrays[count:], strict=True)

    def write(self, sent: Sequence[tuple[_Shard, Any, Any]]) -> None:
        for shard, part, start in sent:
            shard.write(part, start)
        self.leaf.arrived()


class _Shard:
    """The array on one device."""

    def __init__(
        self,
        box: Box,
        device: Any,
        dtype: Any,
        cuts: Sequence[Box],
        is_committed: bool,
        x64: bool,
    ) -> None:
        self.box, self.device = box, device
        begun = partial(_program, box.shape, bits_of(dtype), device, is_committed, x64)
        self.begin = begun("empty")
        self.updates = {cut.shape: begun("update", cut.shape) for cut in cuts}
        self.end = begun("view", dtype=dtype) if bits_of(dtype) != dtype else None
        self.lock = threading.Lock()
        self.array: Any = None

    def write(self, part: Any, start: Any) -> None:
        """Write a part that has arrived on the device, as has its position, into the array, in place."""
        update = self.updates[part.shape].result()
        with self.lock:
            if self.array is None:
                self.array = self.begin.result()()
            self.array = update(self.array, part, start)

    def finish(self) -> Any:
        """Return the array, in its own dtype."""
        array, self.array = self.array, None
        return array if self.end is None else self.end.result()(array)


def _cuts(target: LeafTarget, most: int, tree: TreeEntry) -> Sequence[Sequence[Boxed]] | None:
    """Cut boxes of a leaf into parts, in the first way that reads little more than the boxes; None if there is none.

    Each box is cut by itself; or, such as columns of rows that are stored together, all of them are cut at once.
    """
    entry, extents, wanted = target.entry, target.entry.extents, target.wanted
    cut = partial(_parts_of, entry=entry, itemsize=dtype_from_name(target.dtype).itemsize, block=tree.block)
    singly = [[(number, part)] for number, box in enumerate(wanted) for part in cut(box, most=most)]
    if len(wanted) == len(extents) == 1 and not extents[0].coding:
        return singly

    def nbytes_read(boxes: Sequence[Box]) -> int:
        want = Want(target.name, entry, target.dtype, boxes)
        return sum(read.nbytes for read in plan_reads([want], tree))

    enough = (1 + _MOST_READ_AGAIN) * nbytes_read(wanted)
    if sum(nbytes_read([part]) for ((_, part),) in singly) <= enough:
        return singly
    together = [
        [(n, overlap) for n, box in enumerate(wanted) if (overlap := box.overlap(part))]
        for part in cut(bounding(wanted), most=most - ALIGNMENT * len(wanted))
    ]
    together = [boxes for boxes in together if boxes]
    is_enough = sum(nbytes_read([box for _, box in boxes]) for boxes in together) <= enough
    return together if is_enough else None


def _parts_of(box: Box, entry: LeafEntry, itemsize: int, most: int, block: int) -> list[Box]:
    """Cut a box of a leaf into parts: along the boxes that are stored, unless these are small."""
    stored = [overlap for extent in entry.extents if (overlap := box.overlap(entry.region_of(extent)))]
    if min((each.size * itemsize for each in stored), default=0) < most // 4:
        stored = [box]
    return [part for each in stored for part in _cut(each, itemsize, most, block)]


def _cut(box: Box, itemsize: int, most: int, block: int) -> list[Box]:
    """Cut a box into parts of at most so many bytes, all but the last alike, at the ends of pieces where possible."""
    shape = box.shape
    axis = next(
        (n for n in range(len(shape)) if math.prod(shape[n + 1 :]) * itemsize <= most), len(shape) - 1
    )
    row = math.prod(shape[axis + 1 :]) * itemsize
    step = max(1, min(block, most) // row)  # rows of a piece
    number = -(-shape[axis] * row // (most // (step * row) * step * row or row))
    length = -(-shape[axis] // number)
    length = min(-(-length // step) * step, shape[axis])
    return shifted(pieces(shape, itemsize, length * row), box.start)


# -------------------------------------------------------------------------------------------- programs


def _program(
    shape: tuple[int, ...],
    bits: np.dtype[Any],
    device: Any,
    is_committed: bool,
    x64: bool,
    kind: Literal["empty", "update", "view"],
    part: tuple[int, ...] = (),
    dtype: np.dtype[Any] | None = None,
) -> Future[Any]:
    """Begin to compile a program: one that makes an array, writes a part into one, or returns it as another dtype.
    One that could not be compiled for an earlier load is tried again."""
    place = place_of(device, is_committed=is_committed)
    return program(_lowered, kind, shape, bits, place, part, dtype, device=device, x64=x64, again=True)


def _lowered(
    kind: str, shape: tuple[int, ...], bits: np.dtype[Any], place: Any, part: tuple[int, ...], dtype: Any
) -> Any:
    """Lower a program. Arrays are handled as integers: XLA may compute with floats, which changes the bits of a nan."""
    described: Any = jax.ShapeDtypeStruct  # it has no types
    whole = described(shape, bits, sharding=place)
    if kind == "empty":
        return jax.jit(lambda: _lax.empty(shape, bits), out_shardings=place).lower()
    if kind == "view":
        view = jax.jit(
            lambda array: _lax.bitcast_convert_type(array, dtype), donate_argnums=0, out_shardings=place
        )
        return view.lower(whole)
    update = jax.jit(
        lambda array, new, start: _lax.dynamic_update_slice(array, new, tuple(start)),
        donate_argnums=0,
        out_shardings=place,
    )
    new = described(part, bits, sharding=place)
    return update.lower(whole, new, described((len(shape),), np.int32, sharding=place))
