"""Bytes by name: directories, scratch, locks, databases. No other room creates, renames or removes files. No jax."""
