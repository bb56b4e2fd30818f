"""Train a small model for 300 steps. Kill it at any moment, and start it again: the loss goes on as if nothing was.

python examples/run.py runs/small
"""

import sys
import time

import jax
import jax.numpy as jnp

from eformer import checkpoint

STEPS = 300


class Batches:
    """Numbers that depend on how many were taken before, which is all that has to be saved."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> jax.Array:
        self.taken += 1
        return jax.random.normal(jax.random.key(self.taken), (64, 8))

    def get_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def set_state(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def loss_of(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"] - batch.sum(1)) ** 2)


@jax.jit
def train_step(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), loss


def main(path: str, pause: float) -> None:
    params = {"w": jax.random.normal(jax.random.key(0), (8, 16)) / 4, "v": jnp.zeros(16)}
    data = Batches()
    with checkpoint.Run(path, every=10, keep=2) as run:
        if found := run.resume(like=params, data=data):
            params = found.tree
        print(f"begins at step {run.step}", flush=True)
        for step in range(run.step, STEPS):
            params, loss = train_step(params, next(data))
            run.after(step + 1, params, data=data, metrics={"loss": loss})
            print(f"step {step + 1} loss {loss:.9f}", flush=True)
            if run.stopping:
                print("told to end", flush=True)
                return
            time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.02)
