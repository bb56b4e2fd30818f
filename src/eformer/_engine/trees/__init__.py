"""Pytrees of JAX: their leaves, nodes and structure, state dicts, and arrays on devices."""
