"""The checkpointer that trainers call at every step: it decides when to save, and which checkpoints stay.

Checkpoints are directories `run-100` of `base_path`. A checkpoint of a step policy stays. A checkpoint of the clock is
temporary, and is removed when a newer checkpoint is finished. A checkpoint is finished when it has a `metadata.json`,
which is written last, or when its single commit has recorded the same facts.
"""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.formats.run_steps import steps
from eformer._engine.formats.steps import CHECKPOINTER_FILE
from eformer._engine.processes.hosts import meeting
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.step_names import run_name
from eformer._engine.runs.clock import Clock
from eformer._engine.runs.retention import steady_clock
from eformer._engine.runs.under_way import UnderWay
from eformer._engine.saving.pending import Pending, wait_for
from eformer._engine.stores.base import remove_files
from eformer._engine.stores.local import is_there
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.tasks.interrupts import uninterrupted
from eformer.errors import NotFoundError
from eformer.serialization._finished import (
    find_latest_checkpoint,
    is_checkpoint,
    is_temporary,
    metadata_file,
    problem_at,
    removable,
    remove,
    step_of,
    write_metadata,
)
from eformer.serialization._finished import read_checkpoint_metadata as _read_checkpoint_metadata  # noqa: F401
from eformer.serialization.async_manager import AsyncCheckpointManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

    from eformer.serialization.async_manager import Callback, Rules

__all__ = ["CheckpointInterval", "Checkpointer", "find_latest_checkpoint"]

logger = logging.getLogger("eformer")

SaveCallback = Callable[[str, Any, dict[str, Any]], object]


@dataclass(frozen=True)
class CheckpointInterval:
    """Save at every multiple of `every`, up to the step `until`; None for no end.

    Example:

        >>> rules = [CheckpointInterval(every=100, until=1000), CheckpointInterval(every=1000)]
    """

    every: int
    until: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"CheckpointInterval(every={self.every}): every must be positive")


