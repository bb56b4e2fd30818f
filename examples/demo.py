"""Saves a small training state, loads it on another mesh, and catches a flipped bit. Run it with `make demo`."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eformer
from eformer import checkpoint

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices


class AdamState(NamedTuple):
    count: jax.Array
    mu: Any
    nu: Any


checkpoint.register_node(AdamState)  # a namedtuple of ours: checkpoints may build it again by its name


def training_state(mesh: Mesh) -> dict[str, Any]:
    """Layers in float32, sharded by rows; a bfloat16 embedding; an optimizer state, a random key, plain values."""
    keys = jax.random.split(jax.random.key(0), 6)
    rows = NamedSharding(mesh, P("devices"))
    params = {
        "embedding": jax.random.normal(keys[0], (32_000, 256), jnp.bfloat16),
        "layers": [{"kernel": jax.random.normal(k, (1024, 1024))} for k in keys[1:5]],
    }
    params = jax.device_put(params, rows)
    moments = jax.tree.map(jnp.square, params)
    optimizer = AdamState(jnp.int32(100), moments, jax.tree.map(jnp.square, moments))
    return {
        "params": params,
        "optimizer": optimizer,
        "rng": keys[5],
        "schedule": (1e-3, "cosine", None),
        "step": 100,
    }


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype.name, np.asarray(leaf).tobytes()
    return leaf


def compare(loaded: Any, state: Any) -> str:
    pairs = list(zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True))
    equal = sum(bits(a) == bits(b) for a, b in pairs)
    same = jax.tree.structure(loaded) == jax.tree.structure(state)
    return f"{equal} of {len(pairs)} leaves equal bit for bit, in {'the same' if same else 'another'} tree"


def timed(call: Any, *args: Any, **options: Any) -> tuple[Any, str]:
    start = time.perf_counter()
    result = call(*args, **options)
    return result, f"{1e3 * (time.perf_counter() - start):6.1f} ms"


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as data:
        data.seek(-5_000_000, os.SEEK_END)
        (byte,) = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1]))


def refusal(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    raise SystemExit("this should have been refused")


def main() -> None:
    devices = np.array(jax.devices())
    line, grid = Mesh(devices, ("devices",)), Mesh(devices.reshape(2, 4), ("data", "model"))
    state = training_state(line)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    print(
        f"eformer {eformer.__version__}, jax {jax.__version__}, {len(devices)} {devices[0].device_kind} devices"
    )
    print(
        f"state     {len(jax.tree.leaves(state))} leaves, {nbytes / 1e6:.0f} MB, sharded by rows over 8 devices"
    )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-100"
        pending, returned = timed(checkpoint.save_async, state, path, metadata={"run": "demo"})
        _, finished = timed(pending.result)
        print(
            f"save      {returned} until training may go on, then {finished.strip()} until it is on the disk"
        )

        loaded, took = timed(checkpoint.load, path, mesh=line)
        print(f"load      {took} on the same mesh: {compare(loaded, state)}")
        rules = [("embedding", P("model", None)), ("kernel", P("data", "model"))]
        loaded, took = timed(checkpoint.load, path, mesh=grid, rules=rules)
        kernel = loaded["params"]["layers"][0]["kernel"]
        print(f"reshard   {took} on a 2x4 mesh, kernels as {kernel.sharding.spec}: {compare(loaded, state)}")
        with checkpoint.open(path) as view:
            rows, took = timed(view["params.embedding"].__getitem__, slice(10, 20))
        print(f"open      {took} for 10 rows of the embedding, {rows.shape[0]}x{rows.shape[1]} {rows.dtype}")

        print("\nInto a model of other shapes:")
        like = jax.tree.map(lambda x: x, state) | {"steps": 0}
        like["params"]["embedding"] = jax.ShapeDtypeStruct((50_000, 256), jnp.float16)
        print("  " + refusal(checkpoint.load, path, like=like))
        print("\nOne bit flipped on the disk:")
        flip_a_bit(path / "model.safetensors")
        print("  load:   " + refusal(checkpoint.load, path))
        print("  verify: " + str(checkpoint.verify(path)).splitlines()[-1].strip())


if __name__ == "__main__":
    main()
