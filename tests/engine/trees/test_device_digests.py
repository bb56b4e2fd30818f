"""Digests that XLA computes where arrays are. Here the device is a CPU."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from eformer._engine.record.xxh3 import SHORTEST, merged_digests, parsed_digests
from eformer._engine.trees import device_digests
from eformer._engine.trees.device_digests import PIECES, Digester, Joined, PieceSpan, can_digest, results

PIECE, ROOM = 2**14, 2**16


@pytest.fixture(scope="module")
def digester():
    return Digester(jax.devices()[0], ROOM, PIECE)


@pytest.fixture(scope="module")
def filled(digester):
    """Bytes, and the way to join them in the buffer."""
    data = np.random.default_rng(0).integers(0, 256, ROOM, np.uint8)
    return data.tobytes(), Joined(digester.joining([(data.shape, data.dtype)]), [jnp.asarray(data)], None, 0)


def expected(raw, spans):
    return parsed_digests("".join(xxhash.xxh3_128_hexdigest(raw[start : start + n]) for start, n in spans))


BORDERS = [SHORTEST, 1023, 1024, 1025, 1024 + 63, 1024 + 64, 1024 + 65, 2047, 2048, 2049, PIECE - 1, PIECE]


def test_every_border_of_blocks_and_stripes_is_digested_as_by_xxhash(digester, filled):
    raw, joined = filled
    spans = [PieceSpan(start, nbytes) for nbytes in BORDERS for start in (0, 1, 333, ROOM - nbytes)]
    np.testing.assert_array_equal(results([digester.digest([joined], spans)]), expected(raw, spans))


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, ROOM - PIECE), st.integers(SHORTEST, PIECE)), min_size=1, max_size=PIECES + 9
    )
)
def test_any_pieces_are_digested_as_by_xxhash(digester, filled, pieces):
    raw, joined = filled
    spans = [PieceSpan(*piece) for piece in pieces]
    np.testing.assert_array_equal(results([digester.digest([joined], spans)]), expected(raw, spans))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "uint64", "float8_e4m3fn", "int16"])
def test_arrays_of_every_width_are_joined_as_they_lie_in_files(digester, kind):
    with jax.enable_x64(True):
        bits = np.random.default_rng(1).integers(0, 256, (2, 30, 8, 8), np.uint8)
        first, second = (one.view(jnp.dtype(kind)) for one in bits)  # all bit patterns, nans among them
        made = digester.joining([(one.shape, one.dtype) for one in (first, second)])
        joined = Joined(made, [jnp.asarray(first), jnp.asarray(second)], None, 100)
        span = PieceSpan(100, bits.nbytes)
        found = results([digester.digest([joined], [span])])
    np.testing.assert_array_equal(found, expected(bits.tobytes(), [(0, bits.nbytes)]))


def test_a_box_of_an_array_is_digested(digester):
    array = np.arange(40 * 100, dtype=np.int32).reshape(40, 100)
    made = digester.cutting((array.shape, array.dtype), (10, 100))
    found = results([digester.digest([Joined(made, [jnp.asarray(array)], (20, 0), 7)], [PieceSpan(7, 4000)])])
    np.testing.assert_array_equal(found, expected(array[20:30].tobytes(), [(0, 4000)]))


@pytest.mark.parametrize("kind", ["bool", "int4", "complex64"])
def test_bytes_that_xla_may_change_are_left_to_the_host(kind):
    assert not can_digest(jnp.dtype(kind))


def test_a_device_that_computes_other_digests_is_not_used(digester, monkeypatch, caplog):
    digester.accumulate.result()
    digester.empty.result()
    assert digester.is_ready()
    monkeypatch.setattr(device_digests, "_are_right", {})
    monkeypatch.setattr(
        device_digests, "merged_digests", lambda found, nbytes: merged_digests(found, nbytes) ^ np.uint64(1)
    )
    other = Digester(jax.devices()[0], ROOM, PIECE)
    assert not other.is_ready()
    assert "computes other digests than xxhash" in caplog.text
