"""Read checkpoints of other programs."""
