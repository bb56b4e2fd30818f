"""Read and write trees in the msgpack format of flax."""
