"""The options of saves: in the background, of several processes, of files.

Tests: tests/compat_orbax/test_manager.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from eformer import checkpoint


@dataclass
class AsyncOptions:
    """How a save goes on in the background. A save meets the other processes for `timeout_secs` at most;
    `post_finalization_callback` is called when the step is in place."""

    timeout_secs: int | None = 1200
    barrier_sync_fn: Any = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclass
class MultiprocessingOptions:
    """Which processes save together: all, `active_processes`, or each for itself (`primary_host=None`)."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclass(frozen=True)
class FileOptions:
    """The permissions of new directories."""

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


class AtomicityMode(str, Enum):  # noqa: UP042  Orbax's own base
    """How Orbax makes saves atomic. eformer renames whole directories, whatever the mode."""

    AUTO = "auto"
    ATOMIC_RENAME = "atomic_rename"
    COMMIT_FILE = "commit_file"


@dataclass(frozen=True)
class AtomicityOptions:
    """Accepted, and without effect."""

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclass
class MemoryLimitOptions:
    """Accepted, and without effect."""

    max_transfer_concurrent_gb: Any = None


def processes_of(options: Any) -> tuple[int, ...] | None:
    """Return the numbers of the processes that save together; None for all."""
    if options is None:
        return None
    if options.active_processes is not None:
        return tuple(sorted(options.active_processes))
    if options.primary_host is None and jax.process_count() > 1:
        return (jax.process_index(),)
    return None


def save_options(processes: tuple[int, ...] | None, timeout: Any) -> checkpoint.SaveOptions:
    """Return the options of a save by eformer."""
    return checkpoint.SaveOptions(processes=processes, timeout=timeout or None)
