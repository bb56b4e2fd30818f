"""What every kind of fault has, and what the cases of a worker share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import subjects
from cases import NEW, OLD, REFUSED, VOID, Outcome
from savers import Savers, Strike
from subjects import Scene, Subject, UntidyError, WrongError

if TYPE_CHECKING:
    from pathlib import Path

    from savers import Struck


NOTHING = "no checkpoint"


class Kind:
    """A kind of fault. Layouts and reasons are asked in the program itself, `run` in a worker."""

    name: str
    title: str  # for the table: what happens
    limit = 60.0  # seconds after which a case has hung
    expects = 2.0  # seconds; a case is not begun if less time is left
    for_peers = False

    def layouts(self) -> list[str]:
        return subjects.ours()

    def libraries(self) -> dict[str, str]:
        """Return the layouts for `--peers`, and the environment of each."""
        return subjects.side_by_side()

    def cannot(self, layout: str) -> str:
        """Return why this cannot run here; nothing if it can."""
        return ""

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        raise NotImplementedError


class Bench:
    """A worker's folders and processes, and what its cases need again. `first` is the seed of the first case."""

    def __init__(self, memory: Path, disk: Path) -> None:
        self.memory, self.disk = memory, disk
        self.first = 0
        self.savers, self.others = Savers(), Savers()  # each has one save at a time

    @functools.cache  # noqa: B019  as long as the worker lives
    def scene(self, layout: str) -> Scene:
        """Return a scene in memory: a process that dies does not care what was synced."""
        return Scene.of(subjects.find(layout), self.memory / layout)

    @functools.cache  # noqa: B019
    def count(self, layout: str, *, is_first: bool = False) -> int:
        """Return how many calls of the system a save makes that change the disk."""
        scene = self.scene(layout)
        scene.reset(is_first=is_first)
        struck = self.savers.save(layout, scene.folder, [subjects.NEW], Strike())
        if struck.ending != "returned":
            raise RuntimeError(f"a save that nothing disturbed {struck.ending}: {struck.said}")
        return len(struck.calls)


def judged(subject: Subject, folder: Path, *, is_damaged: bool = False) -> Outcome:
    """Load, and say in a word what is there. If no byte was damaged, every error is a loss."""
    try:
        found = subject.look(folder)
    except WrongError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001  of any library
        note = f"{type(error).__name__}: {error}"[:500]
        if not is_damaged:
            return Outcome("lost", note)
        return Outcome(REFUSED if subject.is_refusal(error, folder) else "crashed", note)
    if found == subjects.NEW:
        return Outcome(NEW)
    if found == subjects.OLD:
        return Outcome(OLD)
    if not found:
        return Outcome(REFUSED if is_damaged else "lost", NOTHING)
    return Outcome("wrong", f"generation {found}")


def after_save(subject: Subject, folder: Path, struck: Struck, *, is_first: bool = False) -> Outcome:
    """Say what a save left that was struck: the old or the new, the new if it returned; then save again.

    If it was the first save, nothing is the old state, and then not even the name of a checkpoint is there.
    """
    where = f"call {len(struck.calls)}, {struck.calls[-1]}: " if struck.calls else ""
    if struck.ending in ("hung", "crashed"):
        return Outcome(struck.ending, where + struck.said)
    outcome = judged(subject, folder)
    if is_first and outcome.note == NOTHING and not subject.has_half(folder):
        outcome = Outcome(OLD, NOTHING)
    if struck.ending == "returned" and outcome.word == OLD:
        return Outcome("lost", f"{where}the save returned and is not there")
    if outcome.is_failure:
        return Outcome(outcome.word, where + outcome.note)
    if not struck.was_struck:
        return Outcome(VOID)
    return cleared(subject, folder, outcome, where)


def cleared(subject: Subject, folder: Path, outcome: Outcome, where: str = "") -> Outcome:
    """Return the outcome if the next save works and leaves nothing but its files."""
    try:
        subject.check_next_save(folder)
    except (Exception, UntidyError) as error:  # noqa: BLE001  of any library
        return Outcome("litter", f"{where}{outcome.word}, then {type(error).__name__}: {error}"[:500])
    return outcome
