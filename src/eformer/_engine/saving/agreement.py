"""Let several processes make one checkpoint: they agree on what to write and where, each writes, the first commits.

This takes two meetings. Only small messages are exchanged: the record of which process wrote which bytes, with which
digests, is stored with the bytes (`ProcessRecord`), and only its file names are sent to the first process.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from eformer._engine.processes.hosts import LostError
from eformer._engine.record.digests import xxh3_128_of
from eformer._engine.record.holdings import joined_holdings
from eformer._engine.record.manifest import Receipt
from eformer._engine.saving.commit import commit
from eformer._engine.saving.staging import on_host
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import clearing_up
from eformer.errors import MismatchError, ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack

    import numpy as np

    from eformer._engine.formats.write_format import WriteFormat
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.manifest import LeafEntry
    from eformer._engine.record.planned import Source
    from eformer._engine.saving.run import Save
    from eformer._engine.stores.base import Store, Upload
    from eformer._engine.tasks.progress import Meter

logger = logging.getLogger("eformer")

# Seconds that a new directory may take to appear on the other hosts of a network file system.
VISIBLE_WITHIN = 10.0

# Processes with a different tree are sent this many characters of the description of the first one's.
_MOST_DESCRIBED = 2**24
_MOST_SHOWN = 200  # characters of a plain value in a description


# ------------------------------------------------------------------------------------------ agreement


class Compared:
    """The values that the processes of one save compare with each other.

    Replicas must be the same: if they differ, the processes are at different steps or have diverged, and the checkpoint
    would be a mixture. Arrays that each process has for itself may differ.
    """

    def __init__(self, replicas: Sequence[Source], own: Any) -> None:
        self._replicas, self._own = replicas, own

    def replicas(self) -> list[str]:
        return [f"{source.name}: {_host_copy(source).tolist()}" for source in self._replicas]

    def own(self, more: bytes) -> str:
        self._own.update(more)
        return str(self._own.hexdigest())


def _host_copy(source: Source) -> np.ndarray[Any, Any]:
    ((region, array),) = source.parts
    return on_host(array, region)


class Brought(Struct):
    """The message of a process to the first meeting: its operation, a digest of its tree, and a digest of the values
    that it has for itself."""

    what: str
    tree: str
    own: str


class Agreed(Struct):
    """The answer to the first meeting: the id of the save, the place, the token of the upload to join, and the leaves
    that the first process does not have, by number.

    `differing` lists the processes whose tree differs from that of the first; `described` then describes the latter.
    """

    save_id: str = ""
    path: str = ""
    token: str = ""
    elsewhere: list[int] = []
    differing: list[int] = []
    described: str = ""


class SaveSummary(Struct):
    """The operation of a process: one line for each leaf, the structure, and a digest of the values of its own."""

    what: str
    leaves: list[str]
    structure: bytes
    own: str


def agree(hosts: Hosts, make_plan: Callable[[], SaveSummary], propose: Callable[[], Agreed]) -> Agreed:
    """Return the proposal of the first process, if all processes are about to save the same tree in the same way.

    A process whose tree differs raises a MismatchError that names the leaves; the others raise an error that names the
    process. If only values differ that each process has for itself, a warning is logged.
    """
    plan = make_plan()
    text = "\n".join(plan.leaves)
    brought = Brought(plan.what, xxh3_128_of([text.encode(errors="replace"), plan.structure]), plan.own)

    def answer(messages: Sequence[bytes]) -> bytes:
        all_brought = [_decode_brought(message) for message in messages]
        _require_same(hosts, [b.what for b in all_brought])
        differing = [i for i, b in enumerate(all_brought) if b.tree != brought.tree]
        if differing:
            return _encode(Agreed(differing=differing, described=text[:_MOST_DESCRIBED]))
        _mention([hosts.name(i) for i, b in enumerate(all_brought) if b.own != plan.own], hosts.name(0))
        return _encode(propose())

    agreed = _decode_agreed(hosts.meet(_encode(brought), answer))
    if agreed.differing:
        hosts.end()
    if hosts.index in agreed.differing:
        raise MismatchError(
            _differences(plan.leaves, agreed.described.split("\n")),
            context=f"{hosts.name(hosts.index)} saves a different tree than {hosts.name(0)}",
        )
    if agreed.differing:
        others = ", ".join(map(hosts.name, agreed.differing[:20]))
        raise ProcessError(
            f"{others} saves a different tree than {hosts.name(0)}, see the error there; nothing was written"
        )
    return agreed


def _mention(others: Sequence[str], first: str) -> None:
    if others:
        logger.warning(
            "%s and %d more differ from %s in values that each process has for itself: numpy arrays, arrays on its own "
            "devices, metadata. Those of %s are stored; SaveOptions(processes=) saves from one process alone",
            others[0], len(others) - 1, first, first,
        )  # fmt: skip


def _require_same(hosts: Hosts, whats: Sequence[str]) -> None:
    for index, what in enumerate(whats):
        if what != whats[0]:
            raise ProcessError(
                f"the processes do different things: {hosts.name(0)} {whats[0]}, {hosts.name(index)} {what}; "
                "nothing was written"
            )


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


# ----------------------------------------------------------------------------------------------- team


class Team:
    """The processes of one save, seen from one of them. A single process is a team, too.

    If there are several, `leaves` are those of the tree, in the first process, and `numbers` their numbers, in all.
    """

    def __init__(self, save: Save, agreed: Agreed | None, upload: Upload | None, stack: ExitStack) -> None:
        self.save, self.upload = save, upload
        self._agreed, self._stack = agreed, stack
        save_id = agreed.save_id if agreed else save.tree.save_id
        self.tree = msgspec.structs.replace(save.tree, save_id=save_id)
        self.format = save.format(save_id)
        self.leaves: dict[str, LeafEntry] = {}
        self.numbers: dict[str, int] = {}

    @property
    def is_several(self) -> bool:
        return self.save.hosts.count > 1

    def enter(self, meter: Meter) -> Upload:
        """Begin the upload, or join the one of the first process."""
        save = self.save
        if self._agreed is None:
            self.upload = begin(save.store, self.format)
            self._stack.callback(self.upload.close)
            return self.upload
        own = own_sources(save.sources, save.hosts, self._agreed.elsewhere)
        theirs = (old for old, new in zip(save.sources, own, strict=True) if old is not new)
        meter.add(sum(map(self.format.own_nbytes, theirs)))  # the first process writes these
        save.sources[:] = own
        self.numbers = {source.name: number for number, source in enumerate(own)}
        if self.upload is None:
            self.upload = join(self.format, save.store, self._agreed)
            self._stack.callback(self.upload.close)
        else:
            self.leaves = {source.name: source.entry() for source in save.sources}
        return self.upload

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other processes of an error during the block, so that all of them fail."""
        try:
            yield
        except BaseException as error:
            first = self.save.hosts.fail(error, after_all=True)
            # After an error, the first process removes the upload that all write to: then its error is the cause.
            if first and isinstance(error, FileNotFoundError):
                raise ProcessError(f"{_NOTHING}: {first}") from error
            raise

    def commit(self, receipt: Receipt) -> None:
        """Commit the files of all processes in the first one. An error there is an error everywhere."""
        if not self.is_several:
            commit(self, receipt)
            return
        hosts = self.save.hosts
        try:
            hosts.meet(_encode(receipt), self._commit_all)
        except _CommitError as error:
            if isinstance(error.cause, FileNotFoundError):
                error.cause.add_note("a process that times out waiting for the others removes its files")
            raise error.cause from None
        except (ProcessTimeoutError, LostError) as error:
            if hosts.index:
                error.add_note(
                    "this process does not know whether the save was committed; inspect the directory"
                )
            raise
        except ProcessError as error:
            is_said = str(error).startswith((_IN_PLACE, _NOTHING))
            raise ProcessError(str(error) if is_said else f"{_NOTHING}: {error}") from error
        finally:
            hosts.end()

    def _commit_all(self, receipts: Sequence[bytes]) -> bytes:
        whole = merged([_decode_receipt(receipt) for receipt in receipts])
        try:
            commit(self, whole)
        except BaseException as error:
            done = _IN_PLACE if self.is_committed() else _NOTHING
            raise _CommitError(f"{done}: {self.save.hosts.name(0)}: {error!r}", error) from error
        return b""

    def is_committed(self) -> bool:
        """Tell, after an error, whether the index names the save; True if that cannot be known."""
        with clearing_up():
            return self.format.is_committed(self.save.store, self.tree.save_id)


