"""flax's msgpack: a tree of dicts, lists, tuples, plain values and arrays as one message, and back.

Plain msgpack, with extension types 1 (array), 2 (complex) and 3 (numpy scalar). The payload of 1 and 3 is a
message of its own: [shape, dtype name, bytes]. Two maps have a meaning:

    {"__msgpack_chunked_array__": true, "shape": {"0": ...}, "chunks": {"0": flat array, ...}}
    {"__msgpack_tuple__": [...]}                        ours: flax cannot write a tuple

A typed PRNG key is an array whose dtype name is key<implementation>: ours too.
"""

from eformer.checkpoint._msgpack._views import unpack
from eformer.checkpoint._msgpack._writer import Streamed, can_pack, pack

__all__ = ["Streamed", "can_pack", "pack", "unpack"]
