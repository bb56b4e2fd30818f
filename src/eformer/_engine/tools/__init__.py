"""Inspect, verify, compare, convert and prune checkpoints. No jax."""
