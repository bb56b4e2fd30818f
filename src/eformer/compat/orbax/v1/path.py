"""Names of steps in the newer generation."""

from eformer.compat.orbax import step as step

__all__ = ["step"]
