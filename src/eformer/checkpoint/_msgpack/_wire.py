"""What writer and reader agree on."""

ARRAY, COMPLEX, SCALAR = 1, 2, 3

CHUNKED = "__msgpack_chunked_array__"
TUPLE = "__msgpack_tuple__"

KEY_TYPES = frozenset({str, int, bool, float, bytes, type(None)})

# flax's writer stops at 511 levels. A tuple takes two in the message.
MAX_TREE_DEPTH = 511
MAX_MESSAGE_DEPTH = 2 * MAX_TREE_DEPTH + 2

# The longest byte string or extension that msgpack can express.
MAX_LENGTH = 2**32 - 1
