"""The msgpack format of flax: a tree of dicts, lists, tuples, plain values and arrays as one message.

It is plain msgpack with extension types 1 (array), 2 (complex) and 3 (numpy scalar). The payload of 1 and 3 is a
message of its own: [shape, dtype name, bytes]. Two maps have a special meaning:

    {"__msgpack_chunked_array__": true, "shape": {"0": ...}, "chunks": {"0": flat array, ...}}
    {"__msgpack_tuple__": [...]}                        an extension by eformer: flax cannot write a tuple

A typed PRNG key is an array whose dtype name is key<implementation>, also an extension by eformer.
"""

from typing import Any

import numpy as np

ARRAY, COMPLEX, SCALAR = 1, 2, 3

CHUNKED = "__msgpack_chunked_array__"
TUPLE = "__msgpack_tuple__"

# Levels of a message; a tuple takes two. The writer of flax stops at 511, and the check of the framing at the
# interpreter's recursion limit of 1000.
MAX_DEPTH = 900

# The longest byte string or extension that msgpack can express.
MAX_LENGTH = 2**32 - 1

_KEYS = frozenset({str, int, bool, float, complex, bytes, type(None)})


def is_key(value: Any) -> bool:
    """Tell whether a value can be the key of a dict: any leaf that is hashable."""
    return type(value) in _KEYS or isinstance(value, np.generic)
