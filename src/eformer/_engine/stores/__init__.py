"""Bytes by name: directories, scratch, locks, databases. The only room that creates, renames or removes files. No jax."""
