"""Bring large leaves to accelerators in parts: each part is put on the device, and written into the array there.

So a leaf needs no host memory of its size, and is read and copied at the same time. Programs make the array and write
the parts into it. They are compiled in the background, once for each shape.

Tests: tests/engine/loading/test_pinned_stream.py.
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

_lax: Any = jax.lax  # partly without types

# Parts that end inside of a piece or of an encoded chunk read it once each. More reading than this, as a share of the
# bytes of the leaf, takes longer than the parts save.
_MOST_READ_AGAIN = 0.5
_MOST_LENGTH = 2**31 - 1  # of an axis, because the programs take positions as 32-bit integers

Boxed = tuple[int, Box]  # a box of a part, after the number of the wanted box that contains it


class LargeLeaf:
    """A leaf that arrives in parts, in any order and from any thread. The last part puts its array into `loaded`."""

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
        """Cut the leaf into parts of at most `most` bytes, and begin to compile its programs. Return None if the leaf
        cannot arrive in parts.

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
        """Count a part that was written; make the array after the last one."""
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
    """Boxes of a large leaf that are read together. The leaf has claimed its bytes of the files before."""

    def __init__(self, leaf: LargeLeaf, cut: Sequence[Boxed]) -> None:
        self.leaf, self.cut = leaf, cut
        boxes = [box for _, box in cut]
        self.targets = [msgspec.structs.replace(leaf.target, boxes=boxes, arrays=())]

    def move(self, memory: np.ndarray[Any, Any]) -> Transfer:
        """Put each box on all devices that need it; write the boxes into the arrays there after they have arrived."""
        sent = [
            on_device
            for (number, box), array in zip(self.cut, self.targets[0].arrays, strict=True)
            for on_device in self.put_box(number, box, array)
        ]
        return Transfer([array for _, *arrays in sent for array in arrays], partial(self.write, sent))

    def put_box(
        self, number: int, box: Box, array: np.ndarray[Any, Any]
    ) -> Iterator[tuple[_Shard, Any, Any]]:
        """Put a box, and the position where it begins in the array, on each device. The program reads both."""
        leaf = self.leaf
        part = array.view(bits_of(array.dtype))  # integers, see `_lowered`
        part.flags.writeable = False  # JAX may read the memory until the transfer ends
        shards = [s for s, n in zip(leaf.shards, leaf.boxes.numbers, strict=True) if n == number]
        count = len(shards)
        start = np.array(box.inside(shards[0].box).start, np.int32)
        # The boxes and the positions in one call, because each call has a fixed cost.
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
        """Write a part into the array, in place. The part and its position must have arrived on the device."""
        update = self.updates[part.shape].result()
        # Each update donates the array, and the next one needs its result. Without the lock, two threads would donate
        # the same array.
        with self.lock:
            if self.array is None:  # not made in __init__, which would wait until the program is compiled
                self.array = self.begin.result()()
            self.array = update(self.array, part, start)

    def finish(self) -> Any:
        """Return the array, in its own dtype."""
        array, self.array = self.array, None
        return array if self.end is None else self.end.result()(array)


def _cuts(target: LeafTarget, most: int, tree: TreeEntry) -> Sequence[Sequence[Boxed]] | None:
    """Cut the wanted boxes of a leaf into parts, in the first way that reads little more than the boxes.

    Either each box is cut alone; or all boxes are cut along the same lines, which suits columns of rows that are stored
    together. Return None if both ways read too much.
    """
    entry, extents, wanted = target.entry, target.entry.extents, target.wanted
    cut = partial(_parts_of, entry=entry, itemsize=dtype_from_name(target.dtype).itemsize, block=tree.block)
    singly = [[(number, part)] for number, box in enumerate(wanted) for part in cut(box, most=most)]
    if len(wanted) == len(extents) == 1 and not extents[0].coding:
        return singly  # the most frequent case: parts end where pieces end

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
    """Cut a box of a leaf into parts: along the stored boxes, unless they are small."""
    stored = [overlap for extent in entry.extents if (overlap := box.overlap(entry.region_of(extent)))]
    if min((each.size * itemsize for each in stored), default=0) < most // 4:
        stored = [box]
    return [part for each in stored for part in _cut(each, itemsize, most, block)]


def _cut(box: Box, itemsize: int, most: int, block: int) -> list[Box]:
    """Cut a box into parts of at most `most` bytes, at the ends of pieces where possible.

    All parts but the last have one shape, because each shape needs a program of its own.
    """
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
    """Begin to compile a program that makes an array, writes a part into it, or changes its dtype.

    A program that could not be compiled for an earlier load is tried again.
    """
    place = place_of(device, is_committed=is_committed)
    return program(_lowered, kind, shape, bits, place, part, dtype, device=device, x64=x64, again=True)


def _lowered(
    kind: str, shape: tuple[int, ...], bits: np.dtype[Any], place: Any, part: tuple[int, ...], dtype: Any
) -> Any:
    """Lower a program. It handles arrays as integers: XLA may compute with floats, which changes the bits of a nan."""
    described: Any = jax.ShapeDtypeStruct  # without types
    whole = described(shape, bits, sharding=place)
    if kind == "empty":
        # Not zeros: the parts overwrite every element, so filling the array would only take time.
        return jax.jit(lambda: _lax.empty(shape, bits), out_shardings=place).lower()
    if kind == "view":
        view = jax.jit(
            # Donated, so that the device needs no second array of this size.
            lambda array: _lax.bitcast_convert_type(array, dtype),
            donate_argnums=0,
            out_shardings=place,
        )
        return view.lower(whole)
    update = jax.jit(
        # The position is an argument, so that one program serves all parts of a shape.
        lambda array, new, start: _lax.dynamic_update_slice(array, new, tuple(start)),
        donate_argnums=0,
        out_shardings=place,
    )
    new = described(part, bits, sharding=place)
    return update.lower(whole, new, described((len(shape),), np.int32, sharding=place))
