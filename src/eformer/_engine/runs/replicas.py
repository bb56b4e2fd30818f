"""Compare the copies of arrays that several devices hold, in one process or in several.

Each process digests its copies. Devices that hold the same boxes form a group, and the processes first exchange one
digest for each device of a group. Only if these differ, they exchange the digests of the leaves.

Tests: tests/engine/runs/test_replicas.py, tests/multihost/test_live.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import msgspec
from msgspec import Struct

from eformer._engine.processes.hosts import meeting
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import xxh3_128, xxh3_128_of
from eformer._engine.record.dtypes import name_of_dtype
from eformer._engine.record.fingerprints import whole_cut
from eformer._engine.record.planned import Source
from eformer._engine.record.text import count, few
from eformer._engine.saving.fingerprints import batches_of
from eformer._engine.saving.live import digest_all
from eformer._engine.saving.snapshot import box_of
from eformer._engine.trees.devices import is_host_memory, is_key, view_of
from eformer._engine.trees.flatten import flatten
from eformer.errors import ProcessError, ReplicaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.saving.fingerprints import Digests, PieceBatch

_MOST_NAMED = 50  # leaves in an error


def check_replicas(path: str, step: int, tree: Any, timeout: float | None = None) -> None:
    """Compare all copies of all arrays of `tree`, in all processes. Raise a ReplicaError in each of them that names the
    leaves, and the processes whose copies differ.

    Arrays of which every device has another part have no copies. Numpy arrays, and arrays on devices of one process
    alone, may differ between processes.
    """
    with meeting("compares copies of arrays", timeout) as hosts:
        copies, described = _copies_here(tree)
        digest_all([(batch, copy.digests) for copy in copies for batch in copy.batches])
        mine = _encode(_Groups(described, _digests_of_groups(copies)))
        differing = msgspec.msgpack.decode(hosts.meet(mine, partial(_differing, hosts)), type=list[str])
        if not differing:
            return
        leaves = [
            _Leaf(c.group, c.name, c.device, c.process, c.digest) for c in copies if c.group in differing
        ]
        problems = hosts.meet(_encode(leaves), _problems)
    raise ReplicaError(path, step, msgspec.msgpack.decode(problems, type=list[str]))


@dataclass(slots=True)
class _Copy:
    """A box of an array on one device of this process. `group` stands for all devices that hold the same box."""

    group: str
    name: str
    device: int
    process: int
    batches: Sequence[PieceBatch]
    digests: Digests = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return xxh3_128_of(self.digests[number].encode() for number in range(len(self.digests)))


class _Groups(Struct):
    """The message of a process: a digest of the names of its leaves, and of the copies on each of its devices."""

    tree: str
    digests: dict[str, dict[int, str]]


class _Leaf(Struct, array_like=True):
    group: str
    name: str
    device: int
    process: int
    digest: str


def _copies_here(tree: Any) -> tuple[list[_Copy], str]:
    """Return the copies on the devices of this process, and a digest of the names, dtypes and shapes."""
    copies: list[_Copy] = []
    described = []
    for name, leaf in flatten(tree)[0].items():
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            described.append(f"{name}: {leaf.dtype}{list(leaf.shape)}")
            copies += _copies_of(name, jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return copies, xxh3_128("\n".join(described).encode(errors="surrogatepass"))


def _copies_of(name: str, array: Any) -> list[_Copy]:
    groups: dict[Box, list[int]] = defaultdict(list)
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        groups[box_of(index, array.shape)].append(device.id)
    copies = []
    for shard in array.addressable_shards:
        devices = groups[box_of(shard.index, array.shape)]
        if len(devices) > 1:
            data = view_of(shard.data) if is_host_memory(shard.data) else shard.data
            whole = Box.whole(data.shape)
            source = Source(name, name_of_dtype(data.dtype), data.shape, parts=[(whole, data)])
            cut = whole_cut(source.dtype, source.shape)
            group, process = xxh3_128(repr(sorted(devices)).encode()), shard.device.process_index
            batches = list(batches_of(source, cut, range(len(cut))))
            copies.append(_Copy(group, name, shard.device.id, process, batches))
    return copies


def _digests_of_groups(copies: Sequence[_Copy]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        found[copy.group][copy.device].append(copy.digest.encode())
    return {
        group: {device: xxh3_128_of(parts) for device, parts in of.items()} for group, of in found.items()
    }


def _differing(hosts: Hosts, messages: Sequence[bytes]) -> bytes:
    """List the groups of devices whose copies differ."""
    sent = [msgspec.msgpack.decode(message, type=_Groups) for message in messages]
    others = [hosts.name(number) for number, one in enumerate(sent) if one.tree != sent[0].tree]
    if others:
        raise ProcessError(
            f"{few(others)} has other leaves than {hosts.name(0)}: pass the same tree everywhere"
        )
    seen: dict[str, set[str]] = defaultdict(set)
    for one in sent:
        for group, digests in one.digests.items():
            seen[group].update(digests.values())
    return _encode([group for group, digests in seen.items() if len(digests) > 1])


def _problems(messages: Sequence[bytes]) -> bytes:
    """Describe each leaf whose copies differ."""
    leaves = [leaf for message in messages for leaf in msgspec.msgpack.decode(message, type=list[_Leaf])]
    found: dict[tuple[str, str], list[_Leaf]] = defaultdict(list)
    for leaf in leaves:
        found[leaf.name, leaf.group].append(leaf)
    problems = [
        _problem(name, copies) for (name, _), copies in found.items() if len({c.digest for c in copies}) > 1
    ]
    more = len(problems) - _MOST_NAMED
    return _encode(
        problems[:_MOST_NAMED] + ([f"... and {count(more, 'more leaf', 'more leaves')}"] * (more > 0))
    )


def _problem(name: str, copies: Sequence[_Leaf]) -> str:
    """Name the copies that differ from most of the copies."""
    usual, times = Counter(copy.digest for copy in copies).most_common(1)[0]
    others = _by_process(copy for copy in copies if copy.digest != usual)
    agreeing = _by_process(copy for copy in copies if copy.digest == usual)
    which = "the others" if 2 * times > len(copies) else few(agreeing)
    return f"leaf {name!r}: {few(others)} has other elements than {which}"


def _by_process(copies: Any) -> list[str]:
    devices: dict[int, list[int]] = defaultdict(list)
    for copy in copies:
        devices[copy.process].append(copy.device)
    return [
        f"process {process} ({'device' if len(ids) == 1 else 'devices'} {', '.join(map(str, sorted(ids)))})"
        for process, ids in sorted(devices.items())
    ]


_encode = msgspec.msgpack.Encoder().encode
