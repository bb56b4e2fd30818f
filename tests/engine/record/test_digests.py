import gzip
import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.digests import sha256_of, xxh3_128, xxh3_128_of
from eformer.errors import FormatError
from eformer.pytree._gzip import gzip_compress, gzip_decompress


@given(st.binary())
def test_gzip_comes_back_is_deterministic_and_is_what_gzip_reads(data):
    packed = gzip_compress(data)
    assert gzip_decompress(packed) == data == gzip.decompress(packed)
    assert gzip_compress(data) == packed


def test_gzip_of_other_writers_is_read_in_several_members_and_with_padding():
    assert gzip_decompress(gzip.compress(b"one") + gzip.compress(b"two") + bytes(100)) == b"onetwo"


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-5], lambda b: b[:5], lambda b: b + b"x", lambda b: b"", lambda b: b"no"]
)
def test_damaged_gzip_is_a_value_error(spoil):
    with pytest.raises(FormatError, match="not gzip"):
        gzip_decompress(spoil(gzip_compress(bytes(1000))))


def test_every_flipped_bit_of_gzip_content_is_noticed():
    packed = bytearray(gzip_compress(bytes(range(256))))
    for position in range(10, len(packed)):
        packed[position] ^= 1
        with pytest.raises(FormatError):
            gzip_decompress(bytes(packed))
        packed[position] ^= 1


def test_digests_are_the_published_functions():
    data = np.arange(100, dtype=np.float32)
    assert xxh3_128(data) == xxhash.xxh3_128(data.tobytes()).hexdigest()
    assert sha256_of([data]) == hashlib.sha256(data.tobytes()).hexdigest()


@given(st.lists(st.binary(max_size=100)))
def test_the_digest_of_parts_is_that_of_the_whole(parts):
    assert xxh3_128_of(parts) == xxh3_128(b"".join(parts))
