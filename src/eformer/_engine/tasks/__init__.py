"""Run many tasks on threads, report their progress, and keep saves in order. No jax."""
