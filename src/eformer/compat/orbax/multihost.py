"""The processes of the program, as Orbax names them.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from eformer._engine.processes import hosts
from eformer.compat.orbax.handlers import is_primary


def process_index() -> int:
    """Return the number of this process."""
    return int(jax.process_index())


def process_count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def is_primary_host(primary_host: int | None) -> bool:
    """Tell whether this process writes files that one process writes."""
    return is_primary(primary_host)


def is_jax_distributed_client_initialized() -> bool:
    """Tell whether `jax.distributed.initialize` was called."""
    return hosts.service_client() is not None


def sync_global_processes(name: str, *, timeout: Any = None, processes: Any = None, **_: Any) -> None:
    """Let the processes come to this point."""
    if hosts.is_alone():
        return
    group = hosts.current(f"synchronisations called {name}", processes, timeout)
    with hosts.told_to_all(group):
        group.meet(name.encode(), lambda _: b"")
    group.end()


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Return the tree of one process, by default the first."""
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(in_tree, is_source=is_source)


def reached_preemption(step: int) -> bool:
    """Tell whether the job is about to be ended. All processes ask with the same step."""
    if hosts.service_client() is None:
        return False
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:
        return False  # the service does not watch for it


def coordination_timeout() -> int:
    """Return the seconds that a meeting may take."""
    return int(hosts.TIMEOUT)


def unique_barrier_key(key: str, *, prefix: str | None = None, suffix: str | None = None) -> str:
    """Return a key."""
    return "_".join(part for part in (prefix, key, suffix) if part is not None)


def get_barrier_sync_fn(*, processes: Any = None, **_: Any) -> Callable[..., None]:
    """Return a function by which processes meet."""
    return lambda *, key, timeout_ms=None: sync_global_processes(key, processes=processes)


def is_pathways_backend() -> bool:
    """Pathways is not supported."""
    return False


def should_skip_process_sync(*_: Any) -> bool:
    """Tell whether there is no process to meet."""
    return hosts.is_alone()
