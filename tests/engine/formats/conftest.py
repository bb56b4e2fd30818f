"""Weights of a small model."""

import numpy as np
import pytest


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {
        m: {n: rng.standard_normal((5, 7)).astype(np.float32) for n in ("w", "b")} for m in ("a", "c", "d")
    }
