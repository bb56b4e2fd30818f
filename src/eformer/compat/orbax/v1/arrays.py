"""Arrays of the newer generation."""

from eformer.compat.orbax.tree import to_shape_dtype_struct

__all__ = ["to_shape_dtype_struct"]
