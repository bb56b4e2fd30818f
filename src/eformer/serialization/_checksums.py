"""The documented SHA-256 of arrays: of one in memory, and of those on the disk."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer import checkpoint
from eformer.checkpoint._codec import sha256_of
from eformer.checkpoint._device import is_key
from eformer.checkpoint._leaf import Region
from eformer.checkpoint._ndarray import raw_pieces
from eformer.checkpoint._pieces import pieces
from eformer.checkpoint._pool import default_threads, run_all
from eformer.errors import CorruptionError
from eformer.serialization._keys import dotted
from eformer.serialization._metadata import checksums_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_BYTES_AT_ONCE = 16 * 2**20


def sha256_of_array(array: Any) -> str:
    if is_key(array):
        array = jax.random.key_data(array)
    return sha256_of(raw_pieces(np.asarray(array)))


def check_checksums(path: str, prefix: str | None) -> None:
    """Every array that has a recorded SHA-256 still has it; else an error that names all that do not."""
    problems: list[str] = []
    with checkpoint.open(path, prefix=prefix) as view:
        expected = checksums_of(view.entry)

        def check(name: str, leaf: Any) -> None:
            recorded, found = expected[dotted(name)], sha256_of(_bytes(leaf))
            if found != recorded:
                problems.append(f"leaf {name!r} has SHA-256 {found}, recorded is {recorded}")

        arrays = [(name, view[name]) for name in view.arrays() if dotted(name) in expected]
        run_all([partial(check, name, leaf) for name, leaf in arrays], default_threads())
    if problems:
        raise CorruptionError(f"{path}: validation failed: {'; '.join(sorted(problems))}")


def _bytes(leaf: Any) -> Iterator[Any]:
    """The elements in their order, a little at a time."""
    for region in pieces(leaf.shape, leaf.dtype.itemsize, _BYTES_AT_ONCE) or [Region.whole(leaf.shape)]:
        yield from raw_pieces(leaf[region.slices])
