"""One training run with saves in the background, in a process of its own; prints the seconds of every step, as JSON.

    python bench/run_steps.py none|eformer|orbax DIRECTORY

Every step changes the whole state, so that no system can leave out what it has saved before. Both systems are called
after every step, as their documents show it, and decide by themselves; both keep the last two.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, EVERY, WARM = 400, 50, 60  # the first steps compile, and hold the first save
LEAVES, WIDTH = 16, 1024  # 67 MB of float32


@jax.jit
def train(state: Any) -> Any:
    moved = jax.tree.map(lambda w: 0.999 * w + 1e-3 * jnp.tanh(w), state["w"])
    return {"w": moved, "step": state["step"] + 1}


def fresh() -> Any:
    keys = jax.random.split(jax.random.key(0), LEAVES)
    return {"w": [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys], "step": jnp.int32(0)}


def with_none(_: str) -> tuple[Callable[[int, Any], object], Callable[[], None]]:
    return lambda step, state: None, lambda: None


def with_eformer(folder: str) -> tuple[Callable[[int, Any], object], Callable[[], None]]:
    from eformer import checkpoint

    run = checkpoint.Run(folder, every=EVERY, keep=2)
    return run.after, run.wait


def with_orbax(folder: str) -> tuple[Callable[[int, Any], object], Callable[[], None]]:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2)
    manager = ocp.CheckpointManager(folder, options=options)
    return lambda step, state: manager.save(step, args=ocp.args.StandardSave(state)), manager.close


SYSTEMS = {"none": with_none, "eformer": with_eformer, "orbax": with_orbax}


def main(system: str, folder: str) -> None:
    state = fresh()
    after, wait = SYSTEMS[system](folder)
    seconds = []
    for step in range(1, WARM + STEPS + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(train(state))
        after(step, state)
        seconds.append(time.perf_counter() - began)
    wait()
    print(json.dumps(seconds[WARM:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
