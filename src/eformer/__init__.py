"""Checkpoints for JAX that are never wrong, never half, and as fast as the machine."""

__version__ = "0.1.0"
