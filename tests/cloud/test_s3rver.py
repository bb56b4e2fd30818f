"""s3rver, a server that ignores the conditions of requests: nothing is saved there, unless nobody else saves."""

import numpy as np
import pytest

from eformer.checkpoint import load, save, store_options
from support.buckets import leases, objects

SERVER = "s3rver"


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_a_save_is_refused(url, kind):
    with pytest.raises(ValueError, match=r"ignores the conditions of requests.*single_writer=True"):
        save({"w": np.ones(3)}, url, format=kind)
    assert not objects(url)
    assert not leases(url)


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_a_single_writer_saves_and_everybody_reads(url, kind):
    for number in range(3):
        with store_options(url, single_writer=True):
            save({"w": np.full(3, number)}, url, format=kind)
        assert load(url)["w"][0] == number
