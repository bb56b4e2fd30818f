"""Read and write bytes by name: directories, memory, databases. No other room creates or removes files. No jax."""
