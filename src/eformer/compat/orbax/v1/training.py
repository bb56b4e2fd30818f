"""`training.Checkpointer`: the steps of a run, by the rules of the newer generation.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Self

from eformer._engine.stores.checkpoints import remove_checkpoint
from eformer._engine.stores.durable import make_directories, replacing
from eformer._engine.stores.local import LocalStore
from eformer.compat.orbax import checkpoint_managers as policies
from eformer.compat.orbax import step as step_lib
from eformer.compat.orbax._alike import on_disk, to_path
from eformer.compat.orbax._saving import Saving, wait_for
from eformer.compat.orbax.checkpoint_manager import _Info
from eformer.compat.orbax.handlers import is_primary
from eformer.compat.orbax.metadata import ROOT_DIRECTORY, ROOT_FILE, read_json
from eformer.compat.orbax.multihost import reached_preemption
from eformer.compat.orbax.v1 import _functions as functions
from eformer.compat.orbax.v1 import errors
from eformer.compat.orbax.v1._context import Context, current
from eformer.compat.orbax.v1._metadata import CheckpointMetadata, tree_metadata

save_decision_policies = preservation_policies = policies

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
]


class RootMetadata:
    """The metadata of a directory of steps."""

    def __init__(self, directory: Any, custom_metadata: Any) -> None:
        self.directory, self.custom_metadata = directory, custom_metadata


class Checkpointer:
    """Save and load the steps of a directory. By default it saves whenever no save runs, and keeps all steps."""

    def __init__(
        self,
        directory: Any,
        *,
        context: Context | None = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        self._context = current(context)
        self._directory, self._root = to_path(directory), on_disk(directory)
        self._decides = save_decision_policy or policies.ContinuousCheckpointingPolicy()
        self._keeps = preservation_policy or policies.PreserveAll()
        self._names = step_name_format or step_lib.standard_name_format()
        self._saving: tuple[int, Saving] | None = None
        if is_primary(self._context.multiprocessing.primary_host):
            make_directories(self._root)
            self._write_root(custom_metadata)
            for name in step_lib.tmp_checkpoints(self._root) if cleanup_tmp_directories else ():
                remove_checkpoint(LocalStore(self._root), name)
        self.reload()

    def _write_root(self, custom_metadata: Any) -> None:
        file = self._root / ROOT_DIRECTORY / ROOT_FILE
        if custom_metadata is not None and not file.exists():
            with replacing(file) as opened:
                opened.write(
                    json.dumps({"internal_metadata": {}, "custom_metadata": custom_metadata}).encode()
                )

    # ----------------------------------------------------------------------------------------- the list

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return self._directory

    def reload(self) -> None:
        """List the steps on the disk anew."""
        found = self._names.find_all(self._directory)
        self._infos = sorted(
            (_Info(one.step, on_disk(one.path)) for one in found), key=lambda info: info.step
        )

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """The steps, in the order of their numbers."""
        return [self._described(info) for info in self._infos]

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The step of the highest number; None without steps."""
        return self._described(self._infos[-1]) if self._infos else None

    def _described(self, info: Any, metadata: Any = None) -> CheckpointMetadata:
        wait_for(info.path)
        found = functions.checkpoint_metadata(info.path, metadata, step=info.step, metrics=info.metrics)
        found.custom_metadata = found.custom_metadata or None
        return found

    def _info(self, step: Any) -> Any:
        if step is None:
            if not self._infos:
                raise errors.StepNotFoundError(f"No checkpoints found in {self._directory}.")
            return self._infos[-1]
        number = int(getattr(step, "step", step))
        if (found := next((info for info in self._infos if info.step == number), None)) is None:
            raise errors.StepNotFoundError(f"No checkpoint found at step {number}.")
        wait_for(found.path)
        return found

    # --------------------------------------------------------------------------------------------- save

    def should_save(self, step: int) -> bool:
        """Tell whether the rules save a step."""
        if self._infos and self._infos[-1].step >= step:
            return False
        context = policies.DecisionContext(
            is_saving_in_progress=self.is_saving_in_progress(),
            reached_preemption=reached_preemption(step),
            multiprocessing_options=self._context.multiprocessing,
        )
        info = policies.CheckpointInfo(step, dt.datetime.now(dt.UTC))
        return bool(self._decides.should_save(info, previous_steps=self._infos, context=context))

    def save(
        self, step: int, state: Any, *, checkpointable_name: str = functions.STATE, **options: Any
    ) -> bool:
        """Save a tree as a step. Return False if the rules do not save it."""
        return self.save_checkpointables(step, {checkpointable_name: state}, **options)

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = functions.STATE, **options: Any
    ) -> functions.AsyncResponse | None:
        """Save a tree as a step in the background. Return None if the rules do not save it."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables(self, step: int, checkpointables: dict[str, Any], **options: Any) -> bool:
        """Save several objects by name as a step. Return False if the rules do not save it."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return False if response is None else bool(response.result())

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> functions.AsyncResponse | None:
        """Save several objects by name as a step in the background. Return None if the rules do not save it."""
        step = int(step)
        is_there = any(info.step == step for info in self._infos)
        if not overwrite and not force and not self.should_save(step):
            if is_there:
                raise errors.StepAlreadyExistsError(f"Step {step} already exists.")
            return None
        if is_there and not overwrite:
            raise errors.StepAlreadyExistsError(f"Step {step} already exists.")
        self.wait()
        path = self._root / self._names.build_name(step)
        saving = functions.begin(
            path,
            checkpointables,
            self._context,
            overwrite=True,
            custom_metadata=custom_metadata,
            metrics=metrics,
            is_step=True,
        )
        kept = [info for info in self._infos if info.step != step]
        self._infos = sorted(
            [*kept, _Info(step, path, is_new=True, metrics=metrics)], key=lambda info: info.step
        )
        old = self._drop_old()
        self._saving = (step, saving)
        saving.run_in_background(lambda: self._remove(old))
        return functions.response(saving, True)

    def _drop_old(self) -> list[Any]:
        whole = [i for i in self._infos if isinstance(self._keeps, policies.PreserveAll) or not i.is_damaged]
        kept = self._keeps.should_preserve(whole, context=policies.PreservationContext())
        old = [info for info, is_kept in zip(whole, kept, strict=True) if not is_kept]
        self._infos = [info for info in self._infos if info not in old]
        return old

    def _remove(self, old: list[Any]) -> None:
        if is_primary(self._context.multiprocessing.primary_host):
            for info in old:
                functions.delete(info.path, missing_ok=True)

    # --------------------------------------------------------------------------------------------- load

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = functions.STATE
    ) -> Any:
        """Load the tree of a step; by default of the latest."""
        path = self._info(step).path
        return functions.load_tree(
            functions.place_of(path, checkpointable_name), abstract_state, self._context
        )

    def load_async(self, step: Any = None, abstract_state: Any = None) -> functions.AsyncResponse:
        """Load the tree of a step; `result` does so."""
        return functions.AsyncResponse(lambda _: self.load(step, abstract_state))

    def load_checkpointables(self, step: Any = None, abstract_checkpointables: Any = None) -> dict[str, Any]:
        """Load several objects of a step by name."""
        return functions.load_items(self._info(step).path, abstract_checkpointables, self._context)

    def load_checkpointables_async(self, step: Any = None, abstract: Any = None) -> functions.AsyncResponse:
        """Load several objects of a step; `result` does so."""
        return functions.AsyncResponse(lambda _: self.load_checkpointables(step, abstract))

    # ----------------------------------------------------------------------------------------- metadata

    def metadata(self, step: Any = None) -> CheckpointMetadata:
        """Describe the tree of a step without reading its leaves."""
        info = self._info(step)
        return self._described(info, tree_metadata(functions.place_of(info.path)))

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata:
        """Describe the objects of a step by name without reading their leaves."""
        info = self._info(step)
        found = functions.items_metadata(info.path)
        found.pop(functions.METRICS, None)
        return self._described(info, found)

    def root_metadata(self) -> RootMetadata:
        """Return the metadata of the directory."""
        found = read_json(self._root / ROOT_DIRECTORY / ROOT_FILE) or {}
        return RootMetadata(self._directory, found.get("custom_metadata"))

    # ----------------------------------------------------------------------------------- wait and delete

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is under way."""
        return self._saving is not None and not self._saving[1].done.is_set()

    def wait(self) -> None:
        """Wait for the save, and raise its error."""
        if self._saving is None:
            return
        step, saving = self._saving
        saving.done.wait()
        self._saving = None
        if saving.error is not None:
            self._infos = [info for info in self._infos if info.step != step]
            raise saving.error

    def delete(self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
        """Delete a step. Return False if it does not exist and `missing_ok`."""
        try:
            info = self._info(step)
        except errors.StepNotFoundError:
            if missing_ok:
                return False
            raise
        functions.delete(info.path, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        if checkpointable_name is None:
            self._infos = [one for one in self._infos if one is not info]
        return True

    def cancel(self, step: Any = None) -> None:
        """Let a save under way end: eformer does not interrupt it here."""

    def close(self) -> None:
        """Wait for the save."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    save_pytree, save_pytree_async, load_pytree, load_pytree_async = save, save_async, load, load_async
    pytree_metadata = metadata
