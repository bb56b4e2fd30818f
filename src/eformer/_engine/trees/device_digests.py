"""Digest arrays where they are: programs of plain XLA compute the accumulators of xxh3-128 on the device.

The bytes of arrays are joined in a buffer on the device, and one program, compiled once for all shapes, digests up to
64 pieces of it. Only the accumulators, 64 bytes for each piece, come back to the host, which merges them.

Programs are compiled in the background. `Digester.is_ready` tells whether they are.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.xxh3 import (
    BLOCK,
    INITIAL,
    LANES,
    LAST_KEY,
    PRIME32,
    SCRAMBLE_KEY,
    SHORTEST,
    STRIPE,
    STRIPE_KEYS,
    STRIPES,
    merged_digests,
    parsed_digests,
)
from eformer._engine.trees.devices import PACKED
from eformer._engine.trees.programs import program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

logger = logging.getLogger("eformer")

_lax: Any = jax.lax  # without types
_jit: Any = jax.jit  # without types
_described: Any = jax.ShapeDtypeStruct  # without types

# Whether loads and saves use these programs. They were tried on CPUs that stand in for accelerators, not yet on one:
# `bench/gpu.py --only shapes race` measures them.
ENABLED = False

PIECES = 64  # digested by one call of the program
_UNROLL = 32  # blocks of a step: fewer make the program slower, more take longer to compile
_MANY = 8  # steps at least, below which a program is not unrolled

_are_right: dict[Any, bool] = {}

Kind = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype of an array


class PieceSpan(NamedTuple):
    """The bytes of one piece in the buffer."""

    start: int
    nbytes: int


class Joined(NamedTuple):
    """Arrays whose bytes a program writes into the buffer from byte `start` on.

    `corner` is None, or where the box begins that the program cuts out of a single array.
    """

    program: Future[Any]
    arrays: Sequence[Any]
    corner: tuple[int, ...] | None
    start: int


class Digests(NamedTuple):
    """Accumulators of pieces on their way to the host: an array for each call of the program."""

    spans: Sequence[PieceSpan]
    parts: Sequence[Any]


def results(found: Sequence[Digests]) -> np.ndarray[Any, Any]:
    """Wait for the accumulators of all pieces, and return the digests: high and low half of each.

    They are merged together, because each call of numpy costs more than the merge of a few pieces.
    """
    accumulators, lengths = [np.empty((0, LANES), np.uint64)], []
    for spans, parts in found:
        whole = [np.asarray(part) for part in parts]
        whole[-1] = whole[-1][: len(spans) - (len(parts) - 1) * PIECES]
        accumulators += whole
        lengths += [span.nbytes for span in spans]
    return merged_digests(np.concatenate(accumulators), lengths)


class Digester:
    """Digest arrays of one device. Not for several threads at the same time.

    nbytes   the most bytes that are joined in the buffer
    piece    the most bytes of a piece
    """

    def __init__(self, device: Any, nbytes: int, piece: int) -> None:
        self.device, self.place = device, jax.sharding.SingleDeviceSharding(device)
        self.piece = -(-piece // BLOCK) * BLOCK
        self.room = nbytes + self.piece + BLOCK  # windows of whole pieces must not reach beyond the buffer
        self.empty = self._program(_empty)
        self.accumulate = self._program(_accumulate, self.piece)
        self.buffer: Any = None
        self.constants: dict[Any, Any] = {}
        self.is_right: bool | None = None

    def is_ready(self, *programs: Future[Any]) -> bool:
        """Tell whether these programs and the programs of every digest are compiled, and digest as xxhash does."""
        needed = (self.empty, self.accumulate, *programs)
        if not all(made.done() and made.exception() is None for made in needed):
            return False
        if self.is_right is None:
            self.is_right = self._is_right()
        return self.is_right

    def _is_right(self) -> bool:
        """Tell, by a trial, whether the device computes the digests of xxhash. One for each process and device."""
        key = self.device, self.room, self.piece
        if key not in _are_right:
            sample = np.zeros(self.room, np.uint8)
            sample[: self.piece] = np.random.default_rng(0).integers(0, 256, self.piece, np.uint8)
            spans = [
                PieceSpan(start, nbytes)
                for start, nbytes in ((0, self.piece), (1, self.piece - 65), (3, SHORTEST))
            ]
            self.buffer = jax.device_put(sample, self.device).block_until_ready()
            found, self.buffer = results([self.digest((), spans)]), None
            expected = "".join(xxh3_128(sample[start : start + nbytes].data) for start, nbytes in spans)
            _are_right[key] = bool((found == parsed_digests(expected)).all())
            if not _are_right[key]:
                logger.warning(
                    "%s computes other digests than xxhash: loads and saves check in host memory alone",
                    self.device,
                )
        return _are_right[key]

    def joining(self, kinds: Sequence[Kind]) -> Future[Any]:
        """Begin to compile the program that joins the bytes of arrays of these kinds."""
        return self._program(_join, tuple(kinds))

    def cutting(self, kind: Kind, shape: tuple[int, ...]) -> Future[Any]:
        """Begin to compile the program that takes the bytes of a box of an array."""
        return self._program(_cut, kind, shape)

    def digest(self, joined: Sequence[Joined], spans: Sequence[PieceSpan]) -> Digests:
        """Begin to digest pieces of the joined arrays, which must have arrived on the device."""
        # An error may leave the buffer donated, so it is put back at the end.
        buffer, self.buffer = self.empty.result()() if self.buffer is None else self.buffer, None
        for made, arrays, corner, start in joined:
            at = self.constant(np.array(start, np.int32))
            where = () if corner is None else (self.constant(np.array(corner, np.int32)),)
            buffer = made.result()(buffer, at, *arrays, *where)
        parts = []
        for first in range(0, len(spans), PIECES):
            some = spans[first : first + PIECES]
            table = np.full((2, PIECES), SHORTEST, np.int32)
            table[0] = 0
            table[:, : len(some)] = np.array(some, np.int32).T
            part = self.accumulate.result()(buffer, self.constant(table))
            part.copy_to_host_async()
            parts.append(part)
        self.buffer = buffer
        return Digests(spans, parts)

    def constant(self, value: np.ndarray[Any, Any]) -> Any:
        """Return a small array on the device, which has arrived: a program must not read it before, see `Transfer`."""
        key = value.shape, value.tobytes()
        if key not in self.constants:
            self.constants[key] = jax.device_put(value, self.device).block_until_ready()
        return self.constants[key]

    def _program(self, lower: Any, *arguments: Any) -> Future[Any]:
        return program(lower, self.place, self.room, *arguments, device=self.device, x64=True)


class Digesters:
    """The digesters of one load or save, by device, and the programs that it may begin to compile.

    A method that returns programs returns None until they are compiled.
    """

    def __init__(self, nbytes: int, piece: int) -> None:
        self.nbytes, self.piece = nbytes, piece
        self.known: dict[Any, Digester] = {}
        self.left = _MOST_PROGRAMS

    def of(self, device: Any) -> Digester:
        found = self.known.get(device)
        if found is None:
            found = self.known[device] = Digester(device, self.nbytes, self.piece)
        return found

    def joining(self, device: Any, kinds: Sequence[Kind]) -> list[tuple[Future[Any], int]] | None:
        """Return the programs that join arrays of these kinds, each with the number of its arrays.

        Arrays that often come together have one program. Other arrays have a program each.
        """
        digester, together = self.of(device), tuple(kinds)
        if len(_seen) > _MOST_COUNTED:
            _seen.clear()
        _seen[device, together] += 1
        if _seen[device, together] > 1 or len(kinds) == 1:
            made = self._begun(digester, together, digester.joining, together)
            if made is not None and digester.is_ready(made):
                return [(made, len(kinds))]
        singly = [self._begun(digester, (kind,), digester.joining, (kind,)) for kind in kinds]
        ready = [(made, 1) for made in singly if made is not None]
        is_ready = len(ready) == len(kinds) and digester.is_ready(*(made for made, _ in ready))
        return ready if is_ready else None

    def cutting(self, device: Any, kind: Kind, shape: tuple[int, ...]) -> Future[Any] | None:
        """Return the program that takes the bytes of a box of an array."""
        digester = self.of(device)
        made = self._begun(digester, (kind, shape), digester.cutting, kind, shape)
        return made if made is not None and digester.is_ready(made) else None

    def _begun(
        self, digester: Digester, key: Any, begin: Callable[..., Future[Any]], *arguments: Any
    ) -> Future[Any] | None:
        """Return a program, and begin to compile it; None if this load or save has begun enough of them."""
        key = (digester.device, digester.room, key)
        if key not in _begun:
            if self.left == 0:
                return None
            self.left -= 1
            if len(_begun) > _MOST_COUNTED:
                _begun.clear()
            _begun.add(key)
        return begin(*arguments)


_MOST_PROGRAMS = 8  # begun by one load or save: compiling takes cores from reading and writing
_MOST_COUNTED = 4096

# How often arrays of these kinds came together, and the programs that were begun, on a device.
_seen: Counter[Any] = Counter()
_begun: set[Any] = set()


def can_digest(dtype: np.dtype[Any]) -> bool:
    """Tell whether a program can read the bytes of an array of this dtype."""
    return dtype not in PACKED and dtype.isnative and dtype.kind in "iufV" and dtype.itemsize <= 8


# -------------------------------------------------------------------------------------------- programs


def _empty(place: Any, room: int) -> Any:
    return _jit(lambda: _lax.empty((room,), np.uint8), out_shardings=place).lower()


def _join(place: Any, room: int, kinds: Sequence[Kind]) -> Any:
    def join(buffer: Any, start: Any, *arrays: Any) -> Any:
        return _lax.dynamic_update_slice(buffer, _lax.concatenate(list(map(_bytes_of, arrays)), 0), (start,))

    described = [_described(shape, dtype, sharding=place) for shape, dtype in kinds]
    return _into_buffer(join, place).lower(*_buffer(place, room), *described)


def _cut(place: Any, room: int, kind: Kind, box: tuple[int, ...]) -> Any:
    def cut(buffer: Any, start: Any, array: Any, corner: Any) -> Any:
        part = _lax.dynamic_slice(array, tuple(corner), box)
        return _lax.dynamic_update_slice(buffer, _bytes_of(part), (start,))

    shape, dtype = kind
    array = _described(shape, dtype, sharding=place)
    corner = _described((len(shape),), np.int32, sharding=place)
    return _into_buffer(cut, place).lower(*_buffer(place, room), array, corner)


def _buffer(place: Any, room: int) -> tuple[Any, Any]:
    return _described((room,), np.uint8, sharding=place), _described((), np.int32, sharding=place)


def _into_buffer(function: Any, place: Any) -> Any:
    return _jit(function, donate_argnums=0, out_shardings=place)


def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array in C order.

    Floats become integers first: XLA may compute with floats, which changes the bits of a nan.
    """
    bits = np.dtype(f"u{array.dtype.itemsize}")
    found = array if array.dtype == bits else _lax.bitcast_convert_type(array, bits)
    if bits.itemsize > 1:
        found = _lax.bitcast_convert_type(found, np.uint8)
    return _lax.reshape(found, (math.prod(found.shape),))


