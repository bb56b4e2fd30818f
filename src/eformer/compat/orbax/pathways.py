"""Stubs of Orbax's support of Pathways, which programs name without using it.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

from typing import Any


class CheckpointingImpl:
    """Says that there is no Pathways."""

    NO_DISPATCHER = None

    @classmethod
    def from_options(cls, **_: Any) -> None:
        """Return None: eformer saves without Pathways."""


def register_type_handlers(*_: Any, **__: Any) -> None:
    """Accept, without effect."""
