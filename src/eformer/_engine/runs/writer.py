"""Make sure that a run has one writer: the job that began last."""

from __future__ import annotations

import datetime as dt
import logging
import os
import socket
from typing import TYPE_CHECKING

import jax
import msgspec

from eformer._engine.formats.find import later_of_flax
from eformer._engine.formats.left_out import holds_leaves
from eformer._engine.formats.run_steps import Claim, Rules, Step, steps_if_there
from eformer._engine.formats.steps import RUN_FILE, is_checkpoint, last_step_in
from eformer._engine.record.step_names import OF_ANY_PROGRAM, OF_RUN
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.runs.removed import forget_metrics_after
from eformer._engine.runs.retention import sweep_remains
from eformer._engine.stores.base import read_whole, update_file
from eformer._engine.stores.bucket_removal import ASIDE
from eformer._engine.stores.leases import LEASES
from eformer.errors import CorruptionError, NotFoundError, SupersededError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.stores.base import Kind, Store

logger = logging.getLogger("eformer")


class Writer:
    """The writer of a run. The first process writes the id of its job to `run.json`, and every commit checks that the
    file still has this id."""

    def __init__(self, store: Store, own_id: str, rules: Rules | None = None) -> None:
        self.store, self.id = store, own_id
        self._rules = _as_json(rules)
        self.has_claimed = False

    def look(self) -> Sequence[Step]:
        """Return the steps of a run that this job is about to begin. Raise as `claim` does, and change nothing."""
        found = steps_if_there(self.store.url)
        self._refuse_checkpoints(has_steps=bool(found))
        return found

    def claim(self) -> None:
        """Become the writer, in the first process. Remove the remains of jobs that died."""
        if self.has_claimed:
            return
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        has_steps = last_step_in(self.store) is not None
        self._refuse_checkpoints(has_steps=has_steps)  # before the claim, which ends the job that writes now

        def claimed(data: bytes | None) -> bytes:
            before = Claim.from_json(data) if has_steps else None
            resumed_from = before.resumed_from if before else None
            return Claim(self.id, socket.gethostname(), os.getpid(), now, resumed_from, self._rules).to_json()

        update_file(self.store, RUN_FILE, claimed, sweep=True)
        if not has_steps:  # removed by hand: the run starts anew
            forget_metrics_after(self.store, None)
        try:
            sweep_remains(self.store)
        except OSError as error:
            logger.warning("%s: the remains of dead jobs could not be removed: %s", self.store.url, error)
        self.has_claimed = True

    def note_resumed(self, step: int | None) -> None:
        """Record the step that the run goes on from, in the first process, so that `prune` keeps it, and forget the
        metrics of removed steps after it. None stands for a run that starts anew.

        Log a failure, and do not raise it: an open run remembers the step itself.
        """
        if jax.process_index() != 0:
            return

        def noted(data: bytes | None) -> bytes:
            if data is None:
                raise FileNotFoundError(f"{RUN_FILE} is gone")
            claim = Claim.from_json(data)
            if claim is None or claim.id != self.id:
                return data  # another job has taken over: the next save raises SupersededError
            return msgspec.structs.replace(claim, resumed_from=step).to_json()

        try:
            update_file(self.store, RUN_FILE, noted)
        except OSError as error:
            logger.warning(
                "%s: the step that it was resumed from could not be recorded: %s", self.store.url, error
            )
        forget_metrics_after(self.store, step)

    def _refuse_checkpoints(self, *, has_steps: bool) -> None:
        """Refuse a checkpoint as a run: it would be a run without steps. Refuse a directory whose newest checkpoint
        cannot be resumed from: the run would start from zero or an older step, and its steps would hide the newest."""
        if not has_steps and is_checkpoint(self.store):
            raise ValueError(
                f"{self.store.url} is a checkpoint, not a run. Pass the directory that contains the steps"
            )
        if name := later_of_flax(self.store) if has_steps else _step_of_others(self.store):
            raise FileExistsError(
                f"{self.store.url} holds checkpoints of another program ({name}), which a run cannot resume from; load "
                f"{self.store.path_to(name)}, and give the run a directory of its own"
            )

    def check(self) -> None:
        """Raise a SupersededError if another job has become the writer."""
        try:
            claim = Claim.from_json(read_whole(self.store, RUN_FILE)[0])
        except FileNotFoundError:
            raise NotFoundError(
                f"{self.store.path_to(RUN_FILE)} is gone: the run was removed or moved while this job wrote it. Start "
                "the job again to go on there"
            ) from None
        if claim is None:
            raise CorruptionError(
                f"{self.store.path_to(RUN_FILE)} is damaged: it does not say which job writes the run. Start the job "
                "again, which writes it anew"
            )
        if claim.id != self.id:
            raise SupersededError(
                f"{self.store.url} is written by another job since {claim.since}: process {claim.pid} on "
                f"{claim.host}. This job no longer saves; end it, or start it again to take the run over"
            )


_MOST_RULES = 2**14  # bytes, because every save reads the file again


def _as_json(rules: Rules | None) -> msgspec.Raw:
    """Return rules as JSON, which only pages read; null if they are long, or would be read as other rules: infinity has
    no place in JSON."""
    try:
        found = msgspec.json.encode(rules, enc_hook=lambda number: number.item())
        if len(found) <= _MOST_RULES and json_decoder(Rules).decode(found) == rules:
            return msgspec.Raw(found)
    except (AttributeError, TypeError, ValueError, OverflowError, *MALFORMED_JSON):
        pass
    return msgspec.Raw(b"null")


def _step_of_others(store: Store) -> str | None:
    """Return the name of the last checkpoint of another program, such as flax or T5X, in a directory without steps."""
    try:
        kinds = store.kinds()
    except FileNotFoundError:
        return None
    numbers = OF_ANY_PROGRAM.numbers(kinds)
    names = sorted(numbers, key=lambda name: (numbers[name], name), reverse=True)
    return next((name for name in names if _is_of_others(store, name, kinds[name])), None)


def _is_of_others(store: Store, name: str, kind: Kind) -> bool:
    """Tell whether a file or a directory with the name of a step may hold leaves that eformer did not write."""
    if kind == "file":  # a file `1` is a slip of the shell, as in 2>1
        return not name[0].isdecimal() and store.read(name, 0, 1)[1].nbytes > 0
    if "." in name or name.startswith(OF_RUN):  # the remains of a save of ours, or of a removal
        return False
    is_ours = kind == "directory" and any(
        inner == LEASES or ASIDE.fullmatch(inner) for inner in store.kinds(name)
    )
    return not is_ours and holds_leaves(store.at(name))