def _accumulate(place: Any, room: int, piece: int) -> Any:
    lowered = _jit(partial(_accumulators, most=piece), out_shardings=place)
    return lowered.lower(
        _described((room,), np.uint8, sharding=place), _described((2, PIECES), np.int32, sharding=place)
    )


def _accumulators(buffer: Any, table: Any, *, most: int) -> Any:
    """Return the accumulators of pieces of the buffer, given the starts and the lengths of the pieces.

    One program serves all lengths: every piece takes a window of `most` bytes, and blocks beyond its end are ignored.
    """
    starts, lengths = table[0], table[1]
    blocks = (lengths - 1) // BLOCK  # whole blocks; the rest holds at least one byte
    windows = _words(buffer, starts, most).reshape(PIECES, most // BLOCK, STRIPES, LANES)
    sums = _added(windows, STRIPE_KEYS).sum(2)

    def step(accumulators: Any, block: Any) -> tuple[Any, None]:
        number, added = block
        mixed = accumulators + added
        mixed = mixed ^ (mixed >> np.uint64(47)) ^ SCRAMBLE_KEY
        is_inside = (number < blocks)[:, None]
        return _lax.select_n(
            jax.numpy.broadcast_to(is_inside, mixed.shape), accumulators, mixed * np.uint64(PRIME32[0])
        ), None

    numbers = np.arange(most // BLOCK, dtype=np.int32)
    begun = jax.numpy.broadcast_to(INITIAL, (PIECES, LANES))
    unroll = min(_UNROLL, max(1, len(numbers) // _MANY))
    found, _ = _lax.scan(step, begun, (numbers, jax.numpy.swapaxes(sums, 0, 1)), unroll=unroll)

    rest = _added(_words(buffer, starts + blocks * BLOCK, BLOCK).reshape(PIECES, STRIPES, LANES), STRIPE_KEYS)
    stripes = (lengths - 1 - blocks * BLOCK) // STRIPE
    is_inside = np.arange(STRIPES, dtype=np.int32)[None, :] < stripes[:, None]
    found = found + jax.numpy.where(is_inside[:, :, None], rest, np.uint64(0)).sum(1)
    return found + _added(_words(buffer, starts + lengths - STRIPE, STRIPE), LAST_KEY)


def _words(buffer: Any, starts: Any, nbytes: int) -> Any:
    """Return windows of the buffer as numbers of 64 bits."""
    windows = jax.vmap(lambda start: _lax.dynamic_slice(buffer, (start,), (nbytes,)))(starts)
    return _lax.bitcast_convert_type(windows.reshape(PIECES, nbytes // 8, 8), np.uint64)


def _added(words: Any, keys: Any) -> Any:
    """Return what stripes add to the accumulators."""
    mixed = words ^ keys
    product = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    swapped = words.reshape(*words.shape[:-1], LANES // 2, 2)[..., ::-1].reshape(words.shape)
    return swapped + product
