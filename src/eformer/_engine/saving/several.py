"""A save by several processes: they agree on one tree and one directory, each writes its boxes, the first commits.

If a process dies, the other processes raise an error after the timeout, or when JAX notices it. Nothing is committed
unless the first process already commits.

The processes meet twice, and exchange small messages. Each process stores the record of its bytes and digests beside
the bytes (`ProcessRecord`), and sends only the names of its files to the first process.

Tests: tests/engine/saving/test_commit.py, tests/multihost/test_processes.py.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from eformer._engine.processes.hosts import LostError
from eformer._engine.record.digests import xxh3_128_of
from eformer._engine.record.manifest import LeafEntry, Receipt, coverage_of, encode_leaves
from eformer._engine.record.owners import joined_owners, owners_of
from eformer._engine.record.planned import coverage, data_files
from eformer._engine.saving.commit import save_may_be_committed
from eformer._engine.saving.save import Save
from eformer._engine.saving.staging import box_on_host
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.pool import gc_paused
from eformer.errors import MismatchError, ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.planned import PlannedFile
    from eformer._engine.saving.reuse import Kept
    from eformer._engine.stores.base import Upload
    from eformer._engine.tasks.progress import Meter

logger = logging.getLogger("eformer")

# Seconds that a new directory may take to appear on other machines of a network file system.
VISIBLE_WITHIN = 10.0

# Characters of the description of its tree that the first process sends to processes with a different tree.
_MOST_DESCRIBED = 2**24
_MOST_SHOWN = 200  # characters of a plain value in a description

_NOTHING = "the save failed, nothing was committed"
_IN_PLACE = "the save failed after the new tree was put in place; it may not be on stable storage"


class SaveOfSeveral(Save):
    """A save of several processes, seen from one of them.

    agreed    the answer to the first meeting
    leaves    the leaves of the tree; only in the first process
    numbers   the numbers of the leaves by name, the same in every process
    """

    agreed: Agreed
    leaves: dict[str, LeafEntry]
    numbers: dict[str, int]
    _stack: ExitStack

    # -------------------------------------------------------------------------------------- prepare

    def prepare(self, stack: ExitStack) -> None:
        """Agree with the other processes on one tree, one save id and one upload, which the first process begins."""
        self._stack = stack
        mine, lines = _described(self)
        self.agreed = _decode_agreed(self.hosts.meet(_encode(mine), partial(self._agree, mine, lines)))
        if self.agreed.differing:
            self.hosts.end()  # every process knows, and raises an error of its own
            self._refuse_other_trees(lines)
        if self.hosts.number:
            self.entry = msgspec.structs.replace(self.entry, save_id=self.agreed.save_id)
            self.format = self.new_format()

    def _agree(self, mine: Brought, lines: Sequence[str], messages: Sequence[bytes]) -> bytes:
        """Begin the upload if all processes are about to save the same tree in the same way.

        Log a warning if only values differ that each process has for itself.
        """
        hosts, all_brought = self.hosts, [_decode_brought(message) for message in messages]
        for number, brought in enumerate(all_brought):
            if brought.call != mine.call:
                raise ProcessError(
                    f"the processes do different things: {hosts.name(0)} {mine.call}, {hosts.name(number)} "
                    f"{brought.call}; nothing was written"
                )
        if differing := [i for i, brought in enumerate(all_brought) if brought.tree != mine.tree]:
            return _encode(Agreed(differing=differing, described="\n".join(lines)[:_MOST_DESCRIBED]))
        _mention([hosts.name(i) for i, b in enumerate(all_brought) if b.own != mine.own], hosts.name(0))
        super().prepare(self._stack)
        self.upload.announce()  # the other processes look for the new directory as soon as they have the answer
        elsewhere = [number for number, source in enumerate(self.sources) if source.held_only_by > 0]
        return _encode(Agreed(self.entry.save_id, self.store.url, self.upload.token, elsewhere))

    def _refuse_other_trees(self, leaves: Sequence[str]) -> None:
        """Raise a MismatchError that names the leaves, in a process whose tree differs. In all other processes raise a
        ProcessError that names the processes."""
        hosts, differing = self.hosts, self.agreed.differing
        if hosts.number in differing:
            raise MismatchError(
                _differences(leaves, self.agreed.described.split("\n")),
                context=f"{hosts.name(hosts.number)} saves a different tree than {hosts.name(0)}",
            )
        others = ", ".join(map(hosts.name, differing[:20]))
        raise ProcessError(
            f"{others} saves a different tree than {hosts.name(0)}, see the error there; nothing was written"
        )

    # ---------------------------------------------------------------------------------------- write

    def write(self, meter: Meter) -> Receipt:
        with self._failing_together():
            self._take_own_sources(meter)
            if self.hosts.number:
                self.upload = self._join()
                self._stack.callback(self.upload.close)
            else:
                self.leaves = {source.name: source.entry() for source in self.sources}
            return super().write(meter)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Announce an error in the block to the other processes, so that all of them fail."""
        try:
            yield
        except BaseException as error:
            first = self.hosts.fail(error, after_all=True)
            # After an error the first process removes the upload that all processes write to. A file that is missing
            # here is then only the consequence.
            if first and isinstance(error, FileNotFoundError):
                raise ProcessError(f"{_NOTHING}: {first}") from error
            raise

    def _take_own_sources(self, meter: Meter) -> None:
        """Keep the sources that this process writes, now that it knows which leaves the first process does not have.

        A leaf that lies in one process alone, and a leaf that every process has a copy of, look the same to a process
        that holds it. The first process writes the copies.
        """
        theirs, process = set(self.agreed.elsewhere), self.hosts.number
        for number, source in enumerate(self.sources):
            if process and source.held_only_by == process and number not in theirs:
                meter.add(self.format.own_nbytes(source))
                self.sources[number] = msgspec.structs.replace(
                    source, whole=None, parts=(), regions=(), writes_start=False
                )
        self.numbers = {source.name: number for number, source in enumerate(self.sources)}

    def _join(self) -> Upload:
        """Join the upload of the first process; refuse a directory that does not have it.

        A network file system may show the upload a moment later: try again for some seconds.
        """
        deadline = time.monotonic() + VISIBLE_WITHIN
        while True:
            try:
                return self.format.begin(self.store, self.agreed.token)
            except (FileNotFoundError, NotADirectoryError):
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"{self.store.url} is not the directory that the first process saves to "
                        f"({self.agreed.path}): its {self.agreed.token} is not visible here. Several processes must "
                        "save to one directory, on a file system that all of them share"
                    ) from None
                time.sleep(0.05)
                interrupts.check()

    def receipt(
        self,
        files: Sequence[PlannedFile],
        kept: Kept,
        leaves: Mapping[str, LeafEntry | None],
        sha256: Mapping[str, str],
    ) -> Receipt:
        """Record the files of this process.

        The extents and digests are stored beside the bytes, in the headers of the files or in an extra file: they are
        too large for a message.
        """
        with gc_paused():
            whole = Receipt(coverage=coverage(files))
            if not self.format.keeps_records:
                return whole
            if self.format.header_needs_digests:
                whole.files = data_files(files)
                whole.owners = owners_of([[file] for file in files], self.numbers)
                whole.is_torn = any(extent.region for file in files for extent in file.extents)
                return whole
            whole.is_torn = True
            file = self.format.process_file(files, sha256)
            whole.owners = owners_of([files] if file else [], self.numbers)
            if file:
                self.upload.put([(file.name, file.header)])
                self.upload.sync()
                whole.files = data_files([file])
            return whole

    # --------------------------------------------------------------------------------------- commit

    def commit(self, receipt: Receipt) -> None:
        """Commit the files of all processes in the first process. An error there is raised in every process."""
        if self.hosts.number:
            interrupts.go_on_to_the_end()  # the first process commits when it has the message of this one
        try:
            self.hosts.meet(_encode(receipt), self._commit_all)
        except _CommitError as error:
            if isinstance(error.cause, FileNotFoundError):
                error.cause.add_note("a process that times out waiting for the others removes its files")
            raise error.cause from None
        except (ProcessTimeoutError, LostError) as error:
            if self.hosts.number:
                error.add_note(
                    "this process does not know whether the save was committed; inspect the directory"
                )
            raise
        except ProcessError as error:
            is_said = str(error).startswith((_IN_PLACE, _NOTHING))
            raise ProcessError(str(error) if is_said else f"{_NOTHING}: {error}") from error
        finally:
            self.hosts.end()

    def _commit_all(self, receipts: Sequence[bytes]) -> bytes:
        whole = joined_receipts([_decode_receipt(receipt) for receipt in receipts])
        try:
            super().commit(whole)
            # Before the other processes hear of the commit, as they may save to the same directory right away.
            self.upload.close()
        except BaseException as error:
            done = _IN_PLACE if save_may_be_committed(self) else _NOTHING
            raise _CommitError(f"{done}: {self.hosts.name(0)}: {error!r}", error) from error
        return b""

    def recorded(self, receipt: Receipt) -> TreeEntry:
        """Return the tree as the manifest records it. Refuse a tree without every element, or with an element twice."""
        coverages = (coverage_of(name, math.prod(entry.shape)) for name, entry in self.leaves.items())
        if receipt.coverage != sum(coverages) % 2**64:
            raise ProcessError(
                "the processes have not written every element of every leaf once. Do they all see the same arrays on "
                "the same devices? A leaf may not be in one process's memory for one and on devices for another"
            )
        wholeness: Any = "torn" if receipt.is_torn else "whole"
        return msgspec.structs.replace(
            self.entry,
            files=tuple(receipt.files),
            wholeness=wholeness,
            owners=receipt.owners or msgspec.UNSET,
            raw_leaves=encode_leaves(dict(self.leaves)),
        )


