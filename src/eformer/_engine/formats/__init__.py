"""Describe how leaves are stored in files, those of eformer and those of other programs. No jax."""
