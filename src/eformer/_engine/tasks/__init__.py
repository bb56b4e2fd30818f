"""Run many tasks on threads, and tell of their progress. No jax."""