class _CommitError(ProcessError):
    """An error of the commit in the first process, in the words that the other processes raise."""

    def __init__(self, text: str, cause: BaseException) -> None:
        super().__init__(text)
        self.cause = cause


def joined_receipts(receipts: Sequence[Receipt]) -> Receipt:
    """Merge receipts: all files, in the order of the processes, and all leaves."""
    whole = Receipt()
    for receipt in receipts:
        whole.files += receipt.files
        whole.leaves |= receipt.leaves
        whole.coverage = (whole.coverage + receipt.coverage) % 2**64
        whole.is_torn |= receipt.is_torn
        whole.own_metadata += receipt.own_metadata
    whole.owners = joined_owners(receipt.owners for receipt in receipts)
    return whole


# ------------------------------------------------------------------------------------------ agreement


class Brought(Struct):
    """The message of a process to the first meeting: its call, a digest of its tree, and a digest of the values
    that it has for itself."""

    call: str
    tree: str
    own: str


class Agreed(Struct):
    """The answer to the first meeting: the id of the save, the place, the token of the upload to join, and the leaves
    that the first process does not have, by number.

    `differing` lists the processes whose tree differs from the tree of the first process. `described` then describes
    that tree.
    """

    save_id: str = ""
    path: str = ""
    token: str = ""
    elsewhere: list[int] = []
    differing: list[int] = []
    described: str = ""


