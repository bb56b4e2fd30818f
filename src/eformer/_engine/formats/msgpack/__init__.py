"""Trees in flax's msgpack."""
