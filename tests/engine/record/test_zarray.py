"""The description of a zarr array, as eformer and other programs write it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.formats.zarr.layout import zarray
from eformer._engine.record.zarray import parse_zarray
from eformer.errors import FormatError


def described(**changes):
    return json.dumps(json.loads(zarray("float32", (3, 4), (3, 4), None)) | changes).encode()


def test_what_is_written_is_read():
    array = parse_zarray(zarray("bfloat16", (3, 4), (3, 4), "zstd"), "x")
    assert (array.name_of_dtype, array.shape, array.chunks) == ("bfloat16", (3, 4), (3, 4))
    assert array.compressor == {"id": "zstd", "level": 1}


@given(st.dictionaries(st.sampled_from(["shape", "chunks", "dtype", "order", "zarr_format"]), st.none() | st.integers() | st.text() | st.lists(st.integers())))  # fmt: skip
def test_a_description_is_understood_or_refused(changes):
    try:
        parse_zarray(described(**changes), "here").require_readable("here")
    except FormatError as error:
        assert "here" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": [["a", "<i4"], ["b", "<f8"]]},
        {"dtype": "<U7", "fill_value": "x", "attributes": {}},
        {"filters": [{"id": "delta"}], "compressor": {"id": "lz4", "acceleration": 1}},
    ],
    ids=str,
)
def test_an_array_that_is_not_read_still_tells_its_chunks(changes):
    array = parse_zarray(described(shape=[3, 40], chunks=[2, 10], **changes), "here")
    assert [name for name in ("0.0", "1.3", "1.4", "2.0", "01.0", "1", "1.3.0", "¹.3") if array.is_chunk(name.split("."))] == ["0.0", "1.3"]  # fmt: skip
    with pytest.raises(FormatError, match=r"^here"):
        array.require_readable("here")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": [3]}, "chunks of 2 axes do not fit a shape of 1"),
        ({"shape": [1] * 33, "chunks": [1] * 33}, "length <= 32"),
        ({"chunks": [0, 4]}, "`int` >= 1"),
        ({"dimension_separator": "-"}, "dimension_separator"),
        ({"zarr_format": 3}, "zarr_format"),
    ],
    ids=str,
)
def test_a_description_that_does_not_tell_the_chunks_is_refused(changes, says):
    with pytest.raises(FormatError, match=f"^here does not describe an array of zarr v2: .*{says}"):
        parse_zarray(described(**changes), "here")


def test_an_array_that_is_too_large_is_refused():
    with pytest.raises(FormatError, match=r"^here does not describe a valid array: shape "):
        parse_zarray(described(shape=[2**40, 2**40]), "here").require_readable("here")
