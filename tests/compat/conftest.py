"""One file of every kind that other programs write."""

import numpy as np
import pytest

from support.samples import FILES, SAMPLES


@pytest.fixture(params=[*SAMPLES, "x.npz", "c.npz"])
def sample(request, tmp_path):
    path = tmp_path / request.param
    if path.suffix == ".npz":
        members = {"a.b": np.arange(6.0), "t": "text", "f": np.asfortranarray(np.arange(6).reshape(2, 3))}
        (np.savez if path.name == "x.npz" else np.savez_compressed)(path, **members)
    else:
        path.write_bytes((FILES / request.param).read_bytes())
    return path
