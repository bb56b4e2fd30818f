"""A callback of Keras 3 on JAX, by which `model.fit` saves to a run and resumes from it. Imports keras.

Tests: tests/frameworks/test_keras.py, tests/frameworks/test_keras_runs.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import backend
from keras.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.runs.run import Run

__all__ = ["RunCallback"]


class RunCallback(Callback):  # type: ignore[misc]  # without types
    """Save the training of `model.fit` to a run, and resume it at the same batch, bit for bit.

        with checkpoint.Run("runs/mnist", every=500, keep=3) as run:
            model.fit(x, y, epochs=10, callbacks=[RunCallback(run)])
        if run.stopping:  # the job was told to end, and the last batch is saved
            sys.exit()

    run         a `Run`: its rules say at which batches steps are saved, and which steps stay
    epochs      also save at the end of every so many epochs, with the metrics of the validation; None for no epoch
    continues   the data go on from epoch to epoch, as those of a generator with `steps_per_epoch`

    A step has the weights, the optimizer, the compiled metrics, the epoch and the batch, and the state of the random
    numbers of numpy and Python, by which Keras shuffles. The number of a step counts batches.

    `fit` begins with the newest step of the run. The batches of the epoch before it are taken from the data again and
    not trained on, so each epoch must begin anew and give the same batches, as arrays and a `PyDataset` do. With
    `continues`, the batches of all epochs before it are taken, and the random numbers are not restored. Other callbacks
    hear of batches that are not trained on, and keep no state of their own.

    When the job is told to end, `fit` saves, stops after the batch, and returns. During a validation it saves at the
    end of the epoch.

    Attributes:

    run        the run
    """

    def __init__(self, run: Run, *, epochs: int | None = 1, continues: bool = False) -> None:
        super().__init__()
        if backend.backend() != "jax":
            raise RuntimeError(
                f"RunCallback needs Keras on JAX, and the backend is {backend.backend()!r}: set the environment "
                "variable KERAS_BACKEND=jax before keras is imported"
            )
        if epochs is not None and epochs < 1:
            raise ValueError(f"RunCallback(epochs={epochs}): epochs must be positive, or None")
        self.run = run
        self._epochs, self._continues = epochs, continues
        self._position = _Position()
        self._before_epoch = 0  # batches before this epoch
        self._resumed: _Resumed | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._resumed, self._position = None, _Position()
        found = self.run.resume(into=self.model, data=self._position)
        self._before_epoch = self.run.step - self._position.batch
        if found:
            earlier = self._before_epoch if self._continues else None
            self._resumed = _Resumed(self.model, self._position, earlier)
            self.model._initial_epoch = self._position.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._resumed and not self._resumed.has_begun:
            self._resumed.begin_epoch()
        else:
            self._position.begin(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._resumed and batch < self._resumed.batch:
            return
        self._position.batch = batch + 1
        self.run.after(self._step, self._state, data=self._position, metrics=_numbers(logs))
        self.model.stop_training |= self.run.stopping

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.run.stopping:  # the last batch is saved
            self.model.stop_evaluating = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.run.stopping:
            return
        if self._resumed:
            self._resumed.end_epoch()
        step, self._resumed = self._step, None
        self._position.begin(epoch + 1)
        self._before_epoch = step
        save: dict[str, Any] = {"data": self._position, "metrics": _numbers(logs)}
        if self.run.should_stop():
            self.run.after(step, self._state, **save)
            self.model.stop_training |= self.run.stopping
        elif self._epochs and (epoch + 1) % self._epochs == 0:
            self.run.save(step, self._state, **save)

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None

    @property
    def _step(self) -> int:
        return self._before_epoch + self._position.batch

    def _state(self) -> Any:
        """Return the model with its present variables: within an epoch, Keras holds their values elsewhere."""
        self.model.jax_state_sync()
        return self.model


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (logs or {}).items() if np.ndim(value) == 0}


@dataclass(slots=True)
class _Position:
    """The position of a training: the epoch, how many of its batches are done, and the random numbers at its start."""

    epoch: int = 0
    batch: int = 0
    randoms: tuple[Any, Any] = field(default_factory=lambda: (np.random.get_state(), random.getstate()))

    def begin(self, epoch: int) -> None:
        self.epoch, self.batch = epoch, 0
        self.randoms = (np.random.get_state(), random.getstate())

    def get_state(self) -> dict[str, Any]:
        numpy, python = self.randoms
        return {"keras": {"epoch": self.epoch, "batch": self.batch, "numpy": numpy, "python": python}}

    def set_state(self, state: Any) -> None:
        if not isinstance(state, dict) or not isinstance(found := state.get("keras"), dict):
            raise ValueError("the step has a position in other data: it was not saved by RunCallback")
        self.epoch, self.batch = found["epoch"], found["batch"]
        self.randoms = found["numpy"], found["python"]


class _Resumed:
    """The first epoch after a resume, whose first batches are taken from the data and not trained on.

    `earlier` is the number of batches of earlier epochs, in data that go on from epoch to epoch; otherwise None.
    """

    def __init__(self, model: Any, position: _Position, earlier: int | None) -> None:
        self.model, self.position, self.earlier = model, position, earlier
        self.batch, self.has_begun = position.batch, False
        self._left = 0
        self._metrics = [np.array(variable.value) for variable in model.metrics_variables]
        if self.batch % (each := model.steps_per_execution):
            raise ValueError(
                f"the step was saved after {self.batch} batches of an epoch, which is no multiple of "
                f"steps_per_execution={each}; compile the model as it was when the step was saved"
            )

    def begin_epoch(self) -> None:
        """Restore the random numbers and the metrics, which Keras has reset, and skip the first batches."""
        self.has_begun = True
        if self.earlier is None:
            numpy, python = self.position.randoms
            np.random.set_state(numpy)
            random.setstate(python)
        if self.batch:
            for variable, value in zip(self.model.metrics_variables, self._metrics, strict=True):
                variable.assign(value)
        if self.batch or self.earlier:
            self._skip()

    def end_epoch(self) -> None:
        """Raise ValueError if the epoch has fewer batches than are to be skipped."""
        if self._left:
            self.model.train_function = self._train
            raise self._too_short(self.batch - self._left)

    def _skip(self) -> None:
        """Replace the function by which the model trains on a batch, until enough batches are skipped."""
        self._train, self._left = self.model.train_function, self.batch
        self._logs = self.model.get_metrics_result()
        self.model.train_function = self._skip_or_train

    def _skip_or_train(self, state: Any, batches: Iterator[Any]) -> Any:
        self.model.train_function = self._train
        self._take(self.earlier or 0, batches)
        self.earlier = 0
        if not self._left:
            return self._train(state, batches)
        self._take(1, batches)
        for _ in range(self.model.steps_per_execution - 1):
            next(batches, None)
        self._left -= self.model.steps_per_execution
        if self._left:
            self.model.train_function = self._skip_or_train
        return self._logs, state

    def _take(self, count: int, batches: Iterator[Any]) -> None:
        for number in range(count):
            if next(batches, _END) is _END:
                raise self._too_short(number)

    def _too_short(self, number: int) -> ValueError:
        before = f"{self.earlier} batches of earlier epochs and " if self.earlier else ""
        return ValueError(
            f"the step was saved after {before}{self.batch} batches of epoch {self.position.epoch + 1}, and the data "
            f"end after {number}: pass the same data as before, and continues=True only for data that go on from epoch "
            "to epoch"
        )


_END = object()
