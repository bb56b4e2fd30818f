"""Say what a load took from a checkpoint, and what it did not."""

from __future__ import annotations

from dataclasses import dataclass

from eformer._engine.record.text import count, few, glance


@dataclass(frozen=True, slots=True)
class LoadReport:
    """List the leaves of a load by name, and where each came from.

    loaded      leaves from the checkpoint
    kept        leaves that the checkpoint lacks, and that are those of `like`
    left_out    leaves of the checkpoint that `like` lacks, or that a rule leaves out
    resized     loaded leaves that `resize` brought to the shape in `like`
    code        functions, which a checkpoint does not hold, and that are those of `like`
    """

    loaded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        parts = [f"{count(len(self.loaded), 'leaf', 'leaves')} loaded"]
        if self.resized:
            parts.append(f"{len(self.resized)} of them resized ({few(self.resized)})")
        if self.kept:
            parts.append(f"{len(self.kept)} kept as they were ({few(self.kept)})")
        if self.left_out:
            parts.append(f"{len(self.left_out)} of the checkpoint left out ({few(self.left_out)})")
        if self.code:
            parts.append(f"{len(self.code)} left to the code ({few(self.code)})")
        return ", ".join(parts)
