"""The errors of the newer generation.

Tests: tests/compat_orbax/test_v1.py.
"""


class InvalidLayoutError(ValueError):
    """No checkpoint is at the path, or none of the wanted kind."""


class StepAlreadyExistsError(FileExistsError):
    """The step to save exists."""


class StepNotFoundError(FileNotFoundError):
    """The step does not exist."""


class NoEntryError(KeyError):
    """No handler takes the object."""
