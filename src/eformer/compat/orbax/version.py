"""The version of Orbax whose behaviour the door has, which programs compare."""

__version__ = "0.12.8"
