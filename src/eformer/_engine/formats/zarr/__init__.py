"""Checkpoints in zarr arrays."""
