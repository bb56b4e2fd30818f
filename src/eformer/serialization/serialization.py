"""The documented helpers for trees of arrays."""

from eformer.checkpoint._tree import is_array_like, join_key, leaf_key_paths

__all__ = ["is_array_like", "join_key", "leaf_key_paths"]
