"""Loggers of managers: each gets a dict for each save and each restore.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

import logging
from typing import Any

from eformer.compat.orbax._alike import Alike

logger = logging.getLogger("eformer")


class AbstractLogger(Alike):
    """The base of loggers."""

    alike = ("AbstractLogger",)

    def log_entry(self, entry: dict[str, Any]) -> None:
        """Take an entry."""
        raise NotImplementedError


class StandardLogger(AbstractLogger):
    """Writes entries to the log of eformer."""

    def log_entry(self, entry: dict[str, Any]) -> None:
        """Write an entry."""
        logger.info("%s", entry)


class CompositeLogger(AbstractLogger):
    """Passes entries on to several loggers."""

    def __init__(self, *loggers: Any) -> None:
        self._loggers = loggers

    def log_entry(self, entry: dict[str, Any]) -> None:
        """Pass an entry on."""
        for each in self._loggers:
            each.log_entry(entry)