def gather(save: Save, stack: ExitStack) -> Team:
    """Agree with the other processes on one tree, one id, and one place, which the first process makes."""
    if save.hosts.count == 1:
        return Team(save, None, None, stack)
    uploads: list[Upload] = []

    def propose() -> Agreed:
        fmt = save.format(save.tree.save_id)
        upload = begin(save.store, fmt)
        stack.callback(upload.close)
        upload.announce()
        uploads.append(upload)
        elsewhere = [number for number, source in enumerate(save.sources) if source.owner > 0]
        return Agreed(save.tree.save_id, save.store.url, upload.token, elsewhere)

    agreed = agree(save.hosts, lambda: summary(save), propose)
    return Team(save, agreed, uploads[0] if uploads else None, stack)


def summary(save: Save) -> SaveSummary:
    """Describe everything that must be the same in all processes."""
    assert save.compared
    how = {name: getattr(save.options, name) for name in ("max_chunk_bytes", "compression", "ocdbt")}
    what = f"saves the prefix {save.prefix!r} as {save.kind} with {how | {'write_index': save.has_index}}"
    lines = [
        f"{s.name}: {s.dtype}{list(s.shape)} of {s.home}"
        + (f", keys of {s.key}" if s.key else "")
        + (f", {s.sharding.spec} on {s.sharding.mesh}" if s.sharding else "")
        for s in save.sources
    ]
    values = [f"{name}: {json}"[:_MOST_SHOWN] for name, json in save.tree.raw_values.items()]
    structure = msgspec.json.encode(msgspec.json.decode(save.tree.structure), order="sorted")
    whole = msgspec.json.encode(save.tree.raw_values, order="sorted")
    metadata = msgspec.json.encode(save.tree.raw_metadata, order="sorted")
    lines += values + save.compared.replicas()
    return SaveSummary(what, lines, structure + whole, save.compared.own(metadata))


