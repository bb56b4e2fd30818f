"""Checkpoints of other programs, read as if they were ours."""
