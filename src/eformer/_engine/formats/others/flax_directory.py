"""Directories of flax: of `flax.training.checkpoints`, before it used Orbax, and models of Hugging Face.

checkpoint_9, checkpoint_10     a tree in msgpack for each step; the last one is read
flax_model.msgpack              a model

Tests: tests/compat/test_flax_directories.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.others import flax, orbax
from eformer._engine.formats.others.single_file import read_file
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.formats.steps import RUN_FILE
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.step_names import OF_FLAX
from eformer._engine.stores.local import on_disk
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection

    from eformer._engine.formats.found import Found, Place
    from eformer._engine.stores.base import Store

MODEL = "flax_model.msgpack"
_INDEX = f"{MODEL}.index.json"


def by_steps(place: Place) -> Found | None:
    """Find the last step of a directory of `flax.training.checkpoints`, if the step is a file.

    Return None if the step is a directory, which is Orbax's, or if the directory is a checkpoint itself. Refuse a link.
    """
    store = place.store
    steps = OF_FLAX.numbers(place.names)
    if not steps or MANIFEST in place.names or any(name.endswith(SUFFIX) for name in place.names):
        return None
    last = max(steps, key=lambda name: steps[name])
    directory = on_disk(store)
    if directory is not None and (orbax.marks(directory) or (directory / last).is_dir()):
        return None
    kind = store.kind(last)
    if kind == "other":
        raise FormatError(
            f"{store.path_to(last)} is a link; pass the path that it leads to if it is the step to read"
        )
    return _open(store, last) if kind == "file" else None


def later_in(store: Store, number: int, names: Collection[str]) -> str | None:
    """Name flax's newest step that is a file, among the `names` in a directory, if it is later than step `number`. In a
    directory that a job has claimed as a run, only the steps of the run count, so return None."""
    own = OF_FLAX.numbers(names) if RUN_FILE not in names else {}
    later = sorted((name for name in own if own[name] > number), key=own.__getitem__, reverse=True)
    return next((name for name in later if store.kind(name) == "file"), None)


def by_model(place: Place) -> Found | None:
    """Find the model of a directory in a file of flax. Refuse a model in several files."""
    store = place.store
    if MODEL in place.names:
        found = _open(store, MODEL)
        left = partial(left_out, store, {MODEL})
        return replace(found, path=store.url, foreign=replace(found.foreign, find_left_out=left))
    if _INDEX in place.names:
        raise FormatError(
            f"{store.path_to(_INDEX)} is the index of a flax model in several files, which eformer cannot read; save "
            "the model as safetensors with transformers"
        )
    return None


def _open(store: Store, name: str) -> Found:
    return read_file(store, name, "a file of flax, a tree in msgpack", flax.in_msgpack)
