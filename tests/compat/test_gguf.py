"""GGUF: plain tensors load as llama.cpp's own package reads them, quantised ones are named, hostile files refused."""

import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer import checkpoint
from eformer.errors import EformerError, FormatError
from support.commands import run
from support.faults import STRIDE
from support.gguf_files import KINDS, file, of_arrays, pair, tensor, text

HERE = Path(__file__).parent / "gguf"
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"} | {
    f"I{n}": f"int{n}" for n in (8, 16, 32, 64)
}


def leaves_of(tree):
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        name = ".".join(key.key for key in path)
        found[f"{name}|{array.dtype.name}|{list(array.shape)}"] = array.tobytes()
    return found


def expected_of(name):
    with np.load(HERE / f"{name}.npz") as npz:
        for key, data in npz.items():
            leaf, kind, shape = key.split("|")
            if kind in NAMES:
                yield f"{leaf}|{NAMES[kind]}|{shape}", data.tobytes()


@pytest.mark.parametrize("name", ["plain", "aligned"])
def test_plain_tensors_equal_the_tensors_of_llama_cpp(name):
    found = leaves_of(checkpoint.load(HERE / f"{name}.gguf"))
    assert found == dict(expected_of(name))
    assert len(found) == 8
    run("verify", HERE / f"{name}.gguf")


def test_metadata_comes_as_plain_values():
    metadata = checkpoint.inspect(HERE / "aligned.gguf").trees[""].metadata
    assert metadata == {
        "general.architecture": "llama",
        "general.name": "sample",
        "general.alignment": 256,
        "llama.context_length": 2048,
        "llama.big": 2**63 + 1,
        "llama.small": -3,
        "llama.eps": 0.5,
        "llama.base": 1e4,
        "llama.tied": True,
        "tokenizer.ggml.tokens": ["<s>", "\u2581a", ""],
        "llama.scores": [0.5, -1.5],
    }


def test_quantised_tensors_are_listed_and_refused_by_name(tmp_path, caplog):
    path = HERE / "quantised.gguf"
    quantised = ("blk.2.q8 (Q8_0[2, 64])", "blk.2.q4 (Q4_0[2, 64])")
    assert checkpoint.inspect(path).left_out == quantised
    assert "blk.2.q4 (Q4_0[2, 64])" in run("verify", path, code=1).stdout
    with pytest.raises(FormatError, match=r"leaf 'blk.2.q8': Q8_0\[2, 64\]; leaf 'blk.2.q4': Q4_0\[2, 64\]"):
        checkpoint.load(path)
    with pytest.raises(
        FormatError, match=r"does not store: leaf 'blk.2.q4': Q4_0\[2, 64\]\. Load the other leaves"
    ):
        checkpoint.load(path, keys=["blk.2.q4", "blk.1.i8"])
    assert "blk.2.q8 (Q8_0" in run("convert", path, tmp_path / "x.safetensors", code=1).stderr
    run("convert", path, tmp_path / "x.safetensors", "--allow-missing")
    assert leaves_of(checkpoint.load(tmp_path / "x.safetensors")) == dict(expected_of("quantised"))


def test_the_plain_tensors_of_a_quantised_file_load_when_asked_for():
    some = checkpoint.load(HERE / "quantised.gguf", keys="blk.1.i8")
    assert some["blk.1.i8"].shape == (33,)
    like = {"blk": {"1": {"i8": jax.ShapeDtypeStruct((33,), np.int8)}}}
    partial = checkpoint.load(HERE / "quantised.gguf", like=like, partial=True)
    np.testing.assert_array_equal(partial["blk"]["1"]["i8"], some["blk.1.i8"])


def test_big_endian_files_are_refused_as_such():
    with pytest.raises(FormatError, match="is big-endian, which is not supported"):
        checkpoint.load(HERE / "big_endian.gguf")


def test_a_file_of_a_split_model_tells_of_the_other_files(tmp_path):
    data = of_arrays({"a": np.zeros(3, np.float32)}, [pair("split.count", "u16", 3)])
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(data)
    found = checkpoint.inspect(tmp_path / "m-00001-of-00003.gguf")
    assert found.left_out == ("2 further files of this model (split.count is 3)",)


