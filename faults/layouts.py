"""The layouts of eformer, as the tests of faults have them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subjects import Subject, UntidyError, WrongError

from eformer.checkpoint import verify
from eformer.errors import EformerError
from support.faults import DATABASE, LAYOUTS, NEXT, Layout, prepare_to_fork
from support.run_faults import RUNS

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OURS", "prepare_to_fork"]


@dataclass(frozen=True)
class Ours(Subject):
    layout: Layout

    @property
    def title(self) -> str:  # type: ignore[override]
        return self.layout.title

    def begin(self, folder: Path) -> Path:
        return self.layout.begin(folder)

    def save(self, folder: Path, generation: int) -> None:
        self.layout.save(folder, generation)

    def look(self, folder: Path) -> int:
        try:
            return self.layout.generation(folder)
        except AssertionError as error:
            raise WrongError(str(error)[:500] or "other values") from error

    def has_half(self, folder: Path) -> bool:
        return not self.layout.prefix and os.path.lexists(self.layout.path(folder))

    def verify(self, folder: Path) -> bool:
        try:
            return bool(verify(self.layout.path(folder)).ok)
        except (EformerError, OSError):
            return False

    def check_next_save(self, folder: Path) -> None:
        super().check_next_save(folder)
        try:
            self.layout.check_tidy(folder)
        except AssertionError as error:
            raise UntidyError(str(error)[:500]) from error

    def is_refusal(self, error: BaseException, folder: Path) -> bool:
        """Tell whether it is an error of eformer, or of the system, that says where: the path, a file or a leaf."""
        places = [self.layout.name, "leaf '", *(file.name for file in self.files(folder))]
        return isinstance(error, EformerError | OSError) and any(place in str(error) for place in places)


OURS = {layout.title: Ours(layout) for layout in (*LAYOUTS, DATABASE)}
OURS |= {f"run of {layout.title}": Ours(layout) for layout in RUNS}
assert NEXT == 3
