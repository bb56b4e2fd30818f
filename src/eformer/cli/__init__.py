"""The command `eformer`: inspect, verify, compare, convert and prune checkpoints, without jax."""
