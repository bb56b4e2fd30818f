"""Bytes by name: directories, scratch, locks, databases. The only room that opens, renames or removes files. No jax."""