def _described(save: Save) -> tuple[Brought, list[str]]:
    """Describe everything that must be the same in all processes, with one line for each leaf."""
    assert save.compared
    how = {name: getattr(save.options, name) for name in ("max_chunk_bytes", "compression", "ocdbt")}
    call = f"saves the prefix {save.prefix!r} as {save.kind} with {how | {'write_index': save.has_index}}"
    lines = [
        f"{s.name}: {s.dtype}{list(s.shape)} of {s.home}"
        + (f", keys of {s.key}" if s.key else "")
        + (f", {s.sharding.spec} on {s.sharding.mesh}" if s.sharding else "")
        for s in save.sources
    ]
    lines += [f"{name}: {json}"[:_MOST_SHOWN] for name, json in save.entry.raw_values.items()]
    for source in save.compared.replicas:
        ((box, array),) = source.parts
        lines.append(f"{source.name}: {box_on_host(array, box).tolist()}")
    structure = msgspec.json.encode(msgspec.json.decode(save.entry.structure), order="sorted")
    values = msgspec.json.encode(save.entry.raw_values, order="sorted")
    save.compared.own.update(msgspec.json.encode(save.entry.raw_metadata, order="sorted"))
    text = "\n".join(lines).encode(errors="replace")
    tree = xxh3_128_of([text, structure + values])
    return Brought(call, tree, save.compared.own.hexdigest()), lines


def _mention(others: Sequence[str], first: str) -> None:
    if others:
        logger.warning(
            "%s and %d more differ from %s in values that each process has for itself: numpy arrays, arrays on its own "
            "devices, metadata. The values of %s are stored; SaveOptions(processes=) saves from one process alone",
            others[0], len(others) - 1, first, first,
        )  # fmt: skip


def _differences(mine: Sequence[str], first: Sequence[str]) -> list[str]:
    if sum(map(len, first)) + len(first) > _MOST_DESCRIBED:  # the description was cut in its last line
        first = first[:-1]
        mine = mine[: len(first)]
    here, there = dict.fromkeys(mine), dict.fromkeys(first)
    problems = [f"only in this process: {line}" for line in here if line not in there]
    problems += [f"only in the first process: {line}" for line in there if line not in here]
    return problems or [
        "the leaves that were compared are the same; other leaves, the containers or the order differ"
    ]


_encode = msgspec.msgpack.Encoder().encode
_decode_brought = msgspec.msgpack.Decoder(Brought).decode
_decode_agreed = msgspec.msgpack.Decoder(Agreed).decode
_decode_receipt = msgspec.msgpack.Decoder(Receipt).decode
