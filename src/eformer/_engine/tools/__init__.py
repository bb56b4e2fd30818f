"""Look at checkpoints, check, compare, convert and prune them. No jax."""
