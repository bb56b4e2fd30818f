"""Inspect, verify, sign, compare, convert and prune checkpoints. No jax."""
