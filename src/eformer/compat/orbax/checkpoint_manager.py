"""`CheckpointManager`: the steps of a training run by the rules of Orbax, written by eformer.

Tests: tests/compat_orbax/test_manager.py, tests/multihost/test_orbax_door.py.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from eformer._engine.formats.find import find_step, problem_of
from eformer._engine.processes import hosts
from eformer._engine.record.lazy import lazy_property
from eformer._engine.stores.checkpoints import remove_checkpoint
from eformer._engine.stores.durable import make_directories, replacing, sync_directory
from eformer._engine.stores.local import LocalStore
from eformer.compat.orbax import args as args_lib
from eformer.compat.orbax import checkpoint_managers as policies
from eformer.compat.orbax import step as step_lib
from eformer.compat.orbax._alike import Alike, on_disk, to_path
from eformer.compat.orbax._composite import CheckpointArgs, CompositeArgs
from eformer.compat.orbax._saving import SaveSettings, Saving, wait_for
from eformer.compat.orbax.checkpointers import AbstractCheckpointer, AsyncCheckpointer, _ours
from eformer.compat.orbax.handlers import (
    CheckpointHandler,
    CompositeCheckpointHandler,
    DefaultCheckpointHandlerRegistry,
    JsonCheckpointHandler,
    is_primary,
    wrapped,
)
from eformer.compat.orbax.metadata import (
    ROOT_DIRECTORY,
    ROOT_FILE,
    RootMetadata,
    StepMetadata,
    read_json,
)
from eformer.compat.orbax.multihost import reached_preemption
from eformer.compat.orbax.options import AsyncOptions, FileOptions, MultiprocessingOptions, processes_of
from eformer.errors import CorruptionError, EformerError, NotFoundError

logger = logging.getLogger("eformer")

DEFAULT_ITEM_NAME = "default"
METRIC_ITEM_NAME = "metrics"
METADATA_ITEM_NAME = ROOT_DIRECTORY
RESERVED_ITEM_NAMES: list[str] = []


class StepAlreadyExistsError(ValueError):
    """The step to save exists."""


@dataclass
class CheckpointManagerOptions(Alike):
    """When steps are saved, how they are called, and which stay.

    Ignored, without loss: `single_host_load_and_broadcast`, `lightweight_initialize`, `temporary_path_class`,
    `atomicity_options`, `enable_per_process_directory_creation`, `num_deletion_threads`, `enable_background_delete`.
    """

    alike = ("CheckpointManagerOptions",)

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: dt.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Any = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: Any = None
    multiprocessing_options: Any = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: Any = field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(
                f"`CheckpointManagerOptions.best_mode` must be one of None, 'min' or 'max'. Got {self.best_mode}."
            )
        if self.preservation_policy is None and self.max_to_keep is not None and self.max_to_keep < 0:
            raise ValueError("Setting of `max_to_keep` must be None or non-negative.")
        self._check_flags()
        if self.read_only:
            self._reset()
        if self.todelete_subdir is not None and self.todelete_full_path is not None:
            raise ValueError("todelete_subdir and todelete_full_path both cannot be set togther")
        self.save_on_steps = frozenset(self.save_on_steps or ())

    def _check_flags(self) -> None:
        is_single = bool(getattr(self.step_name_format, "single_host_load_and_broadcast", False))
        if self.step_name_format is not None and is_single != self.single_host_load_and_broadcast:
            raise ValueError(
                "`single_host_load_and_broadcast` must be the same in CheckpointManagerOptions and "
                "in `step_name_format`"
            )
        if (
            self.enable_per_process_directory_creation
            and self.multiprocessing_options.primary_host is not None
        ):
            raise ValueError(
                "enable_per_process_directory_creation can only be used when primary_host is None."
            )

    def _reset(self) -> None:
        """Reset the options that would write."""
        self.save_interval_steps = 0
        self.create = self.cleanup_tmp_directories = False
        self.max_to_keep = self.keep_time_interval = self.keep_period = self.save_on_steps = None
        self.todelete_subdir = self.todelete_full_path = self.should_save_fn = None


@dataclass
class _ShouldSave:
    """Decides by the caller's function of the step and the last step."""

    function: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return self.function(step.step, previous_steps[-1].step if previous_steps else None)


