"""A training of Keras that is killed goes on as if nothing had happened: `eformer.keras`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from eformer import checkpoint
from eformer.keras import RunCallback

X = np.linspace(-1, 1, 200, dtype=np.float32).reshape(50, 4)
Y = np.sin(X[:, :3])


class At(keras.callbacks.Callback):
    """Do something after a number of batches, and count the batches."""

    def __init__(self, number, harm):
        super().__init__()
        self.number, self.harm, self.done = number, harm, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.number:
            self.harm()


def model(seed=0, **how):
    keras.utils.set_random_seed(seed)
    middle = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    made = keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(3)])
    made.compile(optimizer="adam", loss="mse", metrics=["mae"], **how)
    return made


def trained(path, scene="shuffled", number=0, harm=None, seed=0):
    """Train as a scene says, from weights and random numbers of a seed. Return the variables, the logs of the last epoch, and the run."""
    how = {"every": 1, "compile": {}, "callback": {}, "fit": {}, **SCENES[scene]}
    made, at = model(seed, **how["compile"]), At(number, harm)
    with checkpoint.Run(path, every=how["every"], keep=3) as run:
        callbacks = [RunCallback(run, epochs=None, **how["callback"]), at]
        data = {"x": X, "y": Y, "batch_size": 8} if "data" not in how else {"x": how["data"]()}
        data |= {"validation_data": (X[:9], Y[:9]), **how["fit"]}
        history = made.fit(**data, epochs=3, verbose=0, callbacks=callbacks).history
    values = [np.asarray(variable) for variable in (*made.variables, *made.optimizer.variables)]
    return values, {name: logs[-1:] for name, logs in history.items()}, run


def batches():
    for i in range(10**6):
        yield X[i % 40 : i % 40 + 8], Y[i % 40 : i % 40 + 8]


SCENES = {
    "shuffled": {},
    "in order": {"fit": {"shuffle": False}},
    "several batches in a step": {"compile": {"steps_per_execution": 2}, "every": 2},
    "a generator": {
        "data": batches,
        "fit": {"steps_per_epoch": 7, "shuffle": False},
        "callback": {"continues": True},
    },
}


def killed(path, scene, number):
    """Train in another process, which is killed after a number of batches, whose steps are saved."""
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_keras_runs as t\n"
        "from eformer import checkpoint\n"
        f"t.trained({str(path)!r}, {scene!r}, {number}, lambda: (checkpoint.wait(), os._exit(9)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 9


def assert_same(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    ("scene", "number"),
    [("shuffled", 17), ("in order", 7), ("several batches in a step", 6), ("a generator", 10)],
)
def test_a_training_that_is_killed_goes_on_at_the_same_batch(tmp_path, scene, number):
    killed(tmp_path / "killed", scene, number)
    assert checkpoint.steps(tmp_path / "killed")
    assert_same(trained(tmp_path / "killed", scene, seed=1), trained(tmp_path / "whole", scene))


def test_a_training_that_is_told_to_end_saves_and_returns(tmp_path):
    def told():
        os.kill(os.getpid(), signal.SIGTERM)

    run = trained(tmp_path / "told", number=3, harm=told)[2]
    assert (run.stopping, [step.number for step in checkpoint.steps(run.path)][-1]) == (True, 4)
    assert_same(trained(tmp_path / "told", seed=1), trained(tmp_path / "whole"))


def test_a_run_that_is_done_trains_no_more(tmp_path):
    found = trained(tmp_path / "run")
    again = trained(tmp_path / "run", seed=1)
    assert again[2].step == 21
    assert_same(again, found)


def test_an_epoch_is_saved_with_the_metrics_of_its_validation(tmp_path):
    with checkpoint.Run(tmp_path / "run", keep=checkpoint.Keep(best=1, by="val_loss")) as run:
        history = (
            model()
            .fit(
                X,
                Y,
                batch_size=8,
                epochs=4,
                verbose=0,
                validation_data=(X, Y),
                callbacks=[RunCallback(run, epochs=2)],
            )
            .history
        )
    metrics = {step.number: step.metrics for step in checkpoint.steps(run.path)}
    assert metrics[28]["val_loss"] == history["val_loss"][-1]
    assert (
        checkpoint.best(run.path)
        == f"{run.path}/step-{14 if history['val_loss'][1] < history['val_loss'][3] else 28}"
    )
    loaded = checkpoint.load(run.path, into=model())
    np.testing.assert_array_equal(loaded.evaluate(X, Y, batch_size=8, verbose=0)[0], history["val_loss"][-1])


def test_data_that_end_before_the_step_are_an_error(tmp_path):
    trained(tmp_path / "run", number=3, harm=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with (
        checkpoint.Run(tmp_path / "run") as run,
        pytest.raises(ValueError, match=r"after 4 batches of epoch 1, .* end after 2"),
    ):
        model().fit(X[:9], Y[:9], batch_size=8, verbose=0, callbacks=[RunCallback(run)])
    with (
        checkpoint.Run(tmp_path / "run") as run,
        pytest.raises(ValueError, match="no multiple of steps_per_execution=3"),
    ):
        model(steps_per_execution=3).fit(X, Y, batch_size=8, verbose=0, callbacks=[RunCallback(run)])


def test_a_step_that_the_callback_did_not_save_is_an_error(tmp_path):
    class Data:
        def get_state(self):
            return {"taken": 3}

        def set_state(self, state):
            pass

    with checkpoint.Run(tmp_path / "run") as run:
        run.save(3, model(), data=Data())
    with checkpoint.Run(tmp_path / "run") as run, pytest.raises(ValueError, match="not saved by RunCallback"):
        model().fit(X, Y, verbose=0, callbacks=[RunCallback(run)])
    with pytest.raises(ValueError, match="epochs must be positive"):
        RunCallback(run, epochs=0)


def test_other_backends_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer.keras.backend.backend", lambda: "torch")
    with pytest.raises(
        RuntimeError, match=r"needs Keras on JAX, and the backend is 'torch': set .* KERAS_BACKEND=jax"
    ):
        RunCallback(checkpoint.Run(tmp_path / "run"))


def test_eformer_imports_no_keras():
    code = "import eformer, eformer.checkpoint as c, sys; c.Run; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
