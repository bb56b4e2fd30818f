"""Trees in the msgpack format of flax."""
