"""The files of a directory that a reader leaves out, though they may hold leaves.

A reader of another writer's directory names the files and directories that it reads. Every other file below the
directory is left out, unless it is hidden, belongs to a checkpoint of ours in a directory of its own, or has a name
that is known to hold no leaves, such as README.md, config.json or tokenizer.model.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from eformer._engine.formats.safetensors.names import MANIFEST
from eformer._engine.formats.zarr.index import INDEX
from eformer._engine.formats.zarr.zarray import ZARRAY
from eformer._engine.record.digests import has_own_digest
from eformer._engine.stores.local import read_range_of
from eformer._engine.stores.ocdbt import MANIFEST as DATABASE
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet
    from pathlib import Path

_ZARR3 = "zarr.json"
_MOST_DEPTH = 100

_WITHOUT_LEAVES = (
    "*.json", "*.jsonl", "*.md", "*.rst", "*.txt", "*.text", "*.log", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.ini",
    "*.gin", "*.pbtxt", "*.csv", "*.tsv", "*.html", "*.xml", "*.py", "*.sh", "*.ipynb", "*.jinja", "*.lock", "*.sha256",
    "*.md5", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4",
    "README", "LICENSE", "LICENSE.*", "LICENCE", "LICENCE.*", "NOTICE", "NOTICE.*", "COPYING", "USE_POLICY*",
    "tokenizer.model*", "spiece.model", "sentencepiece*.model", "*.spm", "*.tiktoken", "vocab", "vocab.*", "merges.*",
    "training_args.bin", "events.out.tfevents.*", "_SUCCESS",
)  # fmt: skip


def left_out(directory: Path, read: AbstractSet[str]) -> tuple[str, ...]:
    """List what is left out by its path below `directory`, a directory of arrays as a whole with a slash at its end.

    `read` has paths, too; of a directory in it all is read.
    """
    return tuple(sorted(_unread(directory, read)))


def _unread(directory: Path, read: AbstractSet[str]) -> Iterator[str]:
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        try:
            with os.scandir(directory / path) as scan:
                entries = {entry.name: entry for entry in scan}
        except OSError:  # nobody knows what is in there
            yield f"{path}/"
            continue
        if path and is_checkpoint(directory / path):
            continue
        is_array = path and entries.keys() & {ZARRAY, _ZARR3, DATABASE}
        if is_array and not any(name.startswith(f"{path}/") for name in read):
            yield f"{path}/"
            continue
        for name, entry in entries.items():
            below = f"{path}/{name}" if path else name
            if name.startswith(".") or below in read:
                continue
            if not entry.is_dir(follow_symlinks=False):
                if may_hold_leaves(name):
                    yield below
            elif depth < _MOST_DEPTH:
                todo.append((below, depth + 1))
            else:
                yield f"{below}/"


def may_hold_leaves(name: str) -> bool:
    return name == _ZARR3 or not any(fnmatchcase(name, pattern) for pattern in _WITHOUT_LEAVES)


def is_checkpoint(directory: Path) -> bool:
    """Tell whether the directory is a checkpoint of its own, by an index or a manifest of ours."""
    try:
        return (directory / INDEX).is_file() or has_own_digest(
            read_range_of(directory / MANIFEST, _BEGINNING)
        )
    except (OSError, FormatError):
        return False


_BEGINNING = 2**10
