"""Helpers of evaluators and of restores: wait for new steps, and arguments of a restore by a target.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from eformer._engine.processes import hosts
from eformer._engine.stores.checkpoints import held
from eformer._engine.stores.local import LocalStore
from eformer.compat.orbax import step as step_lib
from eformer.compat.orbax._alike import on_disk, to_path
from eformer.compat.orbax._rules import restore_args_of
from eformer.compat.orbax.metadata import TreeMetadata
from eformer.compat.orbax.type_handlers import PLACEHOLDER

__all__ = ["PLACEHOLDER", "checkpoints_iterator", "construct_restore_args", "wait_for_new_checkpoint"]

STANDARD_ARRAY_TYPES = (int, float, np.number, np.ndarray, jax.Array)


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Return `RestoreArgs` by which each leaf comes back like the leaf of `target`, on its sharding or on the one in
    `sharding_tree`. A `ShapeDtypeStruct` without a sharding comes back as a numpy array."""
    if isinstance(target, TreeMetadata):
        shardings = sharding_tree.tree if isinstance(sharding_tree, TreeMetadata) else sharding_tree
        inner = construct_restore_args(target.tree, shardings, set_global_shape, support_layout, strict)
        return TreeMetadata(inner, target.custom_metadata)
    if sharding_tree is None:
        sharding_tree = jax.tree.map(_own_sharding, target)

    def build(value: Any, sharding: Any) -> Any:
        given = sharding.value if isinstance(sharding, _Own) else _resolved(sharding)
        return restore_args_of(value, given, has_shape=set_global_shape, strict=strict)

    return jax.tree.map(build, target, sharding_tree)


class _Own:
    """The sharding of a leaf, or None, as a leaf of a tree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _own_sharding(leaf: Any) -> _Own:
    return _Own(_resolved(getattr(leaf, "sharding", None)))


def _resolved(sharding: Any) -> Any:
    return sharding.to_jax_sharding() if hasattr(sharding, "to_jax_sharding") else sharding


def _until(
    steps: Callable[[], list[int]], least: int | None, seconds: float, timeout: Any, ended: Any
) -> int:
    """Return the newest step as soon as it is `least` or later; -1 at the time limit."""
    limit = None if timeout is None else time.monotonic() + timeout
    while True:
        newest = max(steps(), default=None)
        if newest is not None and (least is None or newest >= least):
            return newest
        if limit is not None and time.monotonic() + seconds > limit and (ended is None or ended()):
            return -1
        time.sleep(seconds)


@contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: Any,
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    snapshot_dir: Any = None,
    **_: Any,
) -> Iterator[int]:
    """Wait for a step, `until_step` or later, and yield its number; -1 at the time limit.

    While the caller uses it, its data stay on the disk below a hidden directory, also if the trainer removes the step.
    """
    names = step_name_format or step_lib.standard_name_format(
        step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
    )
    root = on_disk(checkpoint_dir)

    def steps() -> list[int]:
        return [found.step for found in names.find_all(to_path(root))]

    found = -1
    if hosts.is_alone() or jax.process_index() == 0:
        found = _until(steps, until_step, seconds_to_sleep, timeout, timeout_fn)
    if not hosts.is_alone():
        from eformer.compat.orbax.multihost import broadcast_one_to_all

        found = int(broadcast_one_to_all(np.int32(found)))
    is_held = found != -1 and jax.process_index() == 0
    with held(LocalStore(root), names.build_name(found)) if is_held else nullcontext():
        yield found


def checkpoints_iterator(
    checkpoint_dir: Any,
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **options: Any,
) -> Iterator[int]:
    """Yield the newest step again and again, each once, until the time limit."""
    last: int | None = None
    while True:
        begun = time.monotonic()
        with wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=None if last is None else last + 1,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            **options,
        ) as found:
            if found == -1:
                return
            last = found
            yield found
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - begun)))
