import gzip
import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.digests import sha256_of, xxh3_128, xxh3_128_of
from eformer.errors import FormatError
from eformer.pytree import compress_bytes, decompress_bytes


@given(st.binary())
def test_gzip_comes_back_is_deterministic_and_is_what_gzip_reads(data):
    packed = compress_bytes(data)
    assert decompress_bytes(packed) == data == gzip.decompress(packed)
    assert compress_bytes(data) == packed


def test_gzip_of_other_writers_is_read_in_several_members_and_with_padding():
    assert decompress_bytes(gzip.compress(b"one") + gzip.compress(b"two") + bytes(100)) == b"onetwo"


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-5], lambda b: b[:5], lambda b: b + b"x", lambda b: b"", lambda b: b"no"]
)
def test_damaged_gzip_is_a_value_error(spoil):
    with pytest.raises(FormatError, match="not gzip"):
        decompress_bytes(spoil(compress_bytes(bytes(1000))))


def test_every_flipped_bit_of_gzip_content_is_noticed():
    packed = bytearray(compress_bytes(bytes(range(256))))
    for position in range(10, len(packed)):
        packed[position] ^= 1
        with pytest.raises(FormatError):
            decompress_bytes(bytes(packed))
        packed[position] ^= 1


def test_digests_are_the_published_functions():
    data = np.arange(100, dtype=np.float32)
    assert xxh3_128(data) == xxhash.xxh3_128(data.tobytes()).hexdigest()
    assert sha256_of([data]) == hashlib.sha256(data.tobytes()).hexdigest()


@given(st.lists(st.binary(max_size=100)))
def test_the_digest_of_parts_is_that_of_the_whole(parts):
    assert xxh3_128_of(parts) == xxh3_128(b"".join(parts))
