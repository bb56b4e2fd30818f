"""Describe a tree in memory as a checkpoint, so that tools read its leaves as they read files.

Each box of an array on one device is a file. On accelerators, one box at a time is copied to the host. A tree that
lies in several processes goes through the store.

Tests: tests/engine/tools/test_export.py, tests/multihost/test_export.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.formats.found import Foreign, Found, foreign_found
from eformer._engine.processes.hosts import Hosts, meeting
from eformer._engine.record.boxes import Box, straight
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.indexes import MEMORY
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, foreign_tree
from eformer._engine.record.options import SaveOptions
from eformer._engine.saving.snapshot import snapshot
from eformer._engine.saving.staging import box_on_host
from eformer._engine.saving.start import save
from eformer._engine.stores.checkpoints import remove_checkpoint
from eformer._engine.stores.hub import is_hub_url
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks.forks import Lock
from eformer._engine.trees.flatten import flatten
from eformer.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer._engine.record.planned import ArrayBox, Source


_ON_THE_WAY = ".to-export"  # ends the name of a checkpoint that an export of several processes removes
_MOST_SECONDS = 86_400.0  # that the other processes wait while the first one converts


def found_in_memory(tree: Any, origin: Mapping[str, Any] | None = None) -> Found:
    """Return the leaves of a tree as a checkpoint without digests. Its arrays must not change while it is read."""
    leaves, structure = flatten(tree)
    _require_here(leaves)
    sources, values, _ = snapshot(leaves, SaveOptions(), Hosts(), takes_copies=True)
    boxes: list[tuple[str, ArrayBox]] = []
    entries = {source.name: _entry(source, boxes) for source in sources}
    files = tuple(
        DataFile(str(number), dtype_from_name(dtype).itemsize * box.size)
        for number, (dtype, (box, _)) in enumerate(boxes)
    )
    entry = foreign_tree(files=files, leaves=entries, structure=structure, values=values, origin=origin)
    foreign = Foreign(open_files=lambda _: _Arrays(boxes))
    return foreign_found(MEMORY, LocalStore(MEMORY), MEMORY, {"": entry}, {}, foreign)


def through_store(
    tree: Any, destination: str, origin: Mapping[str, Any] | None, use: Callable[[str], bytes]
) -> bytes:
    """Save a tree of several processes beside the destination, call `use` with its path in the first process, and
    remove it. Return the result in every process."""
    if is_hub_url(destination):
        raise ValueError(
            f"{destination}: several processes cannot upload a tree together; save it, and export the path of the "
            "checkpoint in one process"
        )
    store, name = store_at(destination).parent()
    path = store.path_to(f"{name}{_ON_THE_WAY}")
    save(tree, path, origin=origin)
    with meeting("exports a tree", _MOST_SECONDS) as hosts:

        def answer(_: Sequence[bytes]) -> bytes:
            try:
                return use(path)
            finally:
                remove_checkpoint(store, f"{name}{_ON_THE_WAY}")

        return hosts.meet(b"", answer)


def _require_here(leaves: Mapping[str, Any]) -> None:
    there = [
        name for name, leaf in leaves.items() if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if there:
        raise LeafError(
            f"leaf {there[0]!r} lies partly in other processes; save the tree from all processes, and export the path "
            "of the checkpoint in one of them"
        )


def _entry(source: Source, boxes: list[tuple[str, ArrayBox]]) -> LeafEntry:
    """Describe a leaf, and append its boxes to the files."""
    extents = []
    for box, array in source.boxes:
        region = None if box.shape == source.shape else (box.start, box.stop)
        nbytes = source.itemsize * box.size
        extents.append(Extent(len(boxes), 0, nbytes, "", region))
        boxes.append((source.dtype, (box, array)))
    return source.entry(tuple(extents))


class _Arrays(UnchangingFiles):
    """The bytes of boxes by number. The last box that was copied from a device is kept."""

    def __init__(self, boxes: Sequence[tuple[str, ArrayBox]]) -> None:
        self._boxes = boxes
        self._last: tuple[int, np.ndarray[Any, Any]] | None = None
        self._lock = Lock()

    def nbytes(self, number: int) -> int:
        dtype, (box, _) = self._boxes[number]
        return dtype_from_name(dtype).itemsize * box.size

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        data = self._bytes(number)[offset : offset + len(memory)]
        np.frombuffer(memory, np.uint8)[: len(data)] = data
        return len(data)

    def _bytes(self, number: int) -> np.ndarray[Any, Any]:
        dtype, (box, array) = self._boxes[number]
        with self._lock:
            if self._last is None or self._last[0] != number:
                self._last = None  # two boxes in host memory could be too much
                host = straight(box_on_host(array, Box.whole(box.shape)), dtype)
                self._last = (number, host.reshape(-1).view(np.uint8))
            return self._last[1]