def _save_policy(options: Any) -> Any:
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    preemption = policies.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return policies.AnySavePolicy([_ShouldSave(options.should_save_fn), preemption])
    chosen: list[Any] = [policies.SpecificStepsPolicy(options.save_on_steps or ())]
    if options.save_interval_steps is not None:
        chosen.insert(0, policies.FixedIntervalPolicy(options.save_interval_steps))
    return policies.AnySavePolicy([*chosen, preemption, policies.InitialSavePolicy()])


def _preservation_policy(options: Any) -> Any:
    if options.preservation_policy is not None:
        if options.keep_time_interval or options.max_to_keep or options.keep_period:
            raise ValueError(
                "`preservation_policy` and `delete options` are mutually exclusive - do not use together."
            )
        return options.preservation_policy
    chosen: list[Any] = []
    if options.keep_period is not None:
        chosen.append(policies.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        chosen.append(policies.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    chosen.append(_last_or_best(options))
    return policies.AnyPreservationPolicy(chosen)


def _last_or_best(options: Any) -> Any:
    if options.best_fn is None:
        return policies.LatestN(options.max_to_keep)
    return policies.BestN(
        get_metric_fn=options.best_fn,
        reverse=options.best_mode == "min",
        n=options.max_to_keep,
        keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
    )


class _Info:
    """A step that the manager lists. Its facts are read on first use."""

    def __init__(self, step: int, path: Path, *, is_new: bool = False, metrics: Any = None) -> None:
        self.step, self.path, self._is_new = step, path, is_new
        if is_new:
            self.metrics, self.time = metrics, dt.datetime.now(dt.UTC)

    @lazy_property
    def time(self) -> dt.datetime:
        """When its save was committed."""
        return step_lib.Metadata(self.step, self.path).commit_timestamp

    @lazy_property
    def metrics(self) -> Any:
        """Its metrics; None without."""
        return read_json(self.path / METRIC_ITEM_NAME / METRIC_ITEM_NAME)

    @lazy_property
    def is_damaged(self) -> bool:
        """Whether files of it are missing or have wrong lengths. Such a step neither counts nor is deleted."""
        if self._is_new:
            return False
        try:
            return problem_of(find_step(self.path)) is not None
        except NotFoundError:
            return False  # only its handlers can read it
        except (CorruptionError, FileNotFoundError):
            return True
        except (EformerError, OSError):
            return False


class AbstractCheckpointManager(Alike):
    """The base of managers."""

    alike = ("AbstractCheckpointManager",)


class CheckpointManager(AbstractCheckpointManager):
    """Save and restore the steps of a run in a directory, by the rules of its options.

    with CheckpointManager("run", options=CheckpointManagerOptions(max_to_keep=3)) as manager:
        manager.save(step, args=args.StandardSave(state))
        state = manager.restore(manager.latest_step(), args=args.StandardRestore(state))
    """

    alike = ("CheckpointManager",)

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        self._options = options or CheckpointManagerOptions()
        _require_one_way(checkpointers, item_names, item_handlers, handler_registry)
        if self._options.todelete_full_path is not None:
            raise NotImplementedError(
                "todelete_full_path is for buckets; todelete_subdir= moves steps on a disk"
            )
        self._save_policy, self._keep_policy = (
            _save_policy(self._options),
            _preservation_policy(self._options),
        )
        self._logger = logger
        self._directory = to_path(directory)
        self._root = on_disk(directory)
        self._is_single: bool | None = None  # one unnamed item, or several; None until the first use tells
        self._is_async = self._options.enable_async_checkpointing
        self._handler = self._handler_of(checkpointers, item_names, item_handlers, handler_registry)
        self._settings = SaveSettings(
            self._options.async_options or AsyncOptions(),
            self._options.multiprocessing_options,
            self._options.file_options or FileOptions(),
        )
        if getattr(self._options.async_options, "post_finalization_callback", None) and not self._is_async:
            raise ValueError(
                "AsyncOptions.post_finalization_callback is only supported with AsyncCheckpointer."
            )
        self._saving: tuple[int, Saving] | None = None
        self._told = WeakSet[threading.Thread]()  # the threads that the error of the save was raised in
        self._make_root()
        self._names = self._options.step_name_format or step_lib.standard_name_format(
            step_prefix=self._options.step_prefix,
            step_format_fixed_length=self._options.step_format_fixed_length,
        )
        self._checkpoints = self._listed()
        self._given_metadata = dict(metadata) if metadata is not None else None
        self._save_root_metadata()

    def _handler_of(
        self, checkpointers: Any, names: Any, handlers: Any, registry: Any
    ) -> CompositeCheckpointHandler:
        """Return the handler of the items, by one of the four ways to name them."""
        metrics = JsonCheckpointHandler(METRIC_ITEM_NAME)
        if checkpointers is not None:
            return self._handler_of_checkpointers(checkpointers, metrics)
        if names is None and handlers is None:
            known = DefaultCheckpointHandlerRegistry(registry)
            for kind in (args_lib.JsonSave, args_lib.JsonRestore):
                if not known.has(METRIC_ITEM_NAME, kind):
                    known.add(METRIC_ITEM_NAME, kind, metrics)
            return CompositeCheckpointHandler(handler_registry=known)
        self._is_single = isinstance(handlers, CheckpointHandler)
        if self._is_single:
            return CompositeCheckpointHandler(
                **{DEFAULT_ITEM_NAME: _ours(handlers), METRIC_ITEM_NAME: metrics}
            )
        items: dict[str, Any] = dict.fromkeys(names or ())
        items |= {name: _ours(each) for name, each in (handlers or {}).items()}
        return CompositeCheckpointHandler(**{**items, METRIC_ITEM_NAME: metrics})

    def _handler_of_checkpointers(self, checkpointers: Any, metrics: Any) -> CompositeCheckpointHandler:
        self._is_single = isinstance(checkpointers, AbstractCheckpointer)
        if not self._is_single and not isinstance(checkpointers, Mapping):
            raise ValueError(f"Invalid type for `checkpointers`. Found {checkpointers}.")
        several = {DEFAULT_ITEM_NAME: checkpointers} if self._is_single else dict(checkpointers)
        for name, each in several.items():
            if not isinstance(each, AbstractCheckpointer):
                raise ValueError(
                    f"Value corresponding to {name} in `checkpointers` is not a Checkpointer: {type(each)}."
                )
        self._is_async = any(isinstance(each, AsyncCheckpointer) for each in several.values())
        handlers = {name: _ours(each.handler) for name, each in several.items()}
        return CompositeCheckpointHandler(**{**handlers, METRIC_ITEM_NAME: metrics})

    # ------------------------------------------------------------------------------------------ the root

    @property
    def _is_primary(self) -> bool:
        return is_primary(self._options.multiprocessing_options.primary_host)

    def _meet(self) -> None:
        """Let all processes come to this point."""
        if hosts.is_alone() or processes_of(self._options.multiprocessing_options) is not None:
            return
        with hosts.meeting("managers of checkpoints", None) as group:
            group.meet(b"", lambda _: b"")

    def _make_root(self) -> None:
        if self._options.create:
            if self._options.multiprocessing_options.active_processes is not None:
                raise NotImplementedError(
                    "Option `create=True` with `active_processes` set is not supported. Please "
                    "create the root directory "
                    "yourself."
                )
            if self._is_primary and not self._root.exists():
                make_directories(self._root)
                if (mode := getattr(self._options.file_options, "path_permission_mode", None)) is not None:
                    self._root.chmod(mode)
            self._meet()
        if self._options.cleanup_tmp_directories and self._is_primary:
            for name in step_lib.tmp_checkpoints(self._root):
                remove_checkpoint(LocalStore(self._root), name)

    def _save_root_metadata(self) -> None:
        """Write the metadata of the root once; an existing file stays."""
        file = self._root / ROOT_DIRECTORY / ROOT_FILE
        is_wanted = self._options.save_root_metadata and not self._options.read_only
        if self._given_metadata is None or not is_wanted:
            return
        if self._is_primary and not file.exists():
            text = json.dumps({"internal_metadata": {}, "custom_metadata": self._given_metadata})
            with replacing(file) as opened:
                opened.write(text.encode())
        self._meet()

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return self._directory

    # ----------------------------------------------------------------------------------------- the list

    def _listed(self) -> list[Any]:
        if not self._root.is_dir():
            return []
        found = self._names.find_all(self._directory)
        return sorted((_Info(one.step, on_disk(one.path)) for one in found), key=lambda info: info.step)

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """List the numbers of the steps; with `read`, after looking at the disk."""
        if read:
            self.reload()
        return [info.step for info in self._checkpoints]

    def latest_step(self) -> int | None:
        """Return the highest number; None without steps."""
        return max((info.step for info in self._checkpoints), default=None)

    def best_step(self) -> int | None:
        """Return the number of the best step by `best_fn`, of equal steps the later; without it the latest."""
        if self._options.best_fn is None:
            return self.latest_step()
        scored = [info for info in self._checkpoints if info.metrics is not None]
        scored.sort(
            key=lambda info: self._options.best_fn(info.metrics), reverse=self._options.best_mode == "min"
        )
        return scored[-1].step if scored else None

    def reload(self) -> None:
        """List the steps on the disk anew."""
        self._checkpoints = self._listed()

    def reached_preemption(self, step: int) -> bool:
        """Tell whether the job is about to be ended."""
        return reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Tell whether the rules save a step."""
        if self._options.read_only:
            logger.warning("%s is read only, save will be skipped", self._directory)
            return False
        latest = self.latest_step()
        if latest is not None and latest >= step:
            return False
        is_checked = self._options.enable_should_save_is_saving_in_progress_check
        context = policies.DecisionContext(
            is_saving_in_progress=is_checked and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        info = policies.CheckpointInfo(step, dt.datetime.now(dt.UTC))
        return bool(self._save_policy.should_save(info, previous_steps=self._checkpoints, context=context))

    # --------------------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save a step, if the rules say so, or with `force`. Return whether a save was started.

        Raise StepAlreadyExistsError if the step exists, and the error of the save before.
        """
        step = int(step)
        if items is None and args is None:
            raise ValueError("Must provide `args` for `save`.")
        if self._is_single is None:
            self._is_single = not isinstance(args, CompositeArgs)
        self._require_args(items, args)
        if not force and not self.should_save(step):
            return False
        self.reached_preemption(step)
        self.wait_until_finished()
        if step in self.all_steps():
            raise StepAlreadyExistsError(f"Checkpoint for step {step} already exists.")
        chosen = self._save_args(items, save_kwargs, args)
        if metrics is not None and not self._options.prevent_write_metrics:
            chosen[METRIC_ITEM_NAME] = args_lib.JsonSave(metrics)
        path = self._root / self._names.build_name(step)
        saving = Saving(path, self._settings, force=True)
        saving.begin(self._handler, CompositeArgs(**chosen), custom_metadata)
        self._checkpoints = [*self._checkpoints, _Info(step, path, is_new=True, metrics=metrics)]
        self._checkpoints.sort(key=lambda info: info.step)
        self._finish(step, saving, self._drop_old())
        self._log({"step": step, "event_type": "save", "directory": str(self._directory)})
        return True

    def _finish(self, step: int, saving: Saving, old: list[Any]) -> None:
        def remove_old() -> None:
            for info in old if self._is_primary else ():
                self._remove(info.path.name)

        self._saving = (step, saving)
        self._told.clear()
        if self._is_async:
            saving.run_in_background(remove_old)
            return
        try:
            saving.run(remove_old)
        except BaseException:
            self._forget(step)
            self._saving = None
            raise

    def _forget(self, step: int) -> None:
        self._checkpoints = [info for info in self._checkpoints if info.step != step]

    def _drop_old(self) -> list[Any]:
        """Take the steps that the rules drop from the list, and return them. Damaged steps stay, and do not count."""
        whole = [info for info in self._checkpoints if _keeps_all(self._keep_policy) or not info.is_damaged]
        kept = self._keep_policy.should_preserve(whole, context=policies.PreservationContext())
        old = [info for info, is_kept in zip(whole, kept, strict=True) if not is_kept]
        self._checkpoints = [info for info in self._checkpoints if info not in old]
        return old

    def _require_args(self, items: Any, args: Any) -> None:
        if isinstance(items, CheckpointArgs):
            raise ValueError(
                "Found an instance of `CheckpointArgs` provided for `items`. This may be due to "
                "misuse of the newer API - "
                "make sure to specify the argument keyword (e.g. `args=args`)."
            )
        if args is None:
            return
        if not isinstance(args, CheckpointArgs):
            raise ValueError(f"Expected args of type `CheckpointArgs`; found {type(args)}.")
        is_composite = isinstance(args, CompositeArgs)
        if self._is_single and is_composite:
            raise ValueError(
                "Cannot provide `args` of type `Composite` when dealing with a single, unnamed "
                "(default) checkpointable "
                "object."
            )
        if not self._is_single and not is_composite:
            raise ValueError(
                "Must provide `args` of type `Composite` when dealing with multiple checkpointable objects."
            )

    def _save_args(self, items: Any, save_kwargs: Any, args: Any) -> dict[str, Any]:
        if args is not None:
            return {DEFAULT_ITEM_NAME: args} if self._is_single else dict(args.items())
        items = {DEFAULT_ITEM_NAME: items} if self._is_single else items
        more = {DEFAULT_ITEM_NAME: save_kwargs} if self._is_single else save_kwargs or {}
        return {name: self._legacy(0, name, (item,), more.get(name)) for name, item in items.items()}

    def _legacy(self, number: int, name: str, given: Any, more: Any) -> Any:
        """Return the arguments of an item that an older form of the call names."""
        handler = self._handler.known.get(name)
        if handler is None:
            raise ValueError(
                f'Unknown key "{name}" in CompositeCheckpointHandler. Pass `args=`, or the handler of the item'
            )
        if not args_lib.has_registered_args(handler):
            return wrapped(*given, **(more or {}))
        return args_lib.get_registered_args_cls(handler)[number](*given, **(more or {}))

    # ------------------------------------------------------------------------------------------ restore

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Restore a step, None for the latest: the unnamed item, or the items by name. Raise FileNotFoundError if the
        step does not exist."""
        step = self._step_to_read(step, directory)
        path = self._path_to_read(step, directory)
        wait_for(path)
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint at {path} not found.")
        if self._is_single is None:
            self._is_single = (path / DEFAULT_ITEM_NAME).exists()
        self._require_args(items, args)
        found = self._handler.restore(
            path, args=CompositeArgs(**self._restore_args(items, restore_kwargs, args))
        )
        self._log({"step": step, "event_type": "restore", "directory": str(directory or self._directory)})
        return self._only(found)

    def _step_to_read(self, step: Any, directory: Any) -> int:
        if step is not None:
            return int(step)
        there = step_lib.checkpoint_steps(directory) if directory is not None else None
        latest = self.latest_step() if there is None else max(there, default=None)
        if latest is None:
            raise FileNotFoundError(f"No steps found in {directory or self._directory}.")
        return latest

    def _path_to_read(self, step: int, directory: Any = None) -> Path:
        root = self._root if directory is None else on_disk(directory)
        if self._saving is not None and self._saving[0] == step and directory is None:
            self._saving[1].done.wait()
        if self._options.step_name_format is not None:
            try:
                return on_disk(self._options.step_name_format.find_step(root, step).path)
            except ValueError as error:
                raise FileNotFoundError(str(error)) from error
        return root / self._names.build_name(step)

    def _restore_args(self, items: Any, restore_kwargs: Any, args: Any) -> dict[str, Any]:
        if args is not None:
            return {DEFAULT_ITEM_NAME: args} if self._is_single else dict(args.items())
        if items is None and restore_kwargs is None:
            return {}
        given = ({DEFAULT_ITEM_NAME: items} if self._is_single else items) if items is not None else {}
        more = ({DEFAULT_ITEM_NAME: restore_kwargs} if self._is_single else restore_kwargs) or {}
        names = {*given, *more}
        return {name: self._legacy(1, name, (given.get(name),), more.get(name)) for name in names}

    def _only(self, found: Any) -> Any:
        """Return the unnamed item of what was restored, if there is one."""
        if not self._is_single:
            return found
        if DEFAULT_ITEM_NAME not in found:
            raise ValueError(
                "Unable to retrieve default item. Please ensure that a handler for the default item "
                "is registered using "
                "`handler_registry` when initializing the `CheckpointManager`."
            )
        return found[DEFAULT_ITEM_NAME]

    # ----------------------------------------------------------------------------------------- metadata

    def metadata(self, step: int | None = None) -> Any:
        """Describe a step without reading its leaves; without a step, return the metadata of the root."""
        if step is None:
            return self._root_metadata()
        path = self._path_to_read(int(step))
        wait_for(path)
        found = self._handler.metadata(path)
        if self._is_single is None:
            self._is_single = (path / DEFAULT_ITEM_NAME).exists()
        metrics = read_json(path / METRIC_ITEM_NAME / METRIC_ITEM_NAME)
        return replace(found, item_metadata=self._only(found.item_metadata), metrics=metrics or found.metrics)

    def _root_metadata(self) -> RootMetadata:
        place = self._root / ROOT_DIRECTORY
        for name in (ROOT_FILE, ROOT_DIRECTORY):  # the second by an older version
            if isinstance(found := read_json(place / name), dict):
                if "custom_metadata" in found:
                    return RootMetadata(found.get("internal_metadata") or {}, found["custom_metadata"] or {})
                return RootMetadata({}, found)
        return RootMetadata({}, self._given_metadata or {} if self._options.read_only else {})

    def item_metadata(self, step: int) -> Any:
        """Describe the items of a step: the unnamed one, or all by name."""
        if step is None:
            raise ValueError(
                "`step` must be provided. `item_metadata` only exists at the checkpoint step level, not the root level."
            )
        found: StepMetadata = self.metadata(step)
        return found.item_metadata

    def metrics(self, step: int) -> Any:
        """Return the metrics of a step; None without."""
        try:
            return read_json(self._path_to_read(int(step)) / METRIC_ITEM_NAME / METRIC_ITEM_NAME)
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------------------------------- delete

    def delete(self, step: int) -> None:
        """Delete a step. Raise FileNotFoundError if it does not exist."""
        if self._options.read_only:
            logger.warning("%s is read only, delete will be skipped", self._directory)
            return
        if step not in self.all_steps():
            raise FileNotFoundError(f"Requested deleting a non-existent step: {step}.")
        path = self._path_to_read(int(step))
        wait_for(path)
        if self._is_primary:
            self._remove(path.name)
        self._meet()
        self._forget(step)

    def _remove(self, name: str) -> None:
        """Remove a step whole, or move it away. A step that is gone is no error."""
        if (folder := self._options.todelete_subdir) is None:
            with suppress(FileNotFoundError):
                remove_checkpoint(LocalStore(self._root), name)
            return
        place = self._root / folder
        make_directories(place)
        with suppress(FileNotFoundError):
            (self._root / name).rename(place / name)
            sync_directory(place)
            sync_directory(self._root)

    # --------------------------------------------------------------------------------------------- wait

    def wait_until_finished(self) -> None:
        """Wait for the save, and raise its error, in each waiting thread once."""
        if self._saving is not None:
            self._saving[1].done.wait()
            self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has ended. The step is no longer listed then."""
        if self._saving is None or not self._saving[1].done.is_set():
            return
        step, saving = self._saving
        if saving.error is None:
            return
        self._forget(step)
        if (thread := threading.current_thread()) not in self._told:
            self._told.add(thread)
            raise saving.error

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is under way."""
        return self._saving is not None and not self._saving[1].done.is_set()

    def close(self) -> None:
        """Wait for the save, and close the handlers."""
        try:
            self.wait_until_finished()
        finally:
            self._handler.close()

    def _log(self, entry: dict[str, Any]) -> None:
        if self._logger is not None:
            self._logger.log_entry(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keeps_all(policy: Any) -> bool:
    """Tell whether a policy keeps every step, so that no step has to be looked at."""
    if isinstance(policy, policies.AnyPreservationPolicy):
        return any(map(_keeps_all, policy.policies))
    return isinstance(policy, policies.LatestN) and policy.n is None


def _require_one_way(checkpointers: Any, item_names: Any, item_handlers: Any, handler_registry: Any) -> None:
    """Raise ValueError if the items are named in two ways."""
    given = {
        "checkpointers": bool(checkpointers),
        "item_names": item_names is not None and bool(item_names),
        "item_handlers": item_handlers is not None,
        "handler_registry": handler_registry is not None,
    }
    for one, other in (
        ("item_names", "checkpointers"),
        ("item_handlers", "checkpointers"),
        ("checkpointers", "handler_registry"),
        ("item_handlers", "handler_registry"),
        ("item_names", "handler_registry"),
    ):
        if given[one] and given[other]:
            raise ValueError(f"`{one}` and `{other}` are mutually exclusive - do not use together.")
    if given["item_names"] and isinstance(item_handlers, CheckpointHandler):
        raise ValueError(
            "`item_handlers` in default item mode and `item_names` should not be provided together."
        )
