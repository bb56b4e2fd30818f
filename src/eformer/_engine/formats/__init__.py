"""How leaves lie in files, ours and those of other programs. No jax."""
