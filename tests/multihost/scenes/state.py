"""What the processes of a job save: arrays on all devices, and what every process has for itself."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = {
    "rows": ((64, 8), "float32", P("x")),
    "columns": ((8, 64), "bfloat16", P(None, ("x", "y"))),
    "both": ((16, 12, 3), "int32", P("x", "y")),
    "inner": ((8, 4), "float8_e4m3fn", P("y")),
    "everywhere": ((5, 3), "float32", P()),
    "large": ((1024, 600), "float32", P(None, "y")),
    "odd": ((7,), "uint8", P()),
    "scalar": ((), "float32", P()),
    "empty": ((0, 4), "float32", P("x")),
    "bits": ((8, 8), "int4", P("x")),
}


def whole(name, version=0):
    """All of a leaf, in host memory: every bit pattern, among them nan and -0.0."""
    shape, dtype, _ = SHAPES[name]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    seed = version * 1000 + list(SHAPES).index(name)
    if kind.itemsize == 1 and dtype == "int4":
        return np.random.default_rng(seed).integers(-8, 8, shape).astype(kind)
    size = int(np.prod(shape)) * kind.itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(kind).reshape(shape)


def mesh():
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(-1, 2 if devices.size % 2 == 0 else 1), ("x", "y"))


def put(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def tree(version=0):
    """Arrays on all devices, and what every process has for itself, different in each."""
    me = jax.process_index()
    leaves = {
        name: put(whole(name, version), NamedSharding(mesh(), spec)) for name, (_, _, spec) in SHAPES.items()
    }
    return {
        "global": leaves,
        "numpy": np.arange(5, dtype=np.int32) + 100 * version + 1000 * me,
        "local": jnp.arange(3.0) + 100 * version + 1000 * me,
        "number": version,
        "text": "text",
        "none": None,
        "tuple": (np.float32(version), [np.ones(2, np.int16)]),
    }


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def check(loaded, version=0):
    """Every shard of this process, bit for bit; and what was the first process's."""
    for name, leaf in loaded["global"].items():
        expected = whole(name, version)
        assert leaf.dtype == expected.dtype, name
        for shard in leaf.addressable_shards:
            assert bits(np.asarray(shard.data)) == bits(expected[shard.index]), (name, shard.index)
    np.testing.assert_array_equal(loaded["numpy"], np.arange(5) + 100 * version)
    np.testing.assert_array_equal(np.asarray(loaded["local"]), np.arange(3.0) + 100 * version)
    assert loaded["number"] == version
    assert loaded["text"] == "text"
    assert loaded["none"] is None
    assert loaded["tuple"][0] == np.float32(version)
    assert type(loaded["tuple"]) is tuple


def format_of(path):
    return {"format": "tensorstore" if "tensorstore" in Path(path).name else "safetensors"}


def state_nbytes():
    return sum(whole(name).nbytes for name in SHAPES)
