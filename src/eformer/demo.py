"""Demonstrate eformer: save a training state, load it on another mesh, convert it, detect a flipped bit, and kill a
training run and resume it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from click import echo
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._version import __version__

if TYPE_CHECKING:
    from pathlib import Path

DEVICES = 8


class AdamState(NamedTuple):
    steps: jax.Array
    mu: Any
    nu: Any


checkpoint.register_node(AdamState)  # lets checkpoints rebuild this namedtuple by its name


def run(folder: Path) -> None:
    """Write `step-100`, `step-200`, `hf` (other names), `damaged` and `run` to the folder, and print each result."""
    use_cpu()
    devices = np.array(jax.devices())
    line, grid = Mesh(devices, ("devices",)), Mesh(devices.reshape(2, 4), ("data", "model"))
    state = training_state(line)
    path, hf = folder / "step-100", folder / "hf"
    introduce(state)
    save(state, path)
    load(state, path, line, grid)
    look_inside(path)
    compare_steps(state, path, folder / "step-200")
    convert(path, hf)
    refuse_another_model(state, path)
    catch_a_flipped_bit(path, folder / "damaged")
    kill_and_resume(folder / "run", folder / "whole")


def use_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def training_state(mesh: Mesh) -> dict[str, Any]:
    """Create float32 layers sharded by rows, a bfloat16 embedding, an optimizer state, a PRNG key and plain values."""
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "embedding": jax.random.normal(keys[0], (32_000, 256), jnp.bfloat16),
        "layers": [{"kernel": jax.random.normal(k, (1024, 1024))} for k in keys[1:5]],
    }
    params = jax.device_put(params, NamedSharding(mesh, P("devices")))
    moments = jax.tree.map(jnp.square, params)
    optimizer = AdamState(jnp.int32(100), moments, jax.tree.map(jnp.square, moments))
    schedule = (1e-3, "cosine", None)
    return {"params": params, "optimizer": optimizer, "rng": keys[5], "schedule": schedule, "step": 100}


def introduce(state: Any) -> None:
    leaves = jax.tree.leaves(state)
    nbytes = sum(leaf.nbytes for leaf in leaves if hasattr(leaf, "nbytes"))
    echo(f"eformer {__version__}, jax {jax.__version__}, {DEVICES} virtual devices")
    echo(f"state     {len(leaves)} leaves, {nbytes / 1e6:.0f} MB, sharded by rows over {DEVICES} devices")


def save(state: Any, path: Path) -> None:
    pending, returned = timed(checkpoint.save_async, state, path, metadata={"run": "demo"})
    _, finished = timed(pending.result)
    echo(f"save      {returned} until training may continue, then {finished.strip()} until it is on disk")


def load(state: Any, path: Path, line: Mesh, grid: Mesh) -> None:
    loaded, took = timed(checkpoint.load, path, mesh=line)
    echo(f"load      {took} on the same mesh: {compare(loaded, state)}")
    rules = [("embedding", P("model", None)), ("kernel", P("data", "model"))]
    loaded, took = timed(checkpoint.load, path, mesh=grid, rules=rules)
    kernel = loaded["params"]["layers"][0]["kernel"]
    echo(f"reshard   {took} on a 2x4 mesh, kernels as {kernel.sharding.spec}: {compare(loaded, state)}")


def look_inside(path: Path) -> None:
    with checkpoint.open(path) as view:
        rows, took = timed(view["params.embedding"].__getitem__, slice(10, 20))
    echo(f"open      {took} for 10 rows of the embedding, {rows.shape[0]}x{rows.shape[1]} {rows.dtype}")


def compare_steps(state: Any, path: Path, later: Path) -> None:
    kernels = jax.tree.map(lambda x: x * 1.01, state["params"]["layers"])
    next_state = state | {"params": state["params"] | {"layers": kernels}, "step": 200}
    checkpoint.save(next_state, later, options=checkpoint.SaveOptions(reuse=path))
    found, took = timed(checkpoint.diff, path, later)
    echo(
        f"diff      {took} to the next step: {len(found.changed)} leaves changed, such as {found.changed[0]}"
    )


def convert(path: Path, hf: Path) -> None:
    rules = [
        r"params\.layers\.(\d+)\.kernel -> model.layers.\1.weight | transpose",
        r"params\.embedding -> model.embed_tokens.weight",
        ".* ->",
    ]
    converted, took = timed(checkpoint.convert, path, hf, to="safetensors", rename=rules, dtype="bfloat16")
    leaf = next(leaf for leaf in converted.leaves[""] if leaf.how)
    echo(f"convert   {took} to bfloat16 safetensors under other names: {leaf}")


def refuse_another_model(state: Any, path: Path) -> None:
    like = jax.tree.map(lambda x: x, state) | {"steps": 0}
    like["params"]["embedding"] = jax.ShapeDtypeStruct((50_000, 256), jnp.float16)
    echo("\nLoad into a model with other shapes:")
    echo("  " + refusal(checkpoint.load, path, like=like))


def catch_a_flipped_bit(path: Path, damaged: Path) -> None:
    checkpoint.convert(path, damaged, to="safetensors")
    flip_a_bit(damaged / "model.safetensors")
    echo("\nLoad and verify a copy with one flipped bit:")
    echo("  load:   " + refusal(checkpoint.load, damaged))
    echo("  verify: " + str(checkpoint.verify(damaged)).splitlines()[-1].strip())


def kill_and_resume(path: Path, whole: Path) -> None:
    echo("\nKill a training run, and start it again:")
    killed_in = kill(path, after=17)
    began, state = train(path, until=30)
    _, expected = train(whole, until=30)
    echo(f"  SIGKILL in step {killed_in}, then resumed from step {began}, with the data where they were then")
    echo(f"  at step 30, as in a run that was never killed: {compare(state, expected)}")


def kill(path: Path, after: int) -> int:
    """Train in another process, kill the process after this many steps, and return the step that it was in."""
    code = "import sys; from eformer import demo; demo.use_cpu(); demo.train(sys.argv[1], 10_000, pause=0.02)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:  # noqa: S603
        assert process.stdout is not None
        done = next((step for step in map(int, process.stdout) if step >= after), None)
        process.kill()
        last = max(map(int, process.stdout), default=done)  # steps that were done before the signal arrived
    if last is None or process.returncode != -signal.SIGKILL:
        raise SystemExit(f"the run ended before the signal, with code {process.returncode}")
    return last + 1


class Batches:
    """An iterator whose position is saved with each step."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> jax.Array:
        self.taken += 1
        return jax.random.normal(jax.random.key(self.taken), (16, 8))

    def get_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def set_state(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@jax.jit
def train_step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
    key, dropout = jax.random.split(state["key"])
    batch = batch * jax.random.bernoulli(dropout, 0.9, batch.shape)
    gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - batch) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "key": key}


def train(path: str | os.PathLike[str], until: int, pause: float = 0.0) -> tuple[int, dict[str, jax.Array]]:
    """Train a small model, from its last step if it has one. Return the first step, and the state.

    With a `pause` after each step, print the number of each step.
    """
    state, data = {"w": jnp.eye(8), "key": jax.random.key(1)}, Batches()
    with checkpoint.Run(path, every=5, keep=2) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began = run.step
        for step in range(began + 1, until + 1):
            state = train_step(state, next(data))
            run.after(step, state, data=data)
            if pause:
                echo(step)
                time.sleep(pause)
    return began, state


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype.name, np.asarray(leaf).tobytes()
    return leaf


def compare(loaded: Any, state: Any) -> str:
    pairs = list(zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True))
    equal = sum(bits(a) == bits(b) for a, b in pairs)
    same = bool(jax.tree.structure(loaded) == jax.tree.structure(state))  # type: ignore[operator]
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
    raise SystemExit("the call should have failed")
