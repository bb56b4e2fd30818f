"""Data that has changed since it was saved is noticed, and called by its name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from contracts.base import Contract
from eformer import checkpoint
from eformer.checkpoint import load, save
from eformer.errors import CorruptionError
from support.meshes import layouts


class Damage(Contract):
    """Bits that flip, and files that are cut short."""

    def test_a_flipped_bit_in_the_data_is_found_and_named(self, path):
        save({"good": jnp.ones(96), "bad": jnp.arange(1000.0)}, path)
        file, flipped = self.data_file(path), []

        def flip(data):
            flipped.append(data.find(np.arange(700.0, 740.0, dtype=np.float32).tobytes()))
            data[flipped[0]] ^= 1

        self.damage(file, flip)
        for call in (lambda: load(path), lambda: load(path, shardings=layouts()["rows"]), lambda: load(path, keys="bad"),
                     lambda: checkpoint.open(path)["bad"][699:701]):  # fmt: skip
            with pytest.raises(
                CorruptionError,
                match=rf"'bad': bytes \d+ to \d+ of \S*{self.name_in_errors(file)} are damaged",
            ):
                call()
        np.testing.assert_array_equal(load(path, keys="good")["good"], np.ones(96))
        np.testing.assert_array_equal(checkpoint.open(path)["bad"][:100], np.arange(100.0))
        assert load(path, verify=False)["bad"].shape == (1000,)
        (damage,) = checkpoint.verify(path).damages
        assert damage.leaf == "bad"
        assert damage.start <= self.position_in_errors(flipped[0]) < damage.stop

    def test_a_file_cut_short_is_found_and_named(self, path):
        save({"w": np.arange(1000.0)}, path)
        self.damage(
            self.data_file(path), lambda data: data[: len(data) // 2]
        )  # the end of a database may be unused
        with pytest.raises(CorruptionError, match=r"'w'.*cut short"):
            load(path)
        assert not checkpoint.verify(path).ok
