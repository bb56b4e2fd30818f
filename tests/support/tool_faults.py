"""Tools that change files, and what they have to leave: `prune`, `convert` and `save_to_file`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np

from eformer.checkpoint import convert, prune, save
from eformer.pytree import save_to_file
from support import forkserver
from support.faults import hooked

if TYPE_CHECKING:
    from pathlib import Path

TREE = {"a": np.arange(50.0), "b": {"c": np.ones((3, 3))}}
STEPS = {"step-1", "step-2", "step-3"}


def prepare(tool: str, place: Path) -> Path:
    """Return a folder as it is before the tool is called."""
    folder, source = place / "folder", place / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if tool == "prune":
        for number, step in enumerate(sorted(STEPS)):
            save(TREE, folder / step, format="tensorstore" if number == 1 else "safetensors")
            (folder / f"{step}.scores.json").write_text('{"digest": "", "metrics": {}}')
            save(TREE, folder / f"file-{number}.safetensors")
    elif not source.exists():
        save(TREE, source)
    return folder


def carry_out(tool: str, folder: Path) -> None:
    if tool == "prune":
        prune(folder, keep=1)
        prune(folder, keep=1, pattern="file-*.safetensors")
    elif tool == "save_to_file":
        save_to_file(TREE, str(folder / "state.msgpack"))
    else:
        name = tool.removeprefix("convert to ")
        formats = {"new": "tensorstore", "orbax": "orbax"}  # others have the suffix of theirs
        convert(folder.parent / "source", folder / name, to=formats.get(name))


def result_of(tool: str) -> list[str]:
    """List what is in the folder afterwards."""
    if tool == "prune":
        return ["file-2.safetensors", "step-3", "step-3.scores.json"]
    return ["state.msgpack" if tool == "save_to_file" else tool.removeprefix("convert to ")]


def die_at(at: int, moment: str, tool: str, folder: Path) -> bool:
    """Call the tool in a process that dies before or after one of its calls. Return False if it has fewer."""
    process = forkserver.context().Process(target=_die, args=(at, moment, tool, folder))
    process.start()
    process.join()
    return process.exitcode == 9


def _die(at: int, moment: str, tool: str, folder: Path) -> None:
    with hooked(**{moment: lambda number, _: os._exit(9) if number == at else None}):
        carry_out(tool, folder)
