"""One file of every kind that other programs write."""

import numpy as np
import pytest

from support.samples import FILES, SAMPLES

NAMES = [*SAMPLES, "x.npz", "c.npz"]


@pytest.fixture(params=NAMES)
def sample(request, tmp_path):
    return made(tmp_path / request.param)


@pytest.fixture
def samples(tmp_path):
    """All of them."""
    return [made(tmp_path / name) for name in NAMES]


def made(path):
    if path.suffix == ".npz":
        members = {"a.b": np.arange(6.0), "t": "text", "f": np.asfortranarray(np.arange(6).reshape(2, 3))}
        (np.savez if path.name == "x.npz" else np.savez_compressed)(path, **members)
    else:
        path.write_bytes((FILES / path.name).read_bytes())
    return path
