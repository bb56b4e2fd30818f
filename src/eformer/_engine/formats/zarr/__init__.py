"""Find and lay out checkpoints in zarr arrays."""
