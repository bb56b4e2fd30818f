"""Take the arrays of a tree, and protect them from changes by the caller.

Tests: tests/engine/saving/test_snapshot.py, tests/engine/saving/test_commit.py, tests/engine/saving/test_start.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from msgspec import Struct

from eformer._engine.record.boxes import Box, to_bytes
from eformer._engine.record.digests import Hasher
from eformer._engine.record.dtypes import is_floating, name_of_dtype
from eformer._engine.record.pieces import merged
from eformer._engine.record.planned import Source
from eformer._engine.record.text import few
from eformer._engine.record.values import code_to_json, is_recorded, value_to_json
from eformer._engine.saving.save import Compared
from eformer._engine.tasks import interrupts
from eformer._engine.trees.copies import Kinds, copied
from eformer._engine.trees.devices import PACKED, copier, is_host_memory, view_of
from eformer._engine.trees.nodes import is_code
from eformer._engine.trees.shardings import recorded_sharding
from eformer.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.manifest import RecordedSharding
    from eformer._engine.record.options import SaveOptions

_Facts = tuple[str | None, int, "RecordedSharding | None"]

# Up to this size a copy takes less time than a view that is held until it is written.
_COPIED_BYTES = 2**14

# Larger arrays that each process has for itself are not compared, because the caller waits for the comparison.
_COMPARED_BYTES = 2**16

# Of the arrays that every process has a copy of, a few small ones are compared: the step is among them.
_REPLICA_BYTES = 64
_MOST_REPLICAS = 256


# ------------------------------------------------------------------------------------------ snapshot


def snapshot(
    leaves: Mapping[str, Any],
    options: SaveOptions,
    hosts: Hosts,
    *,
    detach: bool = False,
    takes_copies: bool = False,
) -> tuple[list[Source], dict[str, Any], Compared]:
    """Return the arrays among the leaves as sources, the remaining leaves as JSON values, and the data to compare with
    other processes.

    With `detach` the caller may donate or change every array as soon as this returns: numpy arrays are copied, arrays
    on an accelerator are copied there or to the host, and the memory of CPU arrays is kept alive. With `takes_copies`
    the sources have every box that this process holds, not only the boxes that it writes.
    """
    reader = _Reader(options, hosts, detach, takes_copies)
    readers: dict[type, Callable[[str, Any], Source] | None] = {}  # each type is looked at once
    sources, values = [], {}
    for name, leaf in leaves.items():
        kind = type(leaf)
        if kind not in readers:
            readers[kind] = reader.for_type(kind)
        read = readers[kind]
        try:
            if read is None:
                values[name] = _plain_value(leaf)
            else:
                sources.append(read(name, leaf))
        except _DeletedError:
            raise _deleted_error(leaves) from None
        except LeafError as error:
            raise LeafError(f"leaf {name!r}: {error}") from None
        except (RuntimeError, jax.errors.JAXTypeError) as error:  # an error of the device, or traced
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise _deleted_error(leaves) from None
            error.add_note(f"while saving leaf {name!r}, a {kind.__name__}")
            raise
    if detach:
        reader.detach_all(sources + reader.replicas)
    return sources, values, Compared(reader.replicas, reader.own)


class _Reader:
    def __init__(self, options: SaveOptions, hosts: Hosts, detach: bool, takes_copies: bool = False) -> None:
        self.takes_copies = takes_copies
        self.dtype = options.dtype
        self.where = options.snapshot
        self.hosts = hosts
        self.detach = detach
        self.dtypes: dict[np.dtype[Any], tuple[str, bool]] = {}
        self.facts: dict[Any, _Facts] = {}
        self.copied: dict[Any, _CopiedKind | None] = {}
        self.small: dict[tuple[int, Any], _Small] = {}
        self.splits: dict[Any, _Split] = {}
        self.written = np.zeros(hosts.count, np.int64)
        self.own = Hasher()
        self.replicas: list[Source] = []

    def for_type(self, kind: type) -> Callable[[str, Any], Source] | None:
        if issubclass(kind, np.ma.MaskedArray):
            return self.masked
        if issubclass(kind, np.ndarray):
            return self.numpy_array
        if issubclass(kind, jax.core.Tracer):
            return self.traced
        return self.jax_array if issubclass(kind, jax.Array) else None

    def traced(self, name: str, leaf: Any) -> Source:
        raise LeafError("a traced value has no bytes; save outside of jit, grad and vmap")

    def masked(self, name: str, leaf: Any) -> Source:
        raise LeafError("the mask of a masked array cannot be stored; fill it first")

    def numpy_array(self, name: str, array: np.ndarray[Any, Any]) -> Source:
        dtype = self.stored(name_of_dtype(array.dtype))
        if self.hosts.count > 1:
            self.written[0] += array.nbytes
            if array.nbytes <= _COMPARED_BYTES:
                self.own.update(to_bytes(array, dtype))
        if self.hosts.number:  # every process has one; the array of the first process is stored
            return Source(name, dtype, array.shape, "numpy", writes_start=False)
        if array.nbytes <= _COPIED_BYTES:
            return Source(name, dtype, array.shape, "numpy", None, None, to_bytes(array, dtype))
        interrupts.check()  # copies of large arrays take long, and nothing is owned yet
        host = np.array(array) if self.detach else np.asarray(array)
        return Source(name, dtype, host.shape, "numpy", None, None, host)

    def jax_array(self, name: str, array: Any) -> Source:
        where = _where(array.sharding)
        small = self.small.get((id(array.aval), where)) or self.small_kind(array, where)
        if small:  # as nearly all leaves are where a tree has very many
            kind = small.kind
            data = kind.copy(array, small.nbytes)
            return Source(name, kind.dtype, small.shape, kind.home, None, kind.sharding, data)
        if array.is_deleted():
            raise _DeletedError
        key = None
        place, only, sharding = self.look_at(array.sharding, where)
        if not isinstance(array.dtype, np.dtype):
            key, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
        dtype, is_packed = self.stored_jax(array.dtype)
        shape = array.shape
        home = "weak" if array.weak_type and dtype == array.dtype.name else "jax"  # a cast makes it strong
        if place == "device" and self.hosts.count == 1:
            whole = _whole(shape)
            return Source(name, dtype, shape, home, key, sharding, None, [(whole, array)], (whole,), shape)
        if place == "memory" and not is_packed:
            if self.hosts.count > 1 and array.nbytes <= _COMPARED_BYTES and sharding is None:
                self.own.update(to_bytes(np.asarray(array), dtype))
            return Source(name, dtype, shape, home, key, sharding, view_of(array), (), (), None, only)
        split = self.split(array)
        if self.hosts.count > 1 and array.nbytes <= _REPLICA_BYTES and split.is_everywhere:
            self.compare(name, array)
        mine, writes_start = self.mine(split, array.dtype.itemsize)
        parts = [(box, _data(array, number)) for box, number in mine.items()]
        boxes = merged(list(mine))
        return Source(
            name, dtype, shape, home, key, sharding, None, parts, boxes, split.shard, only, writes_start
        )

    def compare(self, name: str, array: jax.Array) -> None:
        """Note a small array that every process has a copy of, such as the step, to compare the copies."""
        if len(self.replicas) < _MOST_REPLICAS:
            box = Box.whole(array.shape)
            self.replicas.append(Source(name, array.dtype.name, array.shape, parts=[(box, _data(array, 0))]))

    def stored_jax(self, dtype: np.dtype[Any]) -> tuple[str, bool]:
        """Return the dtype under which a dtype is stored, and whether XLA keeps it packed."""
        known = self.dtypes.get(dtype)
        if known is None:
            known = self.dtypes[dtype] = (self.stored(name_of_dtype(dtype)), dtype in PACKED)
        return known

    def stored(self, dtype: str) -> str:
        return self.dtype if self.dtype and is_floating(dtype) else dtype

    def small_kind(self, array: Any, where: Any) -> _Small | None:
        """Return the facts that arrays like this one share, if they are small, on the CPU and stored as they are."""
        aval = array.aval
        shape, dtype = aval.shape, aval.dtype
        key = dtype, len(shape), aval.weak_type, where
        if key not in self.copied:
            self.copied[key] = self.copied_kind(array, where)
        kind = self.copied[key]
        nbytes = 0 if kind is None else kind.itemsize * math.prod(shape)
        if kind is None or not 0 < nbytes <= _COPIED_BYTES:
            return None
        small = self.small[id(aval), where] = _Small(kind, shape, nbytes, aval)
        return small

    def copied_kind(self, array: Any, where: Any) -> _CopiedKind | None:
        """Return how arrays of this dtype and sharding are copied, if they are on the CPU and stored as they are."""
        place, _, sharding = self.look_at(array.sharding, where)
        dtype = array.dtype
        if place != "memory" or self.hosts.count > 1 or not isinstance(dtype, np.dtype):
            return None
        stored, is_packed = self.stored_jax(dtype)
        if is_packed or stored != dtype.name:
            return None
        (device,) = array.devices()
        home = "weak" if array.weak_type else "jax"
        return _CopiedKind(stored, dtype.itemsize, home, sharding, copier(dtype, array.ndim, device))

    def look_at(self, sharding: Any, where: Any) -> _Facts:
        """Return where arrays of a sharding are, the process that holds them alone (-1 if several do), and the recorded
        sharding.

        The place is "device" for one device of this process, "memory" if that is its CPU, and None otherwise.
        """
        facts = self.facts.get(where)
        if facts is None:
            devices: set[Any] = sharding.device_set
            processes = {self.hosts.process_of(device) for device in devices}
            only = processes.pop() if len(processes) == 1 else -1
            is_here = len(devices) == 1 and only == self.hosts.number
            is_cpu = is_here and next(iter(devices)).platform == "cpu"
            place = "memory" if is_cpu else "device" if is_here else None
            facts = self.facts[where] = (place, only, recorded_sharding(sharding))
        return facts

    def split(self, array: jax.Array) -> _Split:
        """Return the boxes of arrays of this shape and sharding; cached, because most arrays of a tree are alike."""
        key = (array.sharding, array.shape)
        found = self.splits.get(key)
        if found is None:
            found = self.splits[key] = _split(array, self.hosts)
        return found

    def mine(self, split: _Split, itemsize: int) -> tuple[dict[Box, int], bool]:
        """Return the boxes that this process writes, and whether it writes the start of the array.

        If several processes hold a box, the process with the least to write so far writes it.
        """
        if self.takes_copies:
            return split.here, False
        if split.settled is not None:
            if split.counts:
                self.written += split.elements * itemsize
            return split.settled
        sizes = [(box.size * itemsize, who) for box, who in split.holders.items()]
        return split.of(choose_writers(sizes, self.written), self.hosts.number)

    def detach_all(self, sources: list[Source]) -> None:
        """Replace all arrays on accelerators by copies.

        Copies on the devices take a fraction of the time of copies to the host, for which the caller would wait; but
        they need room there.
        """
        arrays = [a for source in sources for _, a in source.parts if isinstance(a, jax.Array)]
        if not arrays:
            return
        kinds = Kinds(arrays)
        if self.where == "host" or (self.where == "auto" and not _have_room(kinds.nbytes())):
            # Page-locked, so that the transfers run at full speed and beside the computations of the caller.
            pinned = [array.sharding.with_memory_kind("pinned_host") for array in arrays]
            copies = iter(jax.device_put(arrays, pinned, may_alias=False))
        else:
            copies = iter(copied(kinds))
        for source in sources:
            parts: Any = source.parts  # a list: to make another source takes ten times as long
            for number, (box, array) in enumerate(parts):
                if isinstance(array, jax.Array):
                    parts[number] = (box, next(copies))


_whole = lru_cache(1024)(Box.whole)  # most arrays of a tree have one of a few shapes


def _where(sharding: Any) -> Any:
    """Return a key for a sharding. To compare two shardings of a single device takes JAX three times as long."""
    if type(sharding) is not SingleDeviceSharding:
        return sharding
    (device,) = sharding.device_set
    return device, sharding.memory_kind


class _CopiedKind(Struct, frozen=True):
    """Facts that small arrays which are copied have in common; `copy` returns the bytes of an array."""

    dtype: str
    itemsize: int
    home: str
    sharding: RecordedSharding | None
    copy: Callable[[Any, int], bytes]


class _Small(Struct, frozen=True, gc=False):
    """Small arrays with the same `aval` and sharding. `aval` is held: its id is a key, and must not be used again."""

    kind: _CopiedKind
    shape: tuple[int, ...]
    nbytes: int
    aval: Any


class _Split:
    """The boxes of an array, the processes that hold each box, and the shards of this process."""

    def __init__(
        self,
        holders: dict[Box, np.ndarray[Any, np.dtype[np.int64]]],
        here: dict[Box, int],
        shard: tuple[int, ...],
        hosts: Hosts,
    ) -> None:
        self.holders, self.here, self.shard = holders, here, shard
        self.is_everywhere = len(holders) == 1 and all(len(who) == hosts.count for who in holders.values())
        self.settled: tuple[dict[Box, int], bool] | None = None
        self.elements = np.zeros(hosts.count, np.int64)
        if all(len(who) == 1 for who in holders.values()):  # the choice does not depend on `written`
            self.settled = self.of([int(who[0]) for who in holders.values()], hosts.number)
            for box, who in holders.items():
                self.elements[who[0]] += box.size
        # Even shares change no choice, and an array that one process holds alone looks different to each process.
        is_even = bool((self.elements == self.elements[0]).all())
        self.counts = not is_even and np.count_nonzero(self.elements) > 1

    def of(self, writers: Sequence[int], process: int) -> tuple[dict[Box, int], bool]:
        mine = [box for box, writer in zip(self.holders, writers, strict=True) if writer == process]
        return {box: self.here[box] for box in mine}, writers[0] == process


def _split(array: jax.Array, hosts: Hosts) -> _Split:
    holders: dict[Box, dict[int, None]] = {}
    placed: Any = array.sharding.devices_indices_map(array.shape)  # jax does not type devices
    for device, index in placed.items():
        process = hosts.process_of(device)
        if process < 0:
            raise LeafError(
                f"it is on {device} of process {device.process_index}, which does not take part in this save; save "
                "from all processes that hold it (SaveOptions.processes)"
            )
        holders.setdefault(box_of(index, array.shape), {})[process] = None
    here: dict[Box, int] = {}
    for number, shard in enumerate(array.addressable_shards):
        if hosts.process_of(shard.device) == hosts.number:
            here.setdefault(box_of(shard.index, array.shape), number)
    processes = {box: np.array(list(who)) for box, who in holders.items()}
    return _Split(processes, here, array.sharding.shard_shape(array.shape), hosts)


class _DeletedError(Exception):
    """Raised for a deleted array; `snapshot` then looks for all of them."""


def _deleted_error(leaves: Mapping[str, Any]) -> LeafError:
    names = [repr(n) for n, leaf in leaves.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    found = f"leaf {names[0]}: the array was" if len(names) == 1 else f"leaves {few(names)}: the arrays were"
    return LeafError(
        f"{found} deleted, probably donated to a jitted function (donate_argnums); save before that call, or save its "
        "result"
    )


def _data(array: jax.Array, number: int) -> Any:
    data = array.addressable_data(number)
    return view_of(data) if is_host_memory(data) else data


def _plain_value(leaf: Any) -> Any:
    value = value_to_json(leaf)
    if type(value) is dict and not is_recorded(value):  # all other JSON is the value itself
        if is_code(leaf):  # an activation of Equinox, say
            return code_to_json(leaf)
        kind = type(leaf)
        raise LeafError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be stored; a checkpoint holds jax and numpy "
            "arrays, numbers, text and bytes. If it holds arrays, register the class with jax.tree_util, or with "
            "eformer.checkpoint.register_module"
        )
    return value


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def _have_room(needed: Mapping[Any, int]) -> bool:
    """Tell whether each device has memory for as many bytes."""
    for device, nbytes in needed.items():
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        if stats and free < 1.1 * nbytes:
            return False
    return True


def choose_writers(
    holders: Iterable[tuple[int, np.ndarray[Any, np.dtype[np.int64]]]],
    written: np.ndarray[Any, np.dtype[np.int64]],
) -> list[int]:
    """Choose the writer of each box, given as (bytes, processes that hold it): the process with the least to write.

    `written`, the bytes of each process so far, is updated. Every process computes the same choice.
    """
    chosen = []
    for nbytes, processes in holders:
        writer = int(processes[written[processes].argmin()])
        written[writer] += nbytes
        chosen.append(writer)
    return chosen


# ------------------------------------------------------------------------------------------ metadata


def metadata_to_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as JSON. Arrays without axes become plain numbers. One error names every key that cannot be
    stored."""
    recorded: dict[str, Any] = {}
    problems = []
    for name, value in dict(metadata or {}).items():
        try:
            recorded[name] = _recorded_metadata(name, value)
        except LeafError as error:
            problems.append(f"metadata {name!r}: {error}")
    if problems:
        raise LeafError(few(problems))
    return recorded


def _recorded_metadata(name: object, value: Any) -> Any:
    if type(name) is not str:
        raise LeafError(f"a key is text, not a {type(name).__name__}")
    json = value_to_json(_with_plain_numbers(value))
    if not is_recorded(json):
        raise LeafError(f"a {type(value).__name__} cannot be stored; use plain values")
    return json


def _with_plain_numbers(value: Any) -> Any:
    """Return a value with plain numbers in place of arrays without axes and of numpy's scalars."""
    if isinstance(value, dict):
        return {key: _with_plain_numbers(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_numbers, value))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _number(value)
    return value


def _number(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        raise LeafError("a traced value has no number; save outside of jit, grad and vmap")
    if array.shape or not isinstance(array.dtype, np.dtype):
        raise LeafError(
            f"an array {array.dtype}{list(array.shape)} is not a number; save it as a leaf of the tree"
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise LeafError("the array was deleted, probably donated to a jitted function")
    return array.item()
