"""Find the steps of a run: directories whose names end in a number, each a checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from eformer._engine.formats.markers import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.formats.safetensors.names import MANIFEST
from eformer._engine.formats.zarr.index import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eformer._engine.stores.base import Store

_STEP = re.compile(r"(?:(?:step|run|checkpoint|ckpt)[-_]?)?(?P<number>\d{1,18})")

_MARKS = (MANIFEST, INDEX, ORBAX_TREE, ORBAX_CHECKPOINT)


def step_name(number: int) -> str:
    """Return the name that a run gives to a step."""
    return f"step-{number}"


def step_number(name: str) -> int | None:
    """Return the step that a name is of: step-100, step_100, run-100, 100; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match["number"]) if match else None


def steps_in(store: Store) -> list[tuple[int, str]]:
    """List the steps of a run by number and name, the last step last. Reads no manifest.

    A directory without an index, a manifest or the marks of Orbax is not a step: another program made it, or its save
    has not been committed. Where directories appear whole, one that has the name of a step of ours and something else
    in it is damaged, and is listed.
    """
    found: dict[int, str] = {}
    for name in _named_like_steps(store):
        number = step_number(name)
        assert number is not None
        if number not in found or name == step_name(number):
            found[number] = name
    return sorted(found.items())


def _named_like_steps(store: Store) -> Iterable[str]:
    for name, kind in store.kinds().items():
        if kind != "directory" or step_number(name) is None:
            continue
        has_mark = any(store.kind(f"{name}/{mark}") == "file" for mark in _MARKS)
        if has_mark or (store.can_rename and _is_ours(name) and _has_files(store, name)):
            yield name


def _is_ours(name: str) -> bool:
    return name.startswith("step-")


def _has_files(store: Store, name: str) -> bool:
    """Tell whether a directory has more than hidden files, which a save that is under way or dead has there."""
    return any(not inner.startswith(".") for inner in store.kinds(name))
