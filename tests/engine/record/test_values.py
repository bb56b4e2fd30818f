import enum
import json
import math
import os
import subprocess
import sys
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.values import (
    is_recorded,
    locating,
    parse_lenient,
    value_from_json,
    value_to_json,
)
from eformer.errors import CorruptionError, FormatError, StructureError
from support.trees import assert_same, keys, numpy_scalars


class Colour(enum.Enum):
    RED = 1


class Name(str):
    __slots__ = ()


class Number(int):
    pass


class Point(NamedTuple):
    x: int
    y: int


class Unprintable:
    def __repr__(self):
        raise RuntimeError("boom")


LOOP = []
LOOP.append(LOOP)

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
    "value",
    [
        {1, 2, 3},
        frozenset({"a", "b"}),
        np.dtype("f4"),
        np.dtype("bfloat16"),
        2**20000,
        np.float32,
        jnp.float32,
        jnp.bfloat16,
        ml_dtypes.int4,
        math.inf,
        -math.inf,
    ],
    ids=type,
)
def test_these_come_back_too(value):
    again = value_from_json(json.loads(json.dumps(value_to_json(value))))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        len,
        object(),
        np.dtype(">f4"),
        lambda: None,
        (1, len),
        Colour.RED,
        Name("x"),
        Point(1, 2),
        Number(3),
        Unprintable(),
        LOOP,
    ],
    ids=type,
)
def test_values_that_json_cannot_express_are_marked_and_refused_when_read(value):
    document = value_to_json(value)
    assert "opaque" in json.dumps(document)
    assert len(json.dumps(document)) < 500
    assert not is_recorded(document)
    with pytest.raises(StructureError, match="this value was not recorded, only its repr"):
        value_from_json(document)


@pytest.mark.parametrize(
    "document",
    [[], [1], {}, {"a": 1, "b": 2}, {"nope": 1}, {"tuple": 5}, {"numpy scalar": ["float32", "!"]}, {"numpy scalar": []}, {"numpy scalar": ["int8"]}, {"numpy": "eval"}, {"numpy scalar": ["O", "AAAA"]}, {"jax.numpy": "save"}, {"complex": [{"int": "0x1" + "0" * 400}, 1]}, {"complex": []},
     {"dtype": "O"}, {"dtype": ["x"]}, {"int": "x"}, {"bytes": 3}, {"complex": 5}, {"nan": "00"}, {"nan": "3ff0000000000000"}, {"float": "1e5"}, {"int": "f"}, {"bytes": "AA=A"}, {"dict": [[{"list": []}, 1]]}],
)  # fmt: skip
def test_json_that_records_no_value_is_refused(document):
    with pytest.raises(ValueError, match=r"not a recorded value|unknown dtype"):
        value_from_json(document)


def test_a_value_nested_beyond_reason_is_refused():
    document = 1
    for _ in range(5000):
        document = {"list": [document]}
    with pytest.raises(StructureError, match="not a recorded value"):
        value_from_json(document)


def test_integers_that_other_json_readers_would_round_are_text():
    assert value_to_json(2**53) == 2**53
    assert value_to_json(2**53 + 1) == {"int": "0x20000000000001"}
    assert value_to_json(-(2**53) - 1) == {"int": "-0x20000000000001"}


def test_equal_sets_are_equal_json_in_every_process():
    code = (
        "import json; from eformer._engine.record.values import value_to_json as v\n"
        "print(json.dumps(v({frozenset({'a', 'b', 'c'}), frozenset({'d', 'e'}), 'x', 'y', 'z'})))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(5)
    }
    assert len(outputs) == 1


THREADS = """
import msgspec, sys, threading, types
from eformer._engine.record.values import parse_json
sys.setswitchinterval(1e-6)
SOURCE = '''
import msgspec
class Inner(msgspec.Struct, array_like=True):
    a: int
    b: tuple[tuple[int, ...], tuple[int, ...]] | None = None
class Outer(msgspec.Struct):
    metadata: dict[str, tuple[Inner, ...]]
'''
for number in range(100):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    barrier = threading.Barrier(8)
    def work():
        barrier.wait()
        assert parse_json(b'{"metadata": {"l": [[1, [[1], [2]]]]}}', module.Outer, "").metadata["l"][0].b == ((1,), (2,))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_several_threads_may_be_the_first_to_parse_a_class():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_lenient_json_may_hold_what_python_writes():
    found = parse_lenient(
        b'\xef\xbb\xbf{"a": [NaN, -Infinity], "b": 1%s}' % (b"0" * 30), dict[str, object], "x"
    )
    assert math.isnan(found["a"][0])
    assert found["a"][1] == -math.inf
    assert found["b"] == 10**30
    for data in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(FormatError, match=r"^x is odd: "):
            parse_lenient(data, dict[str, object], "x is odd")


def test_an_error_says_where_it_is_and_keeps_its_kind():
    with pytest.raises(CorruptionError, match=r"^here: gone$"), locating("here"):
        raise CorruptionError("gone")
    with pytest.raises(KeyError), locating("here"):
        raise KeyError("x")