def test_bytes_after_the_last_tensor_are_left_out(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes((HERE / "plain.gguf").read_bytes() + b"more" * 100)
    assert checkpoint.inspect(path).left_out == ("400 bytes after the last tensor",)
    run("verify", path, code=1)
    run("convert", path, tmp_path / "m.safetensors", code=1)


DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in KINDS]
VALUES = {
    "u8": 255, "i8": -128, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -(2**31), "f32": -0.5, "bool": False,
    "u64": 2**64 - 1, "i64": -(2**63), "f64": 1e300, "text": "\u00e9", "[u64]": [1, 2**63], "[bool]": [True, False],
    "[text]": ["", "a"], "[[i8]]": [[-1, 2], []], "[[[text]]]": [[["x"]]], "[f32]": [],
}  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)), max_size=6),
    st.sampled_from([8, 32, 64, 4096]),
    st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True),
)
def test_files_by_the_specification_load_bit_for_bit(tmp_path_factory, tensors, alignment, kinds):
    random = np.random.default_rng(0)
    arrays = {}
    for number, (dtype, shape) in enumerate(tensors):
        size = int(np.prod(shape)) * dtype.itemsize
        arrays[f"blk.{number}.w"] = np.frombuffer(random.bytes(size), dtype).reshape(shape)
    pairs = [pair(f"x.{kind}", kind, VALUES[kind]) for kind in kinds]
    pairs.append(pair("general.alignment", "u32", alignment))
    path = tmp_path_factory.mktemp("x") / "x.gguf"
    path.write_bytes(of_arrays(arrays, pairs, alignment))
    expected = {f"{n}|{a.dtype.name}|{list(a.shape)}": a.tobytes() for n, a in arrays.items()}
    assert leaves_of(checkpoint.load(path)) == expected
    metadata = checkpoint.inspect(path).trees[""].metadata
    assert {kind: metadata[f"x.{kind}"] for kind in kinds} == {kind: VALUES[kind] for kind in kinds}


def number(code, *values):
    return struct.pack(f"<{code}", *values)


F32, MANY = KINDS["float32"], 2**60


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "its header needs 4 bytes at 4, but has 4"),
        (file(version=1), "version 1; versions 2 and 3 are supported"),
        (file(version=99), "version 99"),
        (file(counts=(MANY, 0)), "announces 1152921504606846976 items"),
        (file(counts=(0, MANY)), "announces 1152921504606846976 items"),
        (file([number("Q", MANY) + b"key"]), "announces 1152921504606846976 items"),
        (file([text("k") + number("IQ", 8, MANY)]), "announces 1152921504606846976 items"),
        (file([text("k") + number("IIQ", 9, 0, MANY)]), "announces 1152921504606846976 items"),
        (file([text("k") + number("IIQ", 9, 12, 2**61)]), "announces 2305843009213693952 items"),
        (file([text("k") + number("I", 9) + number("IQ", 9, 1) * 9 + bytes(9)]), "nested more than 8 deep"),
        (file([text("k") + number("IIQ", 9, 9, 2**40)]), "announces 1099511627776 items"),
        (file([text("k") + number("I", 77) + bytes(8)]), "unknown type 77"),
        (file([text("k") + number("IIQ", 9, 77, 1) + bytes(8)]), "unknown type 77"),
        (file([text("k") + number("IB", 7, 2)]), "neither 0 nor 1"),
        (file([pair("k", "u8", 1)] * 2), "two keys of the name 'k'"),
        (file([pair(b"\xff", "u8", 1)]), r"the name b'\\xff' is not UTF-8"),
        (file([pair("general.alignment", "u32", 0)]), "general.alignment is 0, not a power of two"),
        (file([pair("general.alignment", "u32", 48)]), "general.alignment is 48"),
        (file([pair("general.alignment", "text", "x" * 99)]), "general.alignment is x{40}, not"),
        (file([], [tensor("a", (2,), F32, 0)] * 2, bytes(32)), "two tensors of the name 'a'"),
        (file([], [tensor("a", (2,), F32, 4)], bytes(32)), "leaf 'a' is at 4, not at a multiple of 32"),
        (file([], [tensor("a", (9,), F32, 0)], bytes(32)), "leaf 'a' ends at 100, but the file has 96 bytes"),
        (file([], [tensor("a", (MANY, MANY), F32, 0)], bytes(32)), "leaf 'a' ends at"),
        (file([], [tensor("a", (2,), F32, 2**63)], bytes(32)), "leaf 'a' ends at"),
        (file([], [text("a") + number("I", 2**31)], bytes(99)), "leaf 'a' has 2147483648 axes"),
        (
            file([], [tensor("a", (8,), F32, 0), tensor("b", (8,), F32, 0)], bytes(32)),
            "leaf 'b' overlaps another",
        ),
    ],
)
def test_hostile_headers_are_refused_with_a_reason(tmp_path, data, message):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        checkpoint.load(tmp_path / "x.gguf")


def test_cut_and_changed_files_do_no_more_than_raise(tmp_path):
    whole, path = (HERE / "quantised.gguf").read_bytes(), tmp_path / "x.gguf"
    for length in range(0, whole.index(b"blk.2.q4"), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(EformerError):
            checkpoint.load(path)
    for at in range(0, whole.index(b"blk.2.q4") + 100, STRIDE):
        for mask in (0x01, 0x80, 0xFF):
            data = bytearray(whole)
            data[at] ^= mask
            path.write_bytes(data)
            try:
                checkpoint.verify(path)
                checkpoint.load(path)
            except EformerError:
                pass
