"""Demonstrate eformer: save a training state, load it on another mesh, convert it, detect a flipped bit, and kill a
training run and resume it.

Tests: tests/cli/test_changes.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from click import echo
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.record.text import size
from eformer._version import __version__

if TYPE_CHECKING:
    from pathlib import Path

DEVICES = 8
STEPS, EVERY = 200, 10  # of the run


class AdamState(NamedTuple):
    steps: jax.Array
    mu: Any
    nu: Any


checkpoint.register_node(AdamState)  # lets checkpoints rebuild this namedtuple by its name


def run(folder: Path) -> None:
    """Write `step-100`, `step-200`, `hf` (other names), `damaged` and `run` to the folder, and print each result.

    `run` has 200 steps with metrics; step 120 is damaged.
    """
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
    kill_and_resume(folder / "run")
    damage_a_step(folder / "run")


def tell(what: str, text: str) -> None:
    """Print a line under a word in the margin. Wrap it at the width of the terminal, never in a word."""
    first, *others = text.split("\n")
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    for n, line in enumerate([first, *map(str.strip, others)]):
        margin = f"{'' if n else what:<10}"
        echo(textwrap.fill(line, width, initial_indent=margin, subsequent_indent=" " * 10, **_WHOLE_WORDS))


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


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
    tell("state", f"{len(leaves)} leaves, {size(nbytes)}, sharded by rows over {DEVICES} devices")


def save(state: Any, path: Path) -> None:
    pending, returned = timed(checkpoint.save_async, state, path, metadata={"run": "demo"})
    _, finished = timed(pending.result)
    tell("save", f"{returned} until training may continue, then {finished.strip()} until it is on disk")


def load(state: Any, path: Path, line: Mesh, grid: Mesh) -> None:
    loaded, took = timed(checkpoint.load, path, mesh=line)
    tell("load", f"{took} on the same mesh: {compare(loaded, state)}")
    rules = [("embedding", P("model", None)), ("kernel", P("data", "model"))]
    loaded, took = timed(checkpoint.load, path, mesh=grid, rules=rules)
    kernel = loaded["params"]["layers"][0]["kernel"]
    tell("reshard", f"{took} on a 2x4 mesh, kernels as {kernel.sharding.spec}: {compare(loaded, state)}")


def look_inside(path: Path) -> None:
    with checkpoint.open(path) as view:
        rows, took = timed(view["params.embedding"].__getitem__, slice(10, 20))
    tell("open", f"{took} for 10 rows of the embedding, {rows.shape[0]}x{rows.shape[1]} {rows.dtype}")


def compare_steps(state: Any, path: Path, later: Path) -> None:
    kernels = jax.tree.map(lambda x: x * 1.01, state["params"]["layers"])
    next_state = state | {"params": state["params"] | {"layers": kernels}, "step": 200}
    checkpoint.save(next_state, later, options=checkpoint.SaveOptions(reuse=path))
    found, took = timed(checkpoint.diff, path, later)
    tell("diff", f"{took} to the next step: {len(found.changed)} leaves changed, such as {found.changed[0]}")


def convert(path: Path, hf: Path) -> None:
    rules = [
        r"params\.layers\.(\d+)\.kernel -> model.layers.\1.weight | transpose",
        r"params\.embedding -> model.embed_tokens.weight",
        ".* ->",
    ]
    converted, took = timed(checkpoint.convert, path, hf, to="safetensors", rename=rules, dtype="bfloat16")
    leaf = next(leaf for leaf in converted.leaves[""] if leaf.how)
    tell("convert", f"{took} to bfloat16 safetensors under other names: {leaf}")


def refuse_another_model(state: Any, path: Path) -> None:
    like = jax.tree.map(lambda x: x, state)
    like["params"]["embedding"] = jax.ShapeDtypeStruct((50_000, 256), jnp.float16)
    like["params"]["layers"][0] = {"kernal": like["params"]["layers"][0]["kernel"]}
    echo("\nLoad into a model with another shape and a misspelt name:")
    tell("  error", refusal(checkpoint.load, path, like=like))


def catch_a_flipped_bit(path: Path, damaged: Path) -> None:
    checkpoint.convert(path, damaged, to="safetensors")
    flip_a_bit(damaged / "model.safetensors")
    echo("\nLoad and verify a copy with one flipped bit:")
    tell("  load", refusal(checkpoint.load, damaged))
    tell("  verify", str(checkpoint.verify(damaged)).splitlines()[-1].strip())


def kill_and_resume(path: Path) -> None:
    echo("\nKill a training run, and start it again:")
    killed_in = kill(path, after=110)
    began, state = train(path)
    tell(
        "  resume",
        f"killed in step {killed_in}, resumed from step {began}, with the data where they were then",
    )
    tell(
        "  state",
        f"at step {STEPS}, as in a run that was never killed: {compare(state, train_without_saves())}",
    )


def damage_a_step(path: Path) -> None:
    """Cut a file of a step in half, as a copy to a full disk does."""
    step = path / "step-120"
    os.truncate(step / "model.safetensors", (step / "model.safetensors").stat().st_size // 2)
    echo("\nCut a file of one step in half:")
    (damage, *_) = checkpoint.verify(step).damages
    tell("  verify", f"step-120: {damage}")


def kill(path: Path, after: int) -> int:
    """Train in another process, kill the process after this many steps, and return the step that it was in."""
    code = "import sys; from eformer import demo; demo.use_cpu(); demo.train(sys.argv[1], pause=0.004)"
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

    def __next__(self) -> Any:
        self.taken += 1
        return inputs(self.taken)

    def get_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def set_state(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@jax.jit
def inputs(seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), (16, 8))


def loss_of(w: jax.Array, batch: jax.Array, noise: Any = 0.0) -> Any:
    """Compare a linear model with a fixed one, whose outputs are noisy."""
    teacher = jax.random.normal(jax.random.key(2), (8, 8))
    return jnp.mean((batch @ w - batch @ teacher - noise) ** 2)


@jax.jit
def train_step(
    state: dict[str, jax.Array], batch: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the next state and the metrics."""
    key, now = jax.random.split(state["key"])
    noise = 0.3 * jax.random.normal(now, (16, 8))
    loss, gradient = jax.value_and_grad(loss_of)(state["w"], batch, noise)
    w = state["w"] - 0.1 * gradient
    return {"w": w, "key": key}, {"loss": loss, "eval.loss": loss_of(w, inputs(0))}


def first_state() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((8, 8)), "key": jax.random.key(1)}


def train(path: str | os.PathLike[str], pause: float = 0.0) -> tuple[int, dict[str, jax.Array]]:
    """Train a small model, from its last step if it has one. Return the first step, and the state.

    With a `pause` after each step, print the number of each step.
    """
    state, data = first_state(), Batches()
    with checkpoint.Run(path, every=EVERY) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began = run.step
        for step in range(began + 1, STEPS + 1):
            state, metrics = train_step(state, next(data))
            run.after(step, state, data=data, metrics=metrics)
            if pause:
                echo(step)
                time.sleep(pause)
    return began, state


def train_without_saves() -> dict[str, jax.Array]:
    state, data = first_state(), Batches()
    for _ in range(STEPS):
        state, _ = train_step(state, next(data))
    return state


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
