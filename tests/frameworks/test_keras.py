"""Models of Keras 3 on JAX: saved with their optimizer, loaded in place."""

import keras
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import MismatchError, StructureError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
Y = np.ones((6, 3), np.float32)


def model(seed, width=8):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(width, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, name="head"),
    ]
    made = keras.Sequential([keras.Input((4,)), *layers])
    made.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return made


def train(made, epochs=2):
    made.fit(X, Y, epochs=epochs, batch_size=6, shuffle=False, verbose=0)
    return made


def variables(made):
    return [np.asarray(variable) for variable in (*made.variables, *made.optimizer.variables)]


def assert_same(found, expected):
    for a, b in zip(variables(found), variables(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def trained():
    return train(model(0))


@pytest.fixture
def path(trained, tmp_path):
    return checkpoint.save(trained, tmp_path / "model")


def test_a_load_updates_the_model_in_place(path, trained):
    other = model(1)
    assert checkpoint.load(path, into=other) is other
    assert_same(other, trained)
    np.testing.assert_array_equal(other.predict(X, verbose=0), trained.predict(X, verbose=0))


def test_training_goes_on_bit_for_bit(path, trained):
    other = model(1)
    checkpoint.load(path, into=other)
    assert_same(train(other), train(trained))
    assert int(other.optimizer.iterations) == 4


def test_a_model_in_a_tree(trained, tmp_path):
    checkpoint.save({"model": trained, "epoch": 2}, tmp_path / "run")
    other = {"model": model(1), "epoch": 0}
    tree = checkpoint.load(tmp_path / "run", into=other)
    assert tree["epoch"] == 2
    assert_same(tree["model"], trained)


def test_names_do_not_tell_how_many_models_came_before(path):
    names = {name for name in checkpoint.open(path) if not name.startswith("metrics_variables")}
    assert {
        "trainable_variables.sequential.dense.kernel",
        "trainable_variables.sequential.head.bias",
        "non_trainable_variables.sequential.batch_normalization.moving_mean",
        "optimizer_variables.adam.iteration",
        "optimizer_variables.adam.sequential_dense_kernel_momentum",
    } <= names
    assert not any(part[-1].isdigit() for name in names for part in name.split("."))


def test_layers_without_names_are_told_by_their_order(tmp_path):
    def two(seed):
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])

    first = two(0)
    checkpoint.save(first, tmp_path / "two")
    loaded = checkpoint.load(tmp_path / "two", into=two(1))  # neither has been compiled
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), first.predict(X, verbose=0))


def test_a_model_can_only_be_loaded_in_place(path):
    with pytest.raises(
        StructureError, match=r"can only be loaded in place: pass into=model instead of like="
    ):
        checkpoint.load(path, like=model(1))


def test_a_difference_names_the_leaves_and_changes_nothing(path):
    other = model(1, width=9)
    with pytest.raises(
        MismatchError, match=r"dense.kernel': expected float32\[4, 9\], found float32\[4, 8\]"
    ):
        checkpoint.load(path, into=other)
    for found, expected in zip(other.weights, model(1, width=9).weights, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_the_weights_alone_for_another_optimizer(path, trained):
    other = model(1)
    other.compile(optimizer=keras.optimizers.SGD(momentum=0.9), loss="mse")
    report = checkpoint.load(path, into=other, partial=True, return_report=True)[1]
    assert all("optimizer" in name or "metrics" in name for name in report.kept)
    np.testing.assert_array_equal(other.predict(X, verbose=0), trained.predict(X, verbose=0))


# --------------------------------------------------------------------------- metrics that are not built yet


def measured(seed):
    made = model(seed)
    made.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse", metrics=["mae"])
    return made


def two_headed(seed):
    keras.utils.set_random_seed(seed)
    inner = keras.Input((4,))
    heads = [keras.layers.Dense(3, name=name)(inner) for name in ("one", "other")]
    made = keras.Model(inner, heads)
    made.compile(optimizer="adam", loss=["mse", "mae"], metrics=[["mae"], ["mse"]])
    return made


def train_two(made):
    made.fit(X, [Y, Y], epochs=2, batch_size=6, shuffle=False, verbose=0)
    return made


@pytest.mark.parametrize(("make", "train"), [(measured, train), (two_headed, train_two)])
def test_metrics_that_are_not_built_yet_do_not_stop_a_resume(make, train, tmp_path, caplog):
    trained = train(make(0))
    with checkpoint.Run(tmp_path) as run:
        run.save(2, trained)
    other = make(1)
    with checkpoint.Run(tmp_path) as run:
        found = run.resume(into=other)
    assert (found.tree, found.step, caplog.text) == (other, 2, "")
    assert any("mean_absolute_error" in name for name in found.report.left_out)
    assert_same(train(other), train(trained))


def test_metrics_that_were_not_built_when_they_were_saved_do_not_stop_a_resume(tmp_path):
    checkpoint.save(measured(0), tmp_path / "fresh")
    other = train(measured(1))
    report = checkpoint.load(tmp_path / "fresh", into=other, return_report=True)[1]
    assert report.kept
    assert all(name.startswith("metrics_variables") for name in report.kept)
    np.testing.assert_array_equal(other.predict(X, verbose=0), measured(0).predict(X, verbose=0))


def test_metrics_that_are_built_are_loaded(tmp_path):
    trained = train(measured(0))
    checkpoint.save({"model": trained}, tmp_path / "run")
    other = train(measured(1))
    checkpoint.load(tmp_path / "run", into={"model": other})
    assert_same(other, trained)
    np.testing.assert_array_equal(other.get_metrics_result()["mae"], trained.get_metrics_result()["mae"])


def test_only_metrics_may_be_left_out_of_a_model_that_is_not_built_yet(tmp_path):
    checkpoint.save({"model": train(measured(0)), "more": 1}, tmp_path / "run")
    with pytest.raises(MismatchError, match=r"`into`: unexpected leaf 'more'") as caught:
        checkpoint.load(tmp_path / "run", into={"model": measured(1)})
    assert "metrics_variables" not in str(caught.value)
