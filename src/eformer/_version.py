"""The version of eformer. Apart from the package's door, which knows everything, so that all may import it."""

__version__ = "0.1.0"
