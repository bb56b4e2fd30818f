"""Writes the samples of this directory, with flax and equinox: see README.md."""

import json
from pathlib import Path

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).parent
DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip


def state():
    arrays = {name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name)) for name in DTYPES}
    small = {"float8_e4m3fn": jnp.ones(3, jnp.float8_e4m3fn), "int4": jnp.arange(4, dtype=jnp.int4)}
    plain = {
        "none": None,
        "list": [1, 2.5, "text", b"bytes", True],
        "complex": 1 + 2j,
        "scalar": np.float32(1.5),
    }
    return {
        "params": {**arrays, **small}, "plain": plain, "empty": {"array": np.zeros((0, 3)), "dict": {}},
        "step": np.asarray(7),
    }  # fmt: skip


def model():
    module = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.PRNGKey(0))
    numbers = {
        "bool": True,
        "int": 3,
        "float": 1.5,
        "complex": 1 + 2j,
        "scalar": np.float32(2.5),
        "none": None,
    }
    arrays = {"bfloat16": jnp.ones((2, 3), jnp.bfloat16), "numpy": np.arange(3.0), "empty": jnp.zeros((0, 2))}
    arrays["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    return {"module": module, "numbers": numbers, "arrays": arrays, "text": "kept, not stored"}


def main():
    (HERE / "flax.msgpack").write_bytes(flax.serialization.msgpack_serialize(state()))
    flax.serialization.MAX_CHUNK_SIZE = 64
    weights = {"w": jnp.arange(100.0).reshape(4, 25), "bias": jnp.ones(3)}
    (HERE / "flax_chunked.msgpack").write_bytes(flax.serialization.to_bytes({"params": weights}))
    eqx.tree_serialise_leaves(HERE / "equinox.eqx", model())
    with (HERE / "equinox_with_line.eqx").open("wb") as file:
        file.write((json.dumps({"width": 4, "depth": 2}) + "\n").encode())
        eqx.tree_serialise_leaves(file, model())


if __name__ == "__main__":
    main()
