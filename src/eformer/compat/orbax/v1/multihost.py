"""Processes in the newer generation."""

from eformer.compat.orbax.multihost import (
    is_primary_host,
    process_count,
    process_index,
    sync_global_processes,
)

__all__ = ["is_primary_host", "process_count", "process_index", "sync_global_processes"]
