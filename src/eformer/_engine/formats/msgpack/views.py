"""Read a msgpack message into a tree whose arrays are views of the message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.formats.msgpack.reader import PRNG_KEY, decode_array, read
from eformer._engine.record.dtypes import from_raw
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Read the tree in `data`. Its arrays are views of `data` if that is read-only, else of a copy."""
    view = memoryview(data).cast("B")
    if not view.readonly:
        view = memoryview(bytes(view))
    return read(view, _ViewMaker())


class _ViewMaker:
    def make(self, payload: memoryview, at: int) -> Any:
        shape, name, data = decode_array(payload)
        if name.startswith("key<") and (key := PRNG_KEY.fullmatch(name)):
            return _prng_key(from_raw(data, "uint32", shape), key[1])
        return from_raw(data, name, shape)

    def join(self, shape: list[int], chunks: Sequence[Any]) -> np.ndarray[Any, Any]:
        array = np.concatenate(chunks).reshape(shape)
        array.flags.writeable = False  # like the views
        return array


def _prng_key(data: np.ndarray[Any, Any], implementation: str) -> Any:
    import jax  # late: only files that hold keys need it

    try:
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=implementation)
    except (TypeError, ValueError) as error:
        raise FormatError(f"not a PRNG key: {error}") from error
