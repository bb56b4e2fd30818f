"""Serve pages about a run or a checkpoint over HTTP: read only, to whoever has the token. No jax."""