class Checkpointer:
    """Save checkpoints `run-100` of a training run by rule, in the background, and load them.

    base_path                     the directory of the checkpoints
    save_interval                 save a temporary checkpoint when this time has passed since the last save
    step_policies                 save permanent checkpoints, by the first policy that has not ended; sorted by `until`
    manager                       writes and reads the trees; by default as zarr arrays
    dt_now_injection              the clock, a function that returns a datetime; by default a clock that is never set
                                  back
    delete_old_temp_checkpoints   False leaves the temporary checkpoints of earlier jobs alone

    All processes of a job make the same calls. Only `save_pytree` waits for its save; the next call raises the error
    of a save in the background.

    Example:

        >>> checkpointer = Checkpointer("runs/llama", timedelta(minutes=15), [CheckpointInterval(every=1000)])
        >>> checkpointer.on_step(mesh, state, step=1000)
        >>> checkpointer.wait_until_finished()
    """

    def __init__(
        self,
        base_path: str | os.PathLike[str],
        save_interval: dt.timedelta | None,
        step_policies: Sequence[CheckpointInterval],
        *,
        manager: AsyncCheckpointManager | None = None,
        dt_now_injection: Callable[[], dt.datetime] | None = None,
        delete_old_temp_checkpoints: bool = True,
    ) -> None:
        self.base_path = str(base_path)
        # Absolute, because saves end in the background, and the program may change its directory.
        self._root = absolute(base_path)
        self.save_interval = save_interval
        self.step_policies = _in_order(step_policies)
        self._manager = AsyncCheckpointManager() if manager is None else manager
        self._dt_now_injection = dt_now_injection or _steady_datetimes()
        self._began = self._dt_now_injection()
        self._clock = Clock(self._seconds, SaveOptions().timeout)
        self._last_save_step = 0
        self._deletes_old = delete_old_temp_checkpoints
        self._own_temporaries: set[int] = set()  # steps that this job has saved
        self._under_way = UnderWay()
        self._removals: list[Pending] = []

    def __repr__(self) -> str:
        return f"<Checkpointer at {self.base_path}: last saved at step {self._last_save_step}>"

    @property
    def _last_save_time(self) -> dt.datetime:
        """When the last save began, by the injected clock. Trainers that save by callbacks set it themselves."""
        return self._began + dt.timedelta(seconds=self._clock.saved_at)

    @_last_save_time.setter
    def _last_save_time(self, when: dt.datetime) -> None:
        self._clock.saved_at = (when - self._began).total_seconds()

    def _seconds(self) -> float:
        return (self._dt_now_injection() - self._began).total_seconds()

    # -------------------------------------------------------------------------------------------- save

    def on_step(
        self,
        mesh: Mesh | None,
        pytree: Any = None,
        force: bool = False,
        *,
        step: int,
        true_callbacks: Sequence[SaveCallback] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Save to `run-{step}` if a save is due: `pytree` in the background, or by functions of the caller.

        force            save a permanent checkpoint, whatever the policies say
        true_callbacks   functions that save, called with the name `run-{step}`, the mesh and a dict that has `step`,
                         `is_temporary` and the extras; the checkpoint is finished when all of them have returned
        extras           metadata of the checkpoint

        A step that was just saved, and step 0, are saved only with `force`.
        """
        self._settle(waits=False)
        if pytree is None and not true_callbacks:
            raise ValueError(
                "on_step has nothing to save: pass pytree=, or true_callbacks= that save the tree"
            )
        if step == 0 and not force:
            self._last_save_time = self._dt_now_injection()
            return
        if not force and (step == self._last_save_step or not self._is_due(step)):
            return
        is_temporary = not (force or self._is_on_policy(step))
        name = run_name(int(step))
        if not true_callbacks:
            self.save_checkpoint(pytree, name, mesh=mesh, step=step, is_temporary=is_temporary, extras=extras)
            return
        self._settle()
        self._unfinish(name)
        if pytree is not None:
            self._start(pytree, name, {**(extras or {}), "step": step}, mesh).result()
        for callback in true_callbacks:
            callback(name, mesh, {"step": step, "is_temporary": is_temporary, **(extras or {})})
        path = self._path_of(name)
        self._finish(path, step, is_temporary, also=metadata_file(path))  # of the callbacks
        self._note_save(step)

    @uninterrupted
    def save_checkpoint(
        self,
        tree: Any,
        destination: str,
        *,
        commit_callback: Callable[[], object] | None = None,
        is_temporary: bool = False,
        mesh: Mesh | None = None,
        step: int = -1,
        shardings: Any = None,
        partition_rules: Rules | None = None,
        prefix: str | None = None,
        structured: bool = False,
        dtype: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `tree` to `destination`, a name in `base_path`, in the background.

        prefix            the name of the tree in the checkpoint
        step              by default the number in the name
        is_temporary      the checkpoint is removed when a newer one is finished
        extras            metadata of the checkpoint
        dtype             store floating leaves as this dtype
        mesh              only needed by a manager that gathers
        commit_callback   is called when the checkpoint is finished
        structured        the structure is always recorded; True only asks for a prefix

        Arrays are saved as they are sharded: `shardings` and `partition_rules` are refused.
        """
        if structured and not prefix:
            raise ValueError("prefix is required when structured=True")
        if shardings is not None or partition_rules is not None:
            raise ValueError(
                "save_checkpoint saves arrays as they are sharded: pass shardings= and partition_rules= to "
                "load_checkpoint, or reshard the tree first"
            )
        step = step_of(step, destination)
        finish = partial(self._finish, self._path_of(destination), step, is_temporary)

        def after(_: str) -> None:
            finish()
            if commit_callback is not None:
                commit_callback()

        facts = {**(extras or {}), "step": int(step), "is_temporary": is_temporary}
        pending = self._start(
            tree, destination, facts, mesh, callback=after, prefix=prefix, float_dtype=dtype
        )
        self._under_way.add(pending)
        self._note_save(step)

    @uninterrupted
    def save_pytree(
        self,
        tree: Any,
        prefix: str,
        *,
        step: int | None = None,
        destination: str | None = None,
        mesh: Mesh | None = None,
        dtype: Any = None,
        extras: Mapping[str, Any] | None = None,
        temporary: bool = False,
        write_index: bool = True,
    ) -> str:
        """Save `tree` under a prefix, and return the path: `run-{step}`, `destination`, or `base_path` itself.

        Several prefixes may be saved to one checkpoint. With `step` it is finished afterwards, see `on_step`.

        temporary     the checkpoint is removed when a newer one is finished
        extras        metadata of the checkpoint
        dtype         store floating leaves as this dtype
        mesh          only needed by a manager that gathers
        write_index   False writes the arrays alone, without digests and structure
        """
        self._settle(waits=False)
        name = destination or ("" if step is None else run_name(int(step)))
        path = self._path_of(name)
        metadata = {**(extras or {}), **({} if step is None else {"step": int(step)})}
        self._manager.save_pytree(
            tree,
            path,
            mesh,
            prefix=prefix,
            cpu_offload=False,
            dtype=dtype,
            extras=metadata,
            write_index=write_index,
        )
        if step is not None and self._manager.enable is not False:
            self._finish(path, int(step), temporary, also=metadata_file(path))
        return _below(self.base_path, name)  # relative if `base_path` is

    def _is_due(self, step: int) -> bool:
        """Tell whether to save. All processes get the same answer; a step without a save costs no message."""
        if self._is_on_policy(step):
            return True
        minutes = None if self.save_interval is None else self.save_interval.total_seconds() / 60
        return self._clock.is_due(step, minutes)

    def _is_on_policy(self, step: int) -> bool:
        policy = next((rule for rule in self.step_policies if rule.until is None or step <= rule.until), None)
        return policy is not None and step % policy.every == 0

    def _start(
        self, tree: Any, name: str, facts: dict[str, Any], mesh: Mesh | None, **arguments: Any
    ) -> Pending:
        """Begin a save when the last save is over."""
        self._settle()
        return self._manager.save_async(tree, self._path_of(name), mesh, metadata=facts, **arguments)

    def _unfinish(self, name: str) -> None:
        """Remove `metadata.json` of a checkpoint before its trees are replaced one by one: until it is finished again,
        its trees may be of different steps."""
        store = store_at(self._path_of(name))
        if jax.process_index() == 0 and is_there(store):
            remove_files(store, [CHECKPOINTER_FILE])

    def _finish(
        self, path: str, step: int, is_temporary: bool, also: Mapping[str, Any] | None = None
    ) -> None:
        """Write `metadata.json`, then remove older temporary checkpoints."""
        if jax.process_index() != 0:
            return
        if (problem := problem_at(path)) is not None:
            logger.warning("%s: not marked as finished, because it is not whole: %s", path, problem)
            return
        now = dt.datetime.now(dt.UTC).isoformat()
        facts = {"step": int(step), "timestamp": now, "is_temporary": is_temporary}
        write_metadata(path, {**(also or {}), **facts})
        if is_temporary:
            self._own_temporaries.add(step)
        for older in self._older_temporaries(step):
            self._queue_checkpoint_removal(older)

    def _note_save(self, step: int) -> None:
        if step >= 0:
            self._last_save_step = step
        self._clock.note_save(step)

    def _path_of(self, destination: str) -> str:
        """Return the path of a name: below `base_path`, unless the name is absolute."""
        return _below(self._root, destination)

    # ------------------------------------------------------------------------------------------ remove

    def _older_temporaries(self, step: int) -> Iterator[str]:
        for found in steps(self._root):
            is_ours = self._deletes_old or found.number in self._own_temporaries
            if found.number < step and is_ours and is_temporary(found.path):
                yield found.path

    def _queue_checkpoint_removal(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Remove a checkpoint in a thread of its own, but never the newest checkpoint of its directory."""
        if jax.process_index() != 0:
            return
        store, name = store_at(absolute(checkpoint_dir)).parent()
        under_way = {one.path: one for one in self._removals if not one.done()}
        removal = Pending(store.path_to(name))
        if removal.path not in under_way and (identity := removable(store, name)) is not None:
            removal.start(partial(remove, store, name, identity))
            self._removals = [*under_way.values(), removal]

    # -------------------------------------------------------------------------------------------- wait

    @uninterrupted
    def wait_until_finished(self) -> None:
        """Wait for all saves and removals. Raises the error of a save that has not been raised yet."""
        try:
            self._settle()
            self._manager.wait_until_finished()
        finally:
            wait_for(self._removals)

    def _settle(self, *, waits: bool = True) -> None:
        """Raise the error of the last save, if it has failed. Its step can be saved again afterwards."""
        try:
            if waits:
                self._under_way.wait()
            self._under_way.raise_failure()
        except Exception:
            self._last_save_step = -1
            raise

    # -------------------------------------------------------------------------------------------- load

    def load_checkpoint(
        self,
        mesh: Mesh | None,
        *,
        path: str | os.PathLike[str] | None = None,
        discover_latest: bool = True,
        shardings: Any = None,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        prefix: str | None = None,
        structured: bool = False,
        template: Any = None,
        strict_shapes: bool = True,
    ) -> tuple[Any, dict[str, Any]]:
        """Load the latest checkpoint below `path`, by default `base_path`; return it with its metadata.

        discover_latest           False loads `path` itself
        structured                load a prefix like `AsyncCheckpointManager.load_pytree`, which `template` and
                                  `strict_shapes=False` need
        mesh                      where arrays go, with `shardings` and `partition_rules`: see
                                  `AsyncCheckpointManager.load`
        dtype                     cast floating leaves to this dtype
        """
        if not structured and (template is not None or not strict_shapes):
            raise ValueError("template= and strict_shapes=False need structured=True and a prefix")
        if structured and not prefix:
            raise ValueError("prefix is required when structured=True")
        where = self._find(path, discover_latest, discover_raise=True)
        like = {"template": template, "strict_shapes": strict_shapes} if structured else {}
        return self._load(
            where,
            mesh,
            like,
            prefix=prefix,
            shardings=shardings,
            partition_rules=partition_rules,
            dtype=dtype,
        )

    def load_pytree(
        self,
        mesh: Mesh | None,
        *,
        prefix: str,
        path: str | os.PathLike[str] | None = None,
        discover_latest: bool = True,
        discover_raise: bool = True,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        load_treedef: bool = False,
        callback: Callback | None = None,
        template: Any = None,
        strict_shapes: bool = True,
        chunk_size: int | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Load a prefix of the latest checkpoint below `path`, by default `base_path`; return it with its metadata.

        discover_raise   False returns `(None, {})` if `base_path` has no checkpoint; a `path` that has none is an error
        load_treedef     load like `AsyncCheckpointManager.load_pytree`: leaves without a rule are replicated.
                         `template` and `strict_shapes=False` imply it

        `mesh`, `partition_rules`, `dtype`, `callback` and `chunk_size` are as in `AsyncCheckpointManager.load`, and
        `discover_latest` is as in `load_checkpoint`.
        """
        where = self._find(path, discover_latest, discover_raise=discover_raise or path is not None)
        if not where:
            return None, {}
        is_structured = load_treedef or template is not None or not strict_shapes
        like = {"template": template, "strict_shapes": strict_shapes} if is_structured else {}
        return self._load(
            where,
            mesh,
            like,
            prefix=prefix,
            partition_rules=partition_rules,
            dtype=dtype,
            callback=callback,
            chunk_size=chunk_size,
        )

    def _load(
        self, where: str, mesh: Mesh | None, like: Mapping[str, Any], **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Load a checkpoint, `like` a template if that is not empty. Add the extras of the save, and the contents of
        `metadata.json`, to its metadata."""
        load = self._manager.load_pytree if like else self._manager.load
        tree, metadata = load(where, mesh, **like, **options)
        return tree, (metadata_file(where) or {}) | (metadata["custom_metadata"] or {}) | metadata

    def _find(
        self, path: str | os.PathLike[str] | None, discover_latest: bool, *, discover_raise: bool
    ) -> str:
        """Return the path of the checkpoint to load. If none is found, raise with `discover_raise`, else return ""."""
        self._settle()
        root = self._root if path is None else str(path)
        if not discover_latest:
            return root
        if found := _agreed(root):
            return found
        if discover_raise:
            raise NotFoundError(f"No checkpoint found under {root}")
        return ""


def _below(root: str, name: str) -> str:
    if not name or "://" in name:
        return name or root
    return os.path.join(root, name)  # noqa: PTH118  URLs, too


def _agreed(root: str) -> str:
    """Return the latest checkpoint below `root`, or `root` if it is one, as the first process sees it; "" for none."""

    def answer(_: Sequence[bytes]) -> bytes:
        return (find_latest_checkpoint(root) or (root if is_checkpoint(root) else "")).encode()

    with meeting("find the latest checkpoint", SaveOptions().timeout) as hosts:
        return hosts.meet(b"", answer).decode()


def _in_order(policies: Sequence[CheckpointInterval]) -> list[CheckpointInterval]:
    """Return the policies as a list; raise ValueError if one of them could never apply."""
    for one, after in itertools.pairwise(policies):
        if one.until is None:
            raise ValueError("Only the last step policy can have an 'until' of None")
        if after.until is not None and one.until >= after.until:
            raise ValueError("Step policies must be sorted by 'until' value")
    return list(policies)


def _steady_datetimes() -> Callable[[], dt.datetime]:
    """Return a clock that starts now and that no change of the system clock affects."""
    now = steady_clock()
    return lambda: dt.datetime.fromtimestamp(now(), dt.UTC)
