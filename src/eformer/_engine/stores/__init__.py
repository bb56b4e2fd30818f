"""Read and write bytes by name: directories, buckets, databases. No other room creates or removes files. No jax."""
