"""What faults happen to: every layout of eformer, and checkpoint libraries side by side, behind one interface."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW, NEXT = 1, 2, 3


class WrongError(Exception):
    """A load gave something that was never saved."""


class UntidyError(Exception):
    """A save that nothing disturbed failed, or left something behind."""


class Subject:
    """A way to save trees of a generation to a folder, alone in it, one over the other."""

    title: str
    environment = "own"  # where it is installed: "own", "peers" or "original"

    def begin(self, folder: Path) -> Path:
        """Make the folder as it is before the first save."""
        folder.mkdir()
        return folder

    def save(self, folder: Path, generation: int) -> None:
        raise NotImplementedError

    def look(self, folder: Path) -> int:
        """Load; return the generation of what is there. Raise `WrongError` if it is none, and errors of the load."""
        raise NotImplementedError

    def has_half(self, folder: Path) -> bool:
        """Tell whether the name of a checkpoint is there although it cannot be loaded."""
        return False

    def verify(self, folder: Path) -> bool:
        """Tell whether a check of everything that is stored finds nothing wrong; False if there is no such check."""
        return False

    def check_next_save(self, folder: Path) -> None:
        """Check that an undisturbed save works, and removes what a disturbed one left."""
        self.save(folder, NEXT)
        if self.look(folder) != NEXT:
            raise UntidyError("the next save is not there")

    def files(self, folder: Path) -> list[Path]:
        return [file for file in sorted(folder.rglob("*")) if file.is_file()]

    def is_refusal(self, error: BaseException, folder: Path) -> bool:
        """Tell whether a load may fail like this on damaged bytes."""
        return isinstance(error, Exception)


@dataclass(frozen=True)
class Scene:
    """A folder that can be reset any number of times to what was there before the save."""

    subject: Subject
    folder: Path
    template: Path

    @classmethod
    def of(cls, subject: Subject, place: Path) -> Scene:
        place.mkdir(parents=True, exist_ok=True)
        template = subject.begin(place / "template")
        subject.save(template, OLD)
        return cls(subject, place / "folder", template)

    def reset(self, *, is_first: bool = False) -> None:
        """Restore what was there before the save; nothing if it is the first one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if is_first:
            self.subject.begin(self.folder)
        else:
            shutil.copytree(self.template, self.folder)


def ours() -> list[str]:
    """Return the titles of eformer's own layouts."""
    return [
        "one data file",
        "several data files",
        "single file",
        "second prefix",
        "arrays",
        "arrays, synced at once",
        "kept data files",
        "kept arrays",
        "database",
    ]


def runs() -> list[str]:
    """Return the titles of runs, whose steps come and go: the last one is kept."""
    return ["run of files", "run of arrays"]


def side_by_side() -> dict[str, str]:
    """Return the environment of each library that `--peers` compares, by its title."""
    import libraries

    return {title: kind.environment for title, kind in libraries.LIBRARIES.items()}


@functools.cache
def find(title: str) -> Subject:
    import libraries

    if library := (libraries.LIBRARIES | libraries.CONTROLS).get(title):
        return library()
    import layouts

    return layouts.OURS[title]


def prepare_to_fork() -> None:
    """Import what saves need, and start nothing."""
    import libraries

    environment = os.environ.get("FAULTS_ENVIRONMENT", "own")
    libraries.import_all(environment)
    if environment == "own":
        import layouts

        layouts.prepare_to_fork()
