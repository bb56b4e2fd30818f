"""Describe how leaves are stored in files, in the formats of eformer and of other programs. No jax."""
