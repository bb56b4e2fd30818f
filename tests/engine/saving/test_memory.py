"""The memory that a save takes beyond the state."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import jax.numpy as jnp
from eformer import checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

checkpoint.save({"w": jnp.ones(8)}, sys.argv[1] + "/small", format=sys.argv[2])  # imports and compiles
state = {str(number): jnp.full((4 * 2**20,), number, jnp.float32) for number in range(12)}
before = peak()
checkpoint.save(state, sys.argv[1] + "/large", format=sys.argv[2])
print(peak() - before)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("fmt", ["safetensors", "zarr"])
def test_a_save_takes_little_memory_beside_the_state(tmp_path, fmt):
    command = [sys.executable, "-c", CODE, str(tmp_path), fmt]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 64  # MiB, for a state of 192 MiB
