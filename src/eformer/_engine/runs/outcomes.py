"""Tell the other processes of a run how a load went in this one: well, damaged, or another error. No jax."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from eformer._engine.tasks.callers import is_of_caller
from eformer.errors import FormatError, ProcessError, VersionError

if TYPE_CHECKING:
    from collections.abc import Sequence


def outcome_of(error: Exception | None) -> bytes:
    """Describe the outcome of a load for the other processes."""
    if error is None:
        return b""
    is_unreadable = isinstance(error, OSError) and error.errno == errno.EIO
    is_damage = isinstance(error, (FormatError, FileNotFoundError)) and not isinstance(error, VersionError)
    if (is_unreadable or is_damage) and not is_of_caller(error):
        return f"damage:{error}".encode(errors="replace")
    return b"peer" if isinstance(error, ProcessError) else f"error:{error!r}".encode(errors="replace")


def worst(messages: Sequence[bytes]) -> bytes:
    """Return an error that is no damage if there is one, else a damage, else nothing."""
    for start_of in (b"error:", b"damage:", b"peer"):
        for message in messages:
            if message.startswith(start_of):
                return message
    return b""
