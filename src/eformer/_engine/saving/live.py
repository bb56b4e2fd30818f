"""Digest a tree where it is: on devices, in host memory, sharded over processes. Compare it with a checkpoint's record.

Every process digests the pieces that it holds. A piece that lies in several processes is gathered, a few pieces at a
time; copies of a piece are shared out among the processes that hold it.

Tests: tests/engine/saving/test_fingerprints.py, tests/engine/saving/test_same.py, tests/multihost/test_live.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
from msgspec import Struct

from eformer._engine.formats.find import look_at
from eformer._engine.processes.hosts import meeting
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.fingerprints import (
    digests_in,
    fingerprint_of,
    fingerprint_of_value,
    recorded_cut,
    whole_cut,
)
from eformer._engine.record.manifest import LeafEntry, value_text
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.pieces import PIECE_BYTES, bounding, merged
from eformer._engine.record.planned import PlannedFile, Source
from eformer._engine.record.text import count, few, glance
from eformer._engine.saving.fingerprints import batches_of
from eformer._engine.saving.snapshot import box_of, snapshot
from eformer._engine.saving.source_digests import SourceDigests
from eformer._engine.saving.staging import Staging
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import default_threads, run_all
from eformer._engine.trees import device_digests, devices
from eformer._engine.trees.flatten import flatten
from eformer.errors import ProcessError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.fingerprints import Piece
    from eformer._engine.saving.fingerprints import Digests, PieceBatch

PieceDigests = dict[str, list[str]]  # of each leaf, in the order of its pieces


@uninterrupted
def fingerprint(tree: Any, *, timeout: float | None = None) -> dict[str, str]:
    """Return one digest for each leaf of `tree`, by name. It depends on dtype, shape and elements alone.

    The digests are the same for numpy arrays and for jax.Arrays on any devices, sharded in any way over any number of
    processes, and `inspect(path).trees[""].fingerprints` has the same ones for a checkpoint in any format. They are
    xxh3-128: equal fingerprints mean equal bits, unless somebody has made them equal on purpose.

    Arrays stay where they are. On a CPU this reads each byte of the tree once; arrays on an accelerator are copied to
    the host, a few at a time. Several processes all make this call, with the same tree; each digests its own shards.
    Rows that lie in several processes are sent between them. Numpy arrays and plain values are those of the first
    process. `timeout` is how long a process waits for the others, in seconds; None for 600.

    Example:

        >>> state = checkpoint.load("run/step-100")
        >>> checkpoint.fingerprint(state) == checkpoint.inspect("run/step-100").trees[""].fingerprints
        True
    """
    with meeting("fingerprints a tree", timeout) as hosts:
        live = LiveTree(tree, hosts)
        live.agree(lambda: b"")
        cuts = {source.name: whole_cut(source.dtype, source.shape) for source in live.sources}
        found = live.digest(cuts, lambda digests: _encode(live.fingerprints(digests)))
        return msgspec.msgpack.decode(found, type=dict[str, str])


@dataclass(frozen=True, slots=True)
class Same:
    """The leaves of a tree that differ from a checkpoint. True if there are none.

    path        the checkpoint
    differing   leaves that both have and that differ: names, with the difference
    missing     leaves that the checkpoint has and the tree lacks
    extra       leaves that the tree has and the checkpoint lacks
    equal       the number of leaves with the same dtype, shape and elements

    Example:

        >>> found = checkpoint.same(state, "run/step-100")
        >>> if not found:
        ...     print(found)
    """

    path: str
    differing: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    equal: int = 0

    def __bool__(self) -> bool:
        return not (self.differing or self.missing or self.extra)

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        lines = [f"{self.path}: {'the tree is the same' if self else 'the tree differs'}"]
        lines[0] += f", {count(self.equal, 'leaf', 'leaves')} equal"
        lines += [f"~ {name}: {text}" for name, text in self.differing.items()]
        lines += [f"- {name}: only in the checkpoint" for name in self.missing]
        return "\n".join(lines + [f"+ {name}: only in the tree" for name in self.extra])


@uninterrupted
def same(
    tree: Any, path: str | os.PathLike[str], *, prefix: str | None = None, timeout: float | None = None
) -> Same:
    """Compare `tree` with the checkpoint at `path`, and return the leaves that differ. Reads no data of the checkpoint.

    The tree is digested where it is, as by `fingerprint`, and compared with the digests in the record. Leaves are equal
    if dtype, shape and bits are equal; sharding, containers, metadata and the kind of array (numpy or jax) may differ.
    `prefix` selects one of several trees. Several processes all make this call, and get the same result; a process
    waits for the others for `timeout` seconds, None for 600.

    This says what the save has recorded, not that the files still hold it: `verify` reads the files.

    Raise ValueError if the record has no digests of a leaf, as that of other programs.

    Example:

        >>> state = checkpoint.load("run/step-100")
        >>> found = checkpoint.same(state, "run/step-100")
        >>> bool(found), found.differing
        (True, {})
    """
    with meeting("compares a tree with a checkpoint", timeout) as hosts:
        live = LiveTree(tree, hosts)
        record = look_at if not hosts.number else None
        recorded = _decode_recorded(
            live.agree(lambda: record(path, partial(_recorded, prefix=prefix)) if record else b"")
        )
        comparison = _Comparison(live, recorded, str(path))
        return msgspec.msgpack.decode(live.digest(comparison.cuts, comparison.finish), type=Same)


# ------------------------------------------------------------------------------------------ live trees


class LiveTree:
    """The leaves of a tree that this process holds, and the processes that hold the tree together."""

    def __init__(self, tree: Any, hosts: Hosts) -> None:
        self.leaves, _ = flatten(tree)
        self.hosts = hosts
        self.sources, self.values, _ = snapshot(self.leaves, SaveOptions(), hosts, takes_copies=True)

    def agree(self, answer: Callable[[], bytes]) -> bytes:
        """Check that all processes have the same leaves, and return the answer of the first process."""
        lines = [f"{source.name}: {source.entry().described}" for source in self.sources]
        mine = xxh3_128("\n".join([*lines, *self.values]).encode(errors="surrogatepass")).encode()

        def compare(messages: Sequence[bytes]) -> bytes:
            others = [self.hosts.name(number) for number, sent in enumerate(messages) if sent != mine]
            if others:
                raise ProcessError(
                    f"{few(others)} has other leaves than {self.hosts.name(0)}: all processes have to pass "
                    "the same tree"
                )
            return answer()

        return self.hosts.meet(mine, compare)

    def digest(self, cuts: Mapping[str, Sequence[Piece]], finish: Callable[[PieceDigests], bytes]) -> bytes:
        """Digest the pieces of leaves in all processes. Return the answer that `finish` makes of them in the first."""
        found: dict[str, Digests] = {source.name: {} for source in self.sources if source.name in cuts}
        work: list[tuple[PieceBatch, Digests]] = []
        for source in self.sources:
            cut = cuts.get(source.name, ())
            if isinstance(source.whole, bytes) and len(cut) == 1 and not cut[0].is_packed:
                found[source.name][0] = xxh3_128(
                    source.whole
                )  # small, as nearly all leaves of very large trees
            elif cut:
                work += [(one, found[source.name]) for one in self._batches(source, cut)]
        digest_all(work)

        def join(messages: Sequence[bytes]) -> bytes:
            sent = [_decode_sent(message) for message in messages]
            return finish({name: self._joined(name, cuts[name], sent) for name in found})

        return self.hosts.meet(_encode(found), join)

    def fingerprints(self, digests: PieceDigests) -> dict[str, str]:
        """Return the fingerprints of all leaves, given the digests of the pieces of whole leaves."""
        entries = {source.name: source.entry() for source in self.sources}
        return {
            name: fingerprint_of(entries[name], "".join(digests[name]))
            if name in entries
            else fingerprint_of_value(self.values[name])
            for name in self.leaves
        }

    def _batches(self, source: Source, cut: Sequence[Piece]) -> Iterable[PieceBatch]:
        """Return the pieces that this process digests. Gather the pieces that no process has whole."""
        if self.hosts.count == 1:
            return batches_of(source, cut, range(len(cut)))
        leaf = self.leaves[source.name]
        holders = _holders(leaf, source, self.hosts)
        owners = _owners(cut, holders)
        mine = list(batches_of(source, cut, np.nonzero(owners == self.hosts.number)[0].tolist()))
        together = sorted({process for processes in holders.values() for process in processes})
        if self.hosts.number in together and (orphans := np.nonzero(owners < 0)[0].tolist()):
            mine += self._gathered(source, list(batches_of(source, cut, orphans)), leaf, together)
        return mine

    def _gathered(
        self, source: Source, batches: Sequence[PieceBatch], leaf: Any, together: Sequence[int]
    ) -> Iterable[PieceBatch]:
        """Gather pieces in all processes that hold the leaf. The processes take turns to digest them."""
        array = jax.random.key_data(leaf) if source.key else leaf
        boxes = [batch.extent.box for batch in batches]
        gathered = devices.gathered(array, [(box.start, box.shape) for box in boxes])
        for turn, (batch, box, part) in enumerate(zip(batches, boxes, gathered, strict=True)):
            if together[turn % len(together)] == self.hosts.number:
                batch.extent.source = msgspec.structs.replace(source, parts=[(box, part)])
                yield batch

    def _joined(self, name: str, cut: Sequence[Piece], sent: Sequence[Mapping[str, Digests]]) -> list[str]:
        known: Digests = {}
        for one in reversed(sent):  # of arrays that each process has for itself, the first process's count
            known |= one[name]
        if len(known) != len(cut):
            raise ProcessError(
                f"leaf {name!r}: no process has its elements; all processes have to pass the same tree"
            )
        return [known[number] for number in range(len(cut))]


def _holders(leaf: Any, source: Source, hosts: Hosts) -> dict[tuple[Box, ...], list[int]]:
    """Return the processes that hold a leaf, by the boxes that they hold."""
    if not isinstance(leaf, jax.Array):
        return {(Box.whole(source.shape),): [0]}
    if source.key:
        leaf = jax.random.key_data(leaf)
    held: dict[int, dict[Box, None]] = {}
    placed: Any = leaf.sharding.devices_indices_map(leaf.shape)  # jax does not type devices
    for device, index in placed.items():
        held.setdefault(hosts.process_of(device), {})[box_of(index, leaf.shape)] = None
    found: dict[tuple[Box, ...], list[int]] = {}
    for process, boxes in sorted(held.items()):
        found.setdefault(tuple(merged(list(boxes))), []).append(process)
    return found


def _owners(cut: Sequence[Piece], holders: Mapping[tuple[Box, ...], Sequence[int]]) -> np.ndarray[Any, Any]:
    """Choose the process that digests each piece, among those that hold it whole; -1 for a piece that none holds."""
    owners = np.full(len(cut), -1)
    if not cut:
        return owners
    starts, stops = (np.array([ends(piece.box) for piece in cut]) for ends in (_start, _stop))
    for boxes, processes in holders.items():
        turns = np.array(processes)[np.arange(len(cut)) % len(processes)]
        for box in boxes:
            is_inside = (starts >= box.start).all(1) & (stops <= box.stop).all(1) & (owners < 0)
            owners = np.where(is_inside, turns, owners)
    return owners


_start, _stop = attrgetter("start"), attrgetter("stop")


def digest_all(work: Sequence[tuple[PieceBatch, Digests]]) -> None:
    """Digest batches of pieces on many threads; on accelerators where programs for that are compiled."""
    on_devices = None
    if device_digests.ENABLED and devices.has_accelerator():
        planned = PlannedFile("", [batch.extent for batch, _ in work], 0)
        on_devices = SourceDigests([planned], PIECE_BYTES)
    staging = Staging(SaveOptions().staging_bytes)
    run_all([partial(batch.digest, into, staging, on_devices) for batch, into in work], default_threads())


# --------------------------------------------------------------------------------- and their checkpoints


class _Recorded(Struct):
    """The record of a tree, as the first process sends it to all."""

    block: int
    leaves: dict[str, LeafEntry]
    values: dict[str, Any]


def _recorded(found: Found, prefix: str | None) -> bytes:
    tree = found.tree(prefix)
    return _encode(_Recorded(tree.block, dict(tree.leaves), tree.raw_values))


class _Comparison:
    """Compare live leaves with recorded ones by the digests of the recorded pieces."""

    def __init__(self, live: LiveTree, recorded: _Recorded, path: str) -> None:
        self.path, self.values = path, recorded.values
        self.live, self.entries = live, recorded.leaves
        there = [*recorded.leaves, *recorded.values]
        known = set(there)
        self.extra = tuple(name for name in live.leaves if name not in known)
        self.missing = tuple(name for name in there if name not in live.leaves)
        self.differing: dict[str, str] = {}
        self.cuts: dict[str, Sequence[Piece]] = {}
        self.expected: dict[str, str] = {}  # joined digests of pieces, or the fingerprint
        self._compare_records(recorded.block)

    def _compare_records(self, block: int) -> None:
        unknown = []
        described = {source.name: source.entry().described for source in self.live.sources}
        for source in self.live.sources:
            entry = self.entries.get(source.name)
            if entry is None or entry.described != described[source.name]:
                continue
            if found := recorded_cut(entry, block):
                self.cuts[source.name], self.expected[source.name] = found
            elif entry.own_fingerprint:
                self.cuts[source.name] = whole_cut(entry.dtype, entry.shape)
                self.expected[source.name] = entry.own_fingerprint
            else:
                unknown.append(source.name)
        if unknown:
            raise ValueError(
                f"{self.path}: the record has no digests of {count(len(unknown), 'leaf', 'leaves')}: {few(unknown)}. "
                "Compare with the data: checkpoint.fingerprint(tree) == checkpoint.fingerprint(checkpoint.load(path)). "
                "SaveOptions(checksums=True) records them in every format"
            )
        of_tree = described | {
            name: value_text(value).removeprefix("= ") for name, value in self.live.values.items()
        }
        of_checkpoint = {name: entry.described for name, entry in self.entries.items()}
        of_checkpoint |= {name: value_text(value).removeprefix("= ") for name, value in self.values.items()}
        for name, text in of_tree.items():
            if name in of_checkpoint and name not in self.cuts and not self._is_equal_value(name):
                self.differing[name] = f"{text} in the tree, {of_checkpoint[name]} in the checkpoint"

    def _is_equal_value(self, name: str) -> bool:
        if name not in self.values or name not in self.live.values:
            return False
        return fingerprint_of_value(self.values[name]) == fingerprint_of_value(self.live.values[name])

    def finish(self, digests: PieceDigests) -> bytes:
        """Return the result, given the digests of the live pieces."""
        for name, found in digests.items():
            if problem := self._difference(name, found):
                self.differing[name] = f"{self.entries[name].described}: {problem}"
        names = [name for name in self.live.leaves if name in self.differing]
        differing = {name: self.differing[name] for name in names}
        equal = len(self.live.leaves) - len(self.extra) - len(differing)
        return _encode(Same(self.path, differing, self.missing, self.extra, equal))

    def _difference(self, name: str, digests: Sequence[str]) -> str:
        entry, cut = self.entries[name], self.cuts[name]
        if entry.own_fingerprint == self.expected[name]:
            return (
                "" if fingerprint_of(entry, "".join(digests)) == entry.own_fingerprint else "elements differ"
            )
        expected = digests_in(self.expected[name])
        pairs = zip(cut, digests, expected, strict=True)
        differing = [piece.box for piece, digest, recorded in pairs if digest != recorded]
        if not differing:
            return ""
        around = bounding(differing)
        where = ", ".join(f"{start}:{stop}" for start, stop in zip(around.start, around.stop, strict=True))
        return f"elements differ in [{where}]" if where else "the element differs"


_encode = msgspec.msgpack.Encoder().encode
_decode_sent = msgspec.msgpack.Decoder(dict[str, dict[int, str]]).decode
_decode_recorded = msgspec.msgpack.Decoder(_Recorded).decode
