"""How leaves lie in files."""
