"""Readers of checkpoints that other programs wrote."""
