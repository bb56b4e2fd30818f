"""Carry out a conversion or a merge by several processes, or by independent jobs of a part each.

Tests: tests/engine/tools/test_parts.py, tests/multihost/test_conversions.py, tests/multihost/test_merges.py.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.processes.crew import announced
from eformer._engine.record.division import parse_part
from eformer._engine.record.text import few
from eformer._engine.saving.in_parts import (
    Division,
    SaveOfParts,
    encode_receipt,
    planned,
    take_receipts,
    write_part,
)
from eformer._engine.saving.staging import Staging
from eformer._engine.stores.parts import Parts, PartsPlan
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.progress import metered
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer._engine.processes.crew import Crew
    from eformer._engine.record.division import Portion
    from eformer._engine.record.planned import Source
    from eformer._engine.saving.in_parts import OwnPart, PlannedTree
    from eformer._engine.tasks.progress import Progress

VISIBLE_WITHIN = 10.0  # seconds that a file may take to appear on other machines of a network file system


@dataclass(frozen=True, slots=True)
class How:
    """How to divide a conversion: among the processes of a crew, or in parts that jobs write and one job commits."""

    crew: Crew | None = None
    part: Portion | None = None
    commit: bool = False

    @classmethod
    def of(cls, crew: Crew | None = None, part: str | None = None, commit: bool = False) -> How:
        """Parse the arguments of a call. Raise ValueError if they exclude each other."""
        if part is not None and commit:
            raise ValueError("part= and commit= are two calls: write all parts, then commit")
        if crew is not None and (part is not None or commit):
            raise ValueError(
                f"part= and commit= are for independent jobs, and {crew.count} processes run this command together; "
                "leave them out, or pass --process 0/1 to run each process alone"
            )
        return cls(crew, None if part is None else parse_part(part), commit)


@dataclass(slots=True)
class DividedWork:
    """A conversion to a new checkpoint at `where`, a path or the URL of a bucket, that parts write to.

    identity       the same text for the same conversion: parts of two conversions are never mixed
    saves          one for each tree, which every part plans alike
    budget         the bytes of elements that may be in memory
    require_free   raises if the destination is taken, or the disk too small for so many bytes
    small_leaves   reads small leaves together: given sources, returns ready ones by name
    commit         makes the destination with these saves
    """

    where: Path | str
    identity: str
    saves: Sequence[SaveOfParts]
    budget: int
    require_free: Callable[[int], None]
    small_leaves: Callable[[Sequence[Source]], Mapping[str, Source]]
    commit: Callable[[], None]
    trees: list[PlannedTree] = field(default_factory=list)

    @property
    def parts(self) -> Parts:
        assert isinstance(self.where, Path)
        return Parts(self.where)

    def plan(self, count: int) -> PartsPlan:
        return PartsPlan(self.identity, count, len(self.saves))

    def lay_out(self) -> None:
        self.trees = [planned(save) for save in self.saves]
        for number, (save, tree) in enumerate(zip(self.saves, self.trees, strict=True)):
            save.number, save.tree = number, tree
            if isinstance(self.where, Path):
                save.parts = self.parts
            save.small_leaves = self.small_leaves

    def end_turns(self) -> None:
        """Let later saves of this process to the same path begin."""
        for save in self.saves:
            save.turn.end()


def convert_part(work: DividedWork, part: Portion, progress: Progress) -> None:
    """Write one part of a conversion, as one of several independent jobs. Nothing is visible at the destination."""
    try:
        work.require_free(0)
        work.lay_out()
        own = Division(work.trees).own(part)
        work.require_free(own.nbytes)
        work.parts.begin(work.plan(part.count))
        _write_own(work, part, own, progress)
    finally:
        work.end_turns()


def commit_parts(work: DividedWork) -> None:
    """Make the destination from all parts."""
    try:
        work.require_free(0)
        plan = work.parts.plan()
        if plan is None:
            raise FileNotFoundError(
                f"{work.where} has no parts that could be committed; write them first, with part=I/N for each I"
            )
        work.parts.require(work.plan(plan.parts), plan)
        work.lay_out()
        _commit(work, plan.parts)
    finally:
        work.end_turns()


def convert_together(work: DividedWork, crew: Crew, progress: Progress) -> None:
    """Write a part in each process of a crew; the first process commits."""
    hosts = crew.hosts(f"converts to {work.where}")
    try:
        with announced(hosts), crew.watched(hosts, progress, "converting") as report:
            work.lay_out()
            hosts.meet(work.identity.encode(), partial(_begin, work, crew))
            _wait_until(lambda: work.parts.plan() == work.plan(crew.count), _not_shared(work))
            own = Division(work.trees).own(crew.part)
            _write_own(work, crew.part, own, report)
            hosts.meet(b"", lambda _: _commit(work, crew.count))
        hosts.end()
    finally:
        work.end_turns()


def convert_to_bucket(work: DividedWork, crew: Crew, progress: Progress) -> None:
    """Write whole files from each process to one upload for each tree; the first process commits. An error withdraws
    all objects."""
    hosts = crew.hosts(f"converts to {work.where}")
    try:
        with announced(hosts), crew.watched(hosts, progress, "converting") as report, ExitStack() as stack:
            told = hosts.meet(work.identity.encode(), partial(_begin_uploads, work, stack))
            for save, (save_id, token) in zip(work.saves, msgspec.msgpack.decode(told), strict=True):
                if not crew.is_first:
                    save.join(save_id, token)
                    stack.callback(save.upload.close)
            work.lay_out()
            own = Division(work.trees).own_files(crew.part)
            with metered(report, own.nbytes, "converting") as meter:
                for save in work.saves:
                    save.write_objects(own, Staging(work.budget), meter)
            hosts.meet(encode_receipt(own), partial(_commit_uploads, work))
        hosts.end()
    finally:
        work.end_turns()


def _begin_uploads(work: DividedWork, stack: ExitStack, messages: Sequence[bytes]) -> bytes:
    _require_same(messages)
    work.require_free(0)
    for save in work.saves:
        save.format = save.new_format()
        save.prepare(stack)
        save.upload.announce()
    return msgspec.msgpack.encode([(save.entry.save_id, save.upload.token) for save in work.saves])


def _commit_uploads(work: DividedWork, receipts: Sequence[bytes]) -> bytes:
    if lacking := take_receipts(work.trees, receipts):
        raise ProcessError(f"{work.where}: the processes have not written {few(lacking)}; convert again")
    for save in work.saves:
        save.commit_objects()
    return b""


def alone_for_all(carry_out: Callable[[Progress], None], crew: Crew, progress: Progress, doing: str) -> None:
    """Let the first process do what cannot be divided, while all others wait."""
    hosts = crew.hosts(doing)
    with announced(hosts), crew.watched(hosts, progress, "converting") as report:

        def answer(_: Sequence[bytes]) -> bytes:
            carry_out(report)
            return b""

        hosts.meet(b"", answer)
    hosts.end()


def _begin(work: DividedWork, crew: Crew, messages: Sequence[bytes]) -> bytes:
    _require_same(messages)
    work.require_free(sum(file.nbytes for tree in work.trees for file in tree.files))
    work.parts.begin_again(work.plan(crew.count))
    return b""


def _require_same(messages: Sequence[bytes]) -> None:
    if others := [number for number, text in enumerate(messages) if text != messages[0]]:
        raise ProcessError(
            f"the processes convert different things: process {few(list(map(str, others)))} sees another source or has "
            "other arguments than process 0. All need the same files and the same command"
        )


def _not_shared(work: DividedWork) -> str:
    return (
        f"{work.parts.path}, which process 0 has made, is not visible here. All processes must write to one file "
        "system that they share"
    )


def _wait_until(is_there: Callable[[], Any], problem: str) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not is_there():
        if time.monotonic() > deadline:
            raise ProcessError(problem)
        time.sleep(0.05)
        interrupts.check()


def _write_own(work: DividedWork, part: Portion, own: OwnPart, progress: Progress) -> None:
    parts = work.parts
    with parts.locked(), parts.writing(part.number), metered(progress, own.nbytes, "converting") as meter:
        write_part(parts, work.trees, part, own, Staging(work.budget), meter, work.small_leaves)


def _commit(work: DividedWork, count: int) -> bytes:
    """Commit all parts, which nobody writes to meanwhile."""
    parts = work.parts
    with parts.locked(alone=True):
        receipts = [parts.receipt(number) for number in range(count)]
        if missing := [number for number, data in enumerate(receipts) if data is None]:
            raise FileNotFoundError(
                f"{len(missing)} of {count} parts of {work.where} are missing: {few(list(map(str, missing)))}; write "
                "them, then commit again"
            )
        lacking = take_receipts(work.trees, [data for data in receipts if data is not None])
        if lacking:
            raise ProcessError(
                f"{parts.path}: the receipts lack digests of {few(lacking)}; remove the directory and convert again"
            )
        work.commit()
        parts.remove()
    return b""
