"""Several processes make one checkpoint: they agree on what to write and where, each writes, the first one seals.

That is two meetings. What is large never goes through them: who wrote which bytes, with which digests, lies with the
bytes (`Part`), and the first process only hears under which names.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from eformer._engine.processes.hosts import LostError
from eformer._engine.record.digests import xxh3_128_of
from eformer._engine.record.manifest import Receipt
from eformer.errors import MismatchError, ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from eformer._engine.processes.hosts import Hosts

logger = logging.getLogger("eformer")

# How long a new directory may take to appear on the other hosts of a network file system.
VISIBLE_WITHIN = 10.0

# A tree that differs is described to the process that has it: so many characters of it.
_MOST_DESCRIBED = 2**24


# ------------------------------------------------------------------------------------------ agreement


class Brought(Struct):
    """What a process brings to the first meeting: what it is about to do, a digest of its tree, and one of what it has
    for itself."""

    what: str
    tree: str
    own: str


class Agreed(Struct):
    """What all go by: under which name they write and where; which leaves the first process does not have.

    `differing` are processes whose tree is not that of the first, whose own is then described.
    """

    save_id: str = ""
    path: str = ""
    scratch: str = ""
    elsewhere: list[int] = []
    differing: list[int] = []
    described: str = ""


class SaveSummary(Struct):
    """What a process is about to do: one line for each leaf, the structure, and a digest of what it has for itself."""

    what: str
    leaves: list[str]
    structure: bytes
    own: str


def agree(hosts: Hosts, make_plan: Callable[[], SaveSummary], propose: Callable[[], Agreed]) -> Agreed:
    """What the first process proposes, once all are about to save the same tree in the same way.

    A process whose tree is another one raises a MismatchError that names the leaves; all others say which it is. What
    each has for itself may differ, but not without a word.
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
            context=f"{hosts.name(hosts.index)} saves another tree than {hosts.name(0)}",
        )
    if agreed.differing:
        others = ", ".join(map(hosts.name, agreed.differing[:20]))
        raise ProcessError(
            f"{others} saves another tree than {hosts.name(0)}, and says where they differ; nothing was written"
        )
    return agreed


def _mention(others: Sequence[str], first: str) -> None:
    if others:
        logger.warning(
            "%s and %d more have other numbers than %s where each process has its own: numpy arrays, arrays on its own "
            "devices, metadata. Stored is what %s has; SaveOptions(processes=) saves from one process alone",
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
    if sum(map(len, first)) + len(first) > _MOST_DESCRIBED:  # there was more, and the last line is cut
        first = first[:-1]
        mine = mine[: len(first)]
    here, there = dict.fromkeys(mine), dict.fromkeys(first)
    problems = [f"here there is {line}, in the first process not" for line in here if line not in there]
    problems += [f"in the first process there is {line}, here not" for line in there if line not in here]
    return problems or [
        "the leaves are the same, as far as they were compared; what holds them, or their order, is not"
    ]


def require_visible(path: Path, agreed: Agreed, is_there: Callable[[Path], bool]) -> None:
    """Refuses a directory that is not the one the first process sees. A network file system may need a moment."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not is_there(path / agreed.scratch):
        if time.monotonic() > deadline:
            raise ProcessError(
                f"{path} is not the directory that the first process saves to ({agreed.path}): what that one has made "
                f"there, {agreed.scratch}, is not to be seen here. Several processes save to one directory, on a file "
                "system that all of them share"
            )
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------- commit


def commit(
    hosts: Hosts,
    write: Callable[[], Receipt],
    seal: Callable[[Receipt], None],
    is_sealed: Callable[[], bool],
) -> None:
    """Every process writes; the first one seals what all have written. An error anywhere is an error everywhere.

    `is_sealed` tells whether an error of the seal came before or after its point of no return.
    """
    if hosts.count == 1:
        seal(write())
        return
    try:
        receipt = write()
    except BaseException as error:
        first = hosts.fail(error, after_all=True)
        # The first one takes the place away that all write to: then its error is the one that matters.
        if first and isinstance(error, FileNotFoundError):
            raise ProcessError(f"{_NOTHING}: {first}") from error
        raise

    def answer(messages: Sequence[bytes]) -> bytes:
        whole = joined([_decode_receipt(message) for message in messages])
        try:
            seal(whole)
        except BaseException as error:
            raise _SealError(
                f"{_IN_PLACE if is_sealed() else _NOTHING}: {hosts.name(0)}: {error!r}", error
            ) from error
        return b""

    try:
        hosts.meet(_encode(receipt), answer)
    except _SealError as error:
        if isinstance(error.cause, FileNotFoundError):
            error.cause.add_note("a process that stops waiting for the others takes away what it has written")
        raise error.cause from None
    except (ProcessTimeoutError, LostError) as error:
        if hosts.index:
            error.add_note("whether the save was committed is not known here; the directory says so")
        raise
    except ProcessError as error:
        is_said = str(error).startswith((_IN_PLACE, _NOTHING))
        raise ProcessError(str(error) if is_said else f"{_NOTHING}: {error}") from error
    finally:
        hosts.end()


_NOTHING = "the save failed, nothing was committed"
_IN_PLACE = "the save failed after the new tree was put in place, which may not be on stable storage"


class _SealError(ProcessError):
    """What the others hear of an error of the first process."""

    def __init__(self, text: str, cause: BaseException) -> None:
        super().__init__(text)
        self.cause = cause


def joined(receipts: Sequence[Receipt]) -> Receipt:
    """All files, in the order of the processes, and all leaves that the receipts name."""
    whole = Receipt()
    for receipt in receipts:
        whole.files += receipt.files
        whole.leaves |= receipt.leaves
        whole.weight = (whole.weight + receipt.weight) % 2**64
        whole.is_torn |= receipt.is_torn
    return whole


_encode = msgspec.msgpack.Encoder().encode
_decode_brought = msgspec.msgpack.Decoder(Brought).decode
_decode_agreed = msgspec.msgpack.Decoder(Agreed).decode
_decode_receipt = msgspec.msgpack.Decoder(Receipt).decode
