"""A run that faults happen to: generation n of its tree is step n, and one step is kept."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from eformer import checkpoint
from eformer._engine.saving import commit as _record
from eformer._engine.saving import write as _writing
from support.faults import NOTHING, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MARKS = (
    "manifest.json",
    "tensorstore_index.json",
)  # what a reader looks for who knows nothing but our formats


def begun(path: Any, **arguments: Any) -> checkpoint.Run:
    """Return a run that saves among the steps of earlier jobs, without the loads of a resume, after which one stays."""
    run = checkpoint.Run(path, signals=(), **arguments)
    run._refuse_steps = lambda there: None
    if there := checkpoint.steps(path) if os.path.isdir(path) else ():
        run._main._base = (there[-1].number, there[-1].path)  # whose files the first save may link
    return run


@dataclass(frozen=True)
class RunLayout(Layout):
    """A run, as a layout of the same methods. Every generation is a step."""

    def run(self, folder: Path, keep: int | None = 1) -> checkpoint.Run:
        options = checkpoint.SaveOptions(threads=2, max_shard_bytes=self.max_shard_bytes)
        return begun(self.path(folder), keep=keep, format=self.format, options=options)

    def save(self, folder: Path, generation: int, how: Callable[..., Any] | None = None) -> Any:
        with self.pieces(), self.run(folder) as run:
            run.save(generation, self.tree(generation), metrics={"loss": generation})

    def save_more(self, folder: Path, generations: range) -> None:
        """Save steps that all stay."""
        with self.pieces(), self.run(folder, None) as run:
            for generation in generations:
                run.save(generation, self.tree(generation))

    @contextmanager
    def pieces(self) -> Iterator[None]:
        with (
            mock.patch.object(_record, "PIECE_BYTES", self.piece_bytes),
            mock.patch.object(_writing, "_WRITE_BYTES", self.piece_bytes),
        ):
            yield

    def generation(self, folder: Path) -> int:
        """Return the step that every way to look at a run finds last; check that all of them are whole."""
        from support.trees import assert_same  # late: forked processes do not need it

        path = self.path(folder)
        listed = [step.number for step in checkpoint.steps(path)] if path.is_dir() else []
        for number in listed:
            assert_same(checkpoint.load(path / f"step-{number}"), self.tree(number))
        assert sorted(seen_by_glob(path)) == listed
        assert [step.number for step in checkpoint.follow(path, poll=0, timeout=0)] == listed
        last = listed[-1] if listed else NOTHING
        assert checkpoint.latest(path) == (str(path / f"step-{last}") if last else None)
        return last

    def check_tidy(self, folder: Path) -> None:
        """Check that the run has nothing but its steps, all sound, and the last one only what its manifest names."""
        path = self.path(folder)
        names = {f"step-{step.number}" for step in checkpoint.steps(path)}
        assert set(os.listdir(path)) - {"removed-steps.jsonl"} == {"run.json", *names}
        for name in names:
            assert checkpoint.verify(path / name).ok
        assert not [name for name in os.listdir(checkpoint.latest(path)) if name.startswith(".")]


def seen_by_glob(path: Path) -> list[int]:
    """List the steps as a program does that only knows names."""
    return [
        int(step.name.removeprefix("step-"))
        for step in path.glob("step-*")
        if step.name.removeprefix("step-").isdecimal() and any((step / mark).is_file() for mark in MARKS)
    ]


RUNS = [
    RunLayout("files", piece_bytes=1024),
    RunLayout("arrays", format="tensorstore", piece_bytes=1024),
]


def several_files(layout: RunLayout) -> RunLayout:
    return replace(layout, max_shard_bytes=4096)


# --------------------------------------------------------------------------------- other processes


def tree_of(number: int) -> dict[str, Any]:
    return {"number": number, "w": np.full(200, number, np.float32)}


def write_steps(path: str, first: int, last: int, keep: int, fmt: str = "safetensors") -> None:
    """Save steps one after the other; to be called in a process of its own."""
    with begun(path, every=1, keep=keep, format=fmt) as run:
        for number in range(first, last + 1):
            run.after(number, tree_of(number))


def hold_for_ever(path: str, ready: str) -> None:
    """Hold the last step and note the path by which it can be read."""
    with checkpoint.steps(path)[-1].hold() as held, open(f"{ready}.new", "w") as file:
        file.write(held)
        file.close()
        os.rename(f"{ready}.new", ready)
        signal.pause()


def save_slowly(path: str, number: int, keep: int, ready: str, go_on: str) -> None:
    """Save a step that is written and not committed before the file `go_on` is there."""

    class Slow:
        def __float__(self) -> float:
            open(ready, "w").close()
            while not os.path.exists(go_on):
                time.sleep(0.005)
            return 1.0

    with begun(path, keep=keep) as run:
        run.save(number, tree_of(number), metrics={"slow": Slow()})
        with open(f"{go_on}.error", "w") as said:
            said.write(type(run._last.pending.exception()).__name__)
        run._last.pending = None
