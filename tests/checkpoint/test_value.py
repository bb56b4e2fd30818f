import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer.checkpoint._value import value_from_json, value_to_json
from eformer.errors import StructureError
from support.trees import assert_same, keys, numpy_scalars

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    keys,
    st.binary(),
    st.complex_numbers(),
    numpy_scalars,
)
hashable = st.recursive(plain, lambda c: st.lists(c, max_size=3).map(tuple), max_leaves=5)
values = st.recursive(
    hashable,
    lambda c: (
        st.lists(c, max_size=3)
        | st.lists(c, max_size=3).map(tuple)
        | st.dictionaries(st.text(), c, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_a_value_comes_back_exactly_through_any_json_library(value):
    document = value_to_json(value)
    assert_same(value_from_json(json.loads(json.dumps(document))), value)
    assert_same(value_from_json(msgspec.json.decode(msgspec.json.encode(document))), value)


@pytest.mark.parametrize(
    "value", [{1, 2, 3}, frozenset({"a", "b"}), np.dtype("f4"), np.dtype("bfloat16"), 2**20000], ids=type
)
def test_these_come_back_too(value):
    again = value_from_json(json.loads(json.dumps(value_to_json(value))))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [len, object(), np.float32, np.dtype(">f4"), lambda: None], ids=repr)
def test_what_json_cannot_say_is_marked_and_refused_when_read(value):
    document = value_to_json(value)
    assert list(document) == ["opaque"]
    with pytest.raises(StructureError, match="this value was not recorded, only what it looked like"):
        value_from_json(document)


@pytest.mark.parametrize(
    "document",
    [[], [1], {}, {"a": 1, "b": 2}, {"nope": 1}, {"tuple": 5}, {"numpy": ["float32", "!"]}, {"numpy": ["O", "AAAA"]},
     {"dtype": "O"}, {"dtype": ["x"]}, {"int": "x"}, {"bytes": 3}, {"complex": 5}, {"nan": "00"}, {"dict": [[{"list": []}, 1]]}],
)  # fmt: skip
def test_json_that_records_no_value_is_refused(document):
    with pytest.raises(ValueError, match=r"not a recorded value|unknown dtype"):
        value_from_json(document)