def begin(store: Store, fmt: WriteFormat) -> Upload:
    """Begin the upload of a save, which makes the place if it has no checkpoint yet. Refuse to replace files that are
    not a checkpoint."""
    return fmt.begin(store, is_first=not fmt.check_place(store))


def join(fmt: WriteFormat, store: Store, agreed: Agreed) -> Upload:
    """Join the upload of the first process; refuse a place that is not the one it sees.

    A network file system may need a moment to show it.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN
    while True:
        try:
            return fmt.begin(store, agreed.token)
        except (FileNotFoundError, NotADirectoryError):
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{store.url} is not the directory that the first process saves to ({agreed.path}): its "
                    f"{agreed.token} is not visible here. Several processes must save to one directory, on a file "
                    "system that all of them share"
                ) from None
            time.sleep(0.05)
            interrupts.check()


def own_sources(sources: Sequence[Source], hosts: Hosts, elsewhere: Sequence[int]) -> list[Source]:
    """Return the sources as this process writes them, once it is known which leaves the first process does not have.

    To the process that holds it, a leaf of one process looks like a leaf that every process has a copy of. Copies are
    written by the first process.
    """
    if not hosts.index:
        return list(sources)
    theirs = set(elsewhere)
    return [
        source if source.owner != hosts.index or number in theirs else _not_ours(source)
        for number, source in enumerate(sources)
    ]


def _not_ours(source: Source) -> Source:
    return msgspec.structs.replace(source, whole=None, parts=(), regions=(), is_first=False)


# --------------------------------------------------------------------------------------------- commit

_NOTHING = "the save failed, nothing was committed"
_IN_PLACE = "the save failed after the new tree was put in place; it may not be on stable storage"


class _CommitError(ProcessError):
    """An error of the commit in the first process, in the words that are sent to the others."""

    def __init__(self, text: str, cause: BaseException) -> None:
        super().__init__(text)
        self.cause = cause


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Merge receipts: all files, in the order of the processes, and all leaves."""
    whole = Receipt()
    for receipt in receipts:
        whole.files += receipt.files
        whole.leaves |= receipt.leaves
        whole.weight = (whole.weight + receipt.weight) % 2**64
        whole.is_torn |= receipt.is_torn
        whole.parts += receipt.parts
    whole.holdings = joined_holdings(receipt.holdings for receipt in receipts)
    return whole


_encode = msgspec.msgpack.Encoder().encode
_decode_brought = msgspec.msgpack.Decoder(Brought).decode
_decode_agreed = msgspec.msgpack.Decoder(Agreed).decode
_decode_receipt = msgspec.msgpack.Decoder(Receipt).decode
