"""Flatten and rebuild pytrees of JAX, convert state dicts, and move arrays to and from devices."""
