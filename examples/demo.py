"""Saves a small model's training state, loads it, and compares every bit. Run it with `make demo`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eformer
from eformer.pytree._serialization import get_serialization_info, load_from_file, save_to_file


class AdamState(NamedTuple):
    count: jax.Array
    mu: Any
    nu: Any


def training_state() -> dict[str, Any]:
    """Two layers in float32 with a bfloat16 embedding, an optimizer state, a random key, plain values."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (1000, 64), jnp.bfloat16),
        "layers": [{"kernel": jax.random.normal(k, (64, 64)), "bias": jnp.zeros(64)} for k in keys[1:]],
    }
    moments = jax.tree.map(lambda p: jax.random.normal(keys[0], p.shape, p.dtype), params)
    optimizer = AdamState(jnp.int32(100), moments, jax.tree.map(jnp.square, moments))
    return {
        "params": params,
        "optimizer": optimizer,
        "rng": keys[2],
        "schedule": (1e-3, "cosine", None),
        "step": 100,
    }


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype.name, np.asarray(leaf).tobytes()
    return leaf


def milliseconds(call: Any, *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call(*args)
    return result, 1e3 * (time.perf_counter() - start)


def refusal(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error).split(": ", 1)[1]
    raise SystemExit("this should have been refused")


def main() -> None:
    state = training_state()
    info = get_serialization_info(state)
    print(f"eformer {eformer.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(
        f"state    {info['num_leaves']} leaves, {info['memory_bytes']:,} bytes: {', '.join(info['dtypes'])}"
    )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.msgpack"
        _, saved = milliseconds(save_to_file, state, path)
        print(f"saved    {path.name}, {path.stat().st_size:,} bytes, {saved:.1f} ms, flushed to the disk")

        again, loaded = milliseconds(load_from_file, state, path)
        pairs = list(zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
        equal = sum(bits(a) == bits(b) for a, b in pairs)
        same_tree = jax.tree.structure(again) == jax.tree.structure(state)
        tree = "the same tree of dict, list, tuple and namedtuple" if same_tree else "another tree"
        print(f"loaded   {loaded:.1f} ms; {equal} of {len(pairs)} leaves equal bit for bit, in {tree}")
        draws = [jax.random.normal(s["rng"]).item() for s in (state, again)]
        print(f"random   the next number was {draws[0]:.6f}, after loading it is {draws[1]:.6f}")

        wrong = {**state, "params": jax.tree.map(lambda p: p.astype(jnp.float16), state["params"])}
        print("\nInto a float16 model:", refusal(load_from_file, wrong, path), sep="\n  ")
        path.write_bytes(path.read_bytes()[:-1000])
        print("\nFrom a file cut short:", refusal(load_from_file, state, path), sep="\n  ")

    if not (equal == len(pairs) and same_tree and draws[0] == draws[1]):
        raise SystemExit("what was loaded is not what was saved")


if __name__ == "__main__":
    main()
