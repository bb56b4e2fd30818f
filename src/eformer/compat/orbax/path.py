"""The module `path` of Orbax, of which programs use `step`."""

from eformer.compat.orbax import step as step

__all__ = ["step"]
