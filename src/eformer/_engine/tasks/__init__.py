"""Run many tasks on threads, and report their progress. No jax."""
