"""Write the samples of this directory with Keras, and beside each the arrays that h5py reads of it.

Run it in an environment with Keras (3.15.1 wrote the samples), JAX and h5py: python tests/compat/keras/write.py
"""

import io
import os
import zipfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import h5py
import keras
import numpy as np

HERE = Path(__file__).parent


def model(dtype="float32"):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((4,)),
        keras.layers.Dense(3, name="first", dtype=dtype),
        keras.layers.Dense(2, dtype="float16"),
    ]
    return keras.Sequential(layers)


def read(path):
    """Read all datasets with h5py: path, dtype, shape and bytes of each."""
    source = path
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(archive.read("model.weights.h5"))
    found = {}

    def add(name, each):
        if isinstance(each, h5py.Dataset):
            dtype = each.attrs.get("dtype", each.dtype.name)
            key = f"{name}|{dtype}|{list(each.shape)}".replace("/", ":")  # as a member of a zip archive
            found[key] = np.frombuffer(each[()].tobytes(), np.uint8)

    with h5py.File(source) as file:
        file.visititems(add)
    return found


if __name__ == "__main__":
    trained = model()
    trained.compile("sgd", "mse")
    trained.fit(np.zeros((2, 4)), np.zeros((2, 2)), verbose=0)
    trained.save(HERE / "model.keras")
    trained.save(HERE / "legacy.h5")
    model("bfloat16").save_weights(HERE / "model.weights.h5")
    for name in ("model.keras", "legacy.h5", "model.weights.h5"):
        np.savez_compressed(HERE / f"{name}.npz", **read(HERE / name))
