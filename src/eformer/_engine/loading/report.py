"""Say what a load took from a checkpoint, and what it did not."""

from __future__ import annotations

from dataclasses import dataclass

from eformer._engine.record.text import few, glance


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of the leaves of a load, by name.

    loaded      come from the checkpoint
    kept        the checkpoint lacks them: they stay as `like` has them
    left_out    the checkpoint has them, `like` does not, or a rule leaves them out
    resized     loaded, and brought to the shape in `like` by `resize`
    code        functions, which no checkpoint holds: they stay as `like` has them
    """

    loaded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        parts = [f"{len(self.loaded):,} {'leaf' if len(self.loaded) == 1 else 'leaves'} loaded"]
        if self.resized:
            parts.append(f"{len(self.resized)} of them resized ({few(self.resized)})")
        if self.kept:
            parts.append(f"{len(self.kept)} kept as they were ({few(self.kept)})")
        if self.left_out:
            parts.append(f"{len(self.left_out)} of the checkpoint left out ({few(self.left_out)})")
        if self.code:
            parts.append(f"{len(self.code)} left to the code ({few(self.code)})")
        return ", ".join(parts)
