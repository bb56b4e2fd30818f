"""Single files that flax, numpy and equinox wrote load like any checkpoint: whole, in parts, onto meshes, mapped."""

import importlib.util
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import (
    CorruptionError,
    EformerError,
    FormatError,
    MismatchError,
    NotFoundError,
    StructureError,
)
from eformer.pytree._serialization import msgpack_restore, msgpack_serialize, save_to_file
from support.trees import assert_same

DATA = Path(__file__).parent / "files"
EFORMER = str(Path(sys.executable).with_name("eformer"))
SAMPLES = ["flax.msgpack", "flax_chunked.msgpack", "equinox.eqx", "equinox_with_line.eqx"]

_spec = importlib.util.spec_from_file_location("write", DATA / "write.py")
write = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write)


def eformer(*arguments, code=0):
    done = subprocess.run([EFORMER, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


# ----------------------------------------------------------------------------------------------- msgpack


def same_numbers(found, expected):
    """Of trees whose arrays may be numpy's or JAX's."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_state_of_flax_comes_back():
    loaded = checkpoint.load(DATA / "flax.msgpack")
    same_numbers(loaded, write.state())
    assert loaded["plain"]["list"] == [1, 2.5, "text", b"bytes", True]
    assert type(loaded["plain"]["scalar"]) is np.float32
    assert isinstance(loaded["params"]["bfloat16"], jax.Array)


def test_chunks_of_flax_are_one_array():
    w = checkpoint.load(DATA / "flax_chunked.msgpack")["params"]["w"]
    np.testing.assert_array_equal(w, np.arange(100.0).reshape(4, 25))
    with checkpoint.open(DATA / "flax_chunked.msgpack") as view:
        np.testing.assert_array_equal(view["params.w"][1:3, 20:], np.asarray(w)[1:3, 20:])
        assert view["params.w"].nbytes == 400


def test_chunks_of_flax_are_cut_anew_for_a_mesh():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x")
    loaded = checkpoint.load(DATA / "flax_chunked.msgpack", mesh=mesh, shardings={"params": {"w": spec}})
    w = loaded["params"]["w"]
    assert w.addressable_shards[0].data.shape == (1, 25)
    np.testing.assert_array_equal(w, np.arange(100.0).reshape(4, 25))


def test_what_only_we_write_into_msgpack_comes_back(tmp_path):
    tree = {
        "tuple": (1, (jnp.ones(2), "x")),
        "key": jax.random.key(3),
        5: {None: 1.5, 2.0: b""},
        "many": jax.random.split(jax.random.key(1), 3),
    }
    (tmp_path / "x").write_bytes(msgpack_serialize(tree, in_place=True))
    assert_same(checkpoint.load(tmp_path / "x"), tree)


@pytest.mark.parametrize(
    "tree", [np.arange(3.0, dtype=np.float32), [np.ones(2, np.float32), 3], (np.int32(3),), {}]
)
def test_a_msgpack_tree_need_not_be_a_dict(tmp_path, tree):
    (tmp_path / "x").write_bytes(msgpack_serialize(tree))
    same_numbers(checkpoint.load(tmp_path / "x"), tree)


def test_a_msgpack_tree_has_the_names_of_the_same_tree_saved_by_us(tmp_path):
    tree = {
        "a.b": jnp.ones(2),
        "a": {"b": jnp.ones(3), "": 1},
        "../x": [jnp.ones(1), {"%": 2.0}],
        "m": {1: 1, 2: 2},
    }
    (tmp_path / "x.msgpack").write_bytes(msgpack_serialize(tree, in_place=True))
    checkpoint.save(tree, tmp_path / "ours")
    with checkpoint.open(tmp_path / "x.msgpack") as found, checkpoint.open(tmp_path / "ours") as ours:
        assert set(found) == set(ours)
    assert_same(checkpoint.load(tmp_path / "x.msgpack"), tree)


def test_of_a_large_message_only_the_names_are_read(tmp_path):
    path, nbytes = tmp_path / "large.msgpack", 2**32 - 2**10
    inner = b"\x93\x91\xce" + struct.pack(">I", nbytes // 4) + b"\xa7float32\xc6" + struct.pack(">I", nbytes)
    with path.open("wb") as file:
        file.write(b"\x81\xa1w\xc9" + struct.pack(">I", len(inner) + nbytes) + b"\x01" + inner)
        file.truncate(file.tell() + nbytes)  # a hole, which takes no room on the disk
    code = (
        f"from eformer import checkpoint; m = checkpoint.inspect({str(path)!r});"
        f"assert m.trees[''].leaves['w'].nbytes == {nbytes};"
        "(peak,) = [int(s.split()[1]) for s in open('/proc/self/status') if s.startswith('VmHWM')];"
        "assert peak < 2**19, 'kilobytes'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_state_of_ours_from_a_file_fits_like(tmp_path):
    save_to_file({"w": jnp.ones((2, 2))}, tmp_path / "x.msgpack")
    like = {"w": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)}
    assert checkpoint.load(tmp_path / "x.msgpack", like=like, dtype="bfloat16")["w"].dtype == jnp.bfloat16
    with pytest.raises(MismatchError, match=r"leaf 'w': expected bfloat16\[2, 2\], found float32\[2, 2\]"):
        checkpoint.load(tmp_path / "x.msgpack", like=like)


# --------------------------------------------------------------------------------------------------- npz

DTYPES = [*write.DTYPES, "datetime64[s]", "timedelta64[ms]"]


def arrays():
    numbers = np.arange(6).reshape(2, 3)
    found = {
        f"dtypes.{name}": numbers.astype(jnp.dtype(name) if "64[" not in name else name) for name in DTYPES
    }
    return found | {
        "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)), "big": np.arange(5, dtype=">i4"),
        "both": np.asfortranarray(numbers.astype(">f8")), "empty": np.zeros((0, 3)), "single": np.float32(2.5),
    }  # fmt: skip


@pytest.fixture(params=[np.savez, np.savez_compressed])
def npz(request, tmp_path):
    def make(**members):
        request.param(tmp_path / "x.npz", **members)
        return tmp_path / "x.npz"

    return make


def test_npz_is_a_tree_by_the_dots_in_its_names(npz):
    tree = {"a": {"b": np.ones(3), "c": np.arange(4)}, "d": "text, ü", "e": np.float32(1)}
    path = npz(**{"a.b": tree["a"]["b"], "a.c": tree["a"]["c"], "d": tree["d"], "e": tree["e"]})
    assert_same(checkpoint.load(path), tree | {"e": np.asarray(tree["e"])})


def test_npz_has_every_dtype_and_every_order(npz):
    path = npz(**arrays())
    with checkpoint.open(path) as view:
        for name, array in arrays().items():
            assert view[name].dtype == array.dtype.newbyteorder("<")
            np.testing.assert_array_equal(view[name][...], array)
    assert checkpoint.load(path)["dtypes"]["bfloat16"].dtype == ml_dtypes.bfloat16


def test_npz_is_read_in_parts_and_onto_meshes(npz):
    array = np.asfortranarray(np.arange(4.0 * 6, dtype=np.float32).reshape(4, 6))
    path = npz(f=array, c=np.ascontiguousarray(array))
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    loaded = checkpoint.load(path, mesh=mesh, rules=[(".*", jax.sharding.PartitionSpec("x", "y"))])
    with checkpoint.open(path) as view:
        for name in "fc":
            np.testing.assert_array_equal(view[name][1:3, ::2], array[1:3, ::2])
            np.testing.assert_array_equal(loaded[name], array)
            assert loaded[name].addressable_shards[0].data.shape == (2, 3)


def test_npz_as_it_lies_is_mapped(tmp_path):
    array = np.arange(2**16, dtype=np.float32)
    np.savez(
        tmp_path / "x.npz", ab=array
    )  # which begins at byte 184; where numpy puts them is left to chance
    np.savez_compressed(tmp_path / "c.npz", a=array)
    mapped = checkpoint.load(tmp_path / "x.npz", mmap=True)["ab"]
    assert not mapped.flags.owndata
    assert not mapped.flags.writeable
    np.testing.assert_array_equal(mapped, array)
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "c.npz", mmap=True)["a"], array)


def test_all_that_is_no_array_of_numbers_is_named_and_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os._exit, (1,)

    np.savez(
        tmp_path / "x.npz",
        good=np.ones(2),
        o=np.array([Bomb()]),
        t=np.array(["a", "b"]),
        r=np.zeros(2, "i4,f4"),
        v=np.zeros(2, "V3"),
    )
    with pytest.raises(FormatError) as error:
        checkpoint.load(tmp_path / "x.npz")
    for member in (
        "'o.npy': objects of Python",
        "'t.npy': an array of numpy's 'U1'",
        "'r.npy': records",
        "'v.npy'",
    ):
        assert member in str(error.value)
    assert "good" not in str(error.value)


def test_zip64_is_read(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w") as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        np.save(member, np.arange(9))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "x.npz")["a"], np.arange(9))


def test_a_flipped_bit_in_npz_is_noticed_by_its_checksum(npz):
    path = npz(a=np.arange(1000.0), f=np.asfortranarray(np.random.default_rng(0).normal(size=(9, 9))))
    data = bytearray(path.read_bytes())
    for at in (600, zipfile.ZipFile(path).infolist()[1].header_offset + 400):
        data[at] ^= 1
    path.write_bytes(data)
    report = checkpoint.verify(path)
    assert {damage.leaf for damage in report.damages} == {"a", "f"}
    with pytest.raises(CorruptionError, match=r"x\.npz"):
        checkpoint.load(path)


def test_a_damaged_text_is_named_with_its_file(npz):
    path = npz(t="text" * 50)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") - 5] ^= 1  # before the directory: the member's last bytes
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"x\.npz: member 't.npy' is damaged"):
        checkpoint.inspect(path)


def test_members_that_claim_more_than_they_can_hold_are_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
            archive.writestr("a.npy", header.getvalue() + bytes(64))
        with pytest.raises(FormatError, match=r"member 'a.npy'.*by its header"):
            checkpoint.inspect(tmp_path / "x.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_are_no_npz_are_refused(tmp_path):
    def refused(problem, *members, **options):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", **options) as archive:
            for member in members:
                archive.writestr(member, b"x" * 50)
        with pytest.raises(FormatError, match=problem):
            checkpoint.inspect(tmp_path / "x.npz")

    refused("two members of one name: 'a.npy'", "a.npy", "a.npy")
    refused("'data.pkl': no .npy", "data.pkl")
    refused("compressed by method 14", "a.npy", compression=zipfile.ZIP_LZMA)
    refused("no array begins there", "a.npy")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", "", "a..b", "%", "x" * 300, "a/b"])
def test_names_in_npz_are_only_names(tmp_path, name):
    np.savez(tmp_path / "x.npz", **{name: np.ones(2)})
    (leaf,) = jax.tree.leaves(checkpoint.load(tmp_path / "x.npz"))
    np.testing.assert_array_equal(leaf, np.ones(2))


# ----------------------------------------------------------------------------------------------- equinox


@pytest.mark.parametrize("name", ["equinox.eqx", "equinox_with_line.eqx"])
def test_a_tree_of_equinox_is_filled_by_order(name):
    model = write.model()
    blank = jax.tree.map(
        lambda leaf: type(leaf)() if isinstance(leaf, (bool, int, float, complex)) else leaf, model
    )
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else leaf, blank)
    loaded = checkpoint.load(DATA / name, like=blank)
    assert eqx.tree_equal(loaded, model, typematch=True)


def test_a_shape_is_enough_for_equinox():
    like = write.model() | {"module": eqx.filter_eval_shape(lambda: write.model()["module"])}
    loaded = checkpoint.load(DATA / "equinox.eqx", like=like)
    assert eqx.tree_equal(loaded["module"], write.model()["module"])


def test_equinox_lists_arrays_by_number_and_keeps_the_line_before_them():
    tree = checkpoint.inspect(DATA / "equinox_with_line.eqx").trees[""]
    assert tree.metadata == {"width": 4, "depth": 2}
    assert list(tree.leaves) == [str(number) for number in range(len(tree.leaves))]
    with checkpoint.open(DATA / "equinox.eqx") as view:
        assert view["0"].dtype == ml_dtypes.bfloat16
    assert set(checkpoint.load(DATA / "equinox.eqx", keys=["0", "2"])) == {"0", "2"}


def test_equinox_without_like_says_what_to_do():
    with pytest.raises(StructureError, match=r"equinox.eqx holds 15 arrays without names.*pass like="):
        checkpoint.load(DATA / "equinox.eqx")


def test_all_that_does_not_fit_equinox_is_one_error():
    like = write.model()
    like["arrays"]["bfloat16"] = jnp.ones((3, 2), jnp.bfloat16)
    like["numbers"]["float"] = 3
    like["zzz"] = jnp.ones(1)
    with pytest.raises(MismatchError) as error:
        checkpoint.load(DATA / "equinox.eqx", like=like)
    assert len(error.value.problems) == 3
    for problem in (
        "missing leaf 'zzz'",
        "leaf 'arrays.bfloat16': expected bfloat16[3, 2], found bfloat16[2, 3]",
        "leaf 'numbers.float': expected a plain int",
    ):
        assert problem in str(error.value)
    with pytest.raises(MismatchError, match=r"unexpected leaf '%array 14'"):
        checkpoint.load(DATA / "equinox.eqx", like=write.model() | {"module": None})


def test_equinox_goes_onto_meshes_and_is_cast(tmp_path):
    tree = {"f": jax.nn.relu, "w": jnp.arange(16.0).reshape(4, 4), "n": 1.5}
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", tree)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    loaded = checkpoint.load(tmp_path / "x.eqx", like=tree | {"w": there}, dtype="bfloat16")
    assert loaded["w"].addressable_shards[0].data.shape == (2, 4)
    assert loaded["w"].dtype == jnp.bfloat16
    assert (loaded["f"], loaded["n"]) == (jax.nn.relu, 1.5)


def test_a_single_npy_is_an_array(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(np.arange(6).reshape(2, 3)))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "x.npy"), np.arange(6).reshape(2, 3))
    like = {"a": np.zeros((2, 3), np.int64)}
    np.testing.assert_array_equal(
        checkpoint.load(tmp_path / "x.npy", like=like)["a"], np.arange(6).reshape(2, 3)
    )


@pytest.mark.parametrize("array", [jnp.ones(3, jnp.float8_e4m3fn), np.zeros(2, "i4,f4"), np.array(["a"])])
def test_arrays_of_unknown_dtype_are_refused_by_number(tmp_path, array):
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", [np.ones(2), array])
    with pytest.raises(FormatError, match=r"x\.eqx.*array 1, at byte 144"):
        checkpoint.inspect(tmp_path / "x.eqx")


# --------------------------------------------------------------------------------------- each of them


@pytest.fixture(params=[*SAMPLES, "x.npz", "c.npz"])
def sample(request, tmp_path):
    path = tmp_path / request.param
    if path.suffix == ".npz":
        members = {"a.b": np.arange(6.0), "t": "text", "f": np.asfortranarray(np.arange(6).reshape(2, 3))}
        (np.savez if path.name == "x.npz" else np.savez_compressed)(path, **members)
    else:
        path.write_bytes((DATA / request.param).read_bytes())
    return path


FORMATS = {".msgpack": "msgpack, of flax", ".npz": "npz", ".eqx": "equinox"}


def test_inspect_and_verify_say_what_is_known(sample):
    assert checkpoint.inspect(sample).format == FORMATS[sample.suffix]
    report = checkpoint.verify(sample)
    assert report.ok
    assert report.leaves
    assert not report.has_digests


def test_a_file_is_known_by_its_content_whatever_its_name(sample):
    renamed = sample.rename(sample.with_name("checkpoint_7"))
    link = sample.with_name("link")
    link.symlink_to(renamed)
    for path in (renamed, link):
        assert checkpoint.inspect(path).format == FORMATS[sample.suffix]


def test_the_command_line_shows_it(sample):
    assert FORMATS[sample.suffix] in eformer("inspect", sample).stdout
    leaves = json.loads(eformer("ls", sample, "--json").stdout)
    (tree,) = checkpoint.inspect(sample).trees.values()
    assert [leaf["name"] for leaf in leaves] == [*tree.leaves, *tree.values]
    expected = "every checksum matches" if sample.suffix == ".npz" else "complete"
    assert expected in eformer("verify", sample).stdout
    sample.write_bytes(sample.read_bytes()[:-20])
    assert sample.name in eformer("inspect", sample, code=1).stderr


def test_looking_at_it_needs_no_jax(sample):
    code = (
        f"import sys; from eformer import checkpoint; checkpoint.verify({str(sample)!r}); checkpoint.inspect({str(sample)!r});"
        "assert not {'jax', 'flax', 'equinox', 'tensorstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_replaced_file_is_noticed(sample):
    with checkpoint.open(sample) as view:
        held = {name: np.asarray(view[name]) for name in view if hasattr(view[name], "entry")}
    view = checkpoint.open(sample)
    view._files.close()  # as if there were too many to hold
    sample.with_name("new").write_bytes(sample.read_bytes())
    os.replace(sample.with_name("new"), sample)
    name = next(name for name in held if held[name].size)
    with pytest.raises(FileNotFoundError, match="was replaced"):
        view[name][...]


def test_a_save_does_not_mistake_it_for_ours(sample):
    checkpoint.save({"w": np.ones(2)}, sample.with_suffix(".safetensors"))
    assert checkpoint.inspect(sample).format == FORMATS[sample.suffix]


# ------------------------------------------------------------------------------------------- bad luck


def look(path, like=None):
    """Everything that can be done with a file; what may be wrong with it is one of our errors, which is returned."""
    try:
        checkpoint.verify(path)
        with checkpoint.open(path) as view:
            for name in view:
                leaf = view[name]
                assert not hasattr(leaf, "entry") or np.asarray(leaf).shape == leaf.shape
        checkpoint.load(path, like=like)
    except EformerError as error:
        return str(error)
    return ""


def test_no_truncation_gets_through(sample):
    """Where one array ends and the next would begin, a file without names can only be known by what is expected."""
    whole, cut = sample.read_bytes(), sample.parent / "cut"
    like = write.model() if sample.suffix == ".eqx" else None
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        assert look(cut, like), length


def test_no_flipped_bit_does_more_than_raise(sample):
    whole = sample.read_bytes()
    path = sample.parent / "flipped"
    for at in range(0, len(whole), 3):
        for mask in (0x01, 0x80, 0xFF):
            data = bytearray(whole)
            data[at] ^= mask
            path.write_bytes(data)
            look(path)


def packed(shape, dtype, data):
    return msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x80", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x81\xa1a" * 300 + b"\xc0",
        b"\x91" * 100_000, b"\x82\xa1a\x01\xa1a\x02", packed([2**40, 2**40], "float32", b""), packed([-1], "int8", b""),
        packed([1], "datetime64[0s]", bytes(8)), packed([1], "object", bytes(8)), packed([0] * 65, "int8", b""),
        packed([1], "key<fry>", bytes(4)), packed([], "key<threefry2x32>", bytes(4)), packed([1], "float32", bytes(5)),
        msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 2**62}, "chunks": {}}),
        msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"0": 1}}),
    ],
)  # fmt: skip
def test_hostile_msgpack_is_an_error(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    assert look(tmp_path / "x")


def test_deep_msgpack_is_listed_as_far_as_our_trees_go(tmp_path):
    for depth, is_fine in ((200, True), (600, False)):
        (tmp_path / "x").write_bytes(b"\x81\xa1a" * depth + b"\x01")
        assert (look(tmp_path / "x") == "") is is_fine


def npy(text, data=b""):
    header = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x09\x00\x02\x00{}", npy("{}"), npy("[" * 9000), npy("x" * 99),
        npy("{'descr': '<M8[0s]', 'fortran_order': False, 'shape': (1,)}", bytes(8)), npy("9" * 9000),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387903, 9)}"),
        npy("{'descr': '<f8', 'fortran_order': 1, 'shape': (1,)}", bytes(8)), npy("{'descr': 'f8,f8', 'fortran_order': True, 'shape': ()}"),
        npy("{'descr': '<f8', 'fortran_order': True, 'shape': (True,)}", bytes(8)), npy("{'descr': '<f0', 'fortran_order': True, 'shape': (3,)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps(print)), npy("{'descr': 3, 'fortran_order': True, 'shape': ()}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"), npy("{'descr': '\\d', 'fortran_order': False, 'shape': ()}"),
        b"{}\n", b'{"a": \n\x93NUMPY', b"[" * 9999 + b"\n\x93NUMPY",
    ],
)  # fmt: skip
def test_hostile_arrays_are_an_error(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    assert str(tmp_path / "x") in look(tmp_path / "x")


def test_what_is_nothing_says_what_was_looked_for(tmp_path):
    (tmp_path / "x.txt").write_text("hello, world")
    with pytest.raises(FormatError, match=r"x\.txt is no checkpoint.*begins with b'hello, wo'.*npz.*msgpack"):
        checkpoint.load(tmp_path / "x.txt")


def test_a_directory_of_such_files_names_them(tmp_path):
    np.savez(tmp_path / "weights.npz", a=np.ones(2))
    with pytest.raises(FileNotFoundError, match=r"Is it one of \['weights.npz'\]"):
        checkpoint.load(tmp_path)


def test_restoring_by_flax_and_by_load_are_the_same():
    data = (DATA / "flax.msgpack").read_bytes()
    same_numbers(checkpoint.load(DATA / "flax.msgpack"), msgpack_restore(data))


# ------------------------------------------------------------------------- written to while it is read


def rewrite(path, number):
    """As people do: the file is cut short first, and then filled."""
    tree = {f"l{i}": np.full(20_000, number, np.float32) for i in range(8)}
    with path.open("wb") as file:
        if path.suffix == ".msgpack":
            file.write(flax.serialization.to_bytes(tree))
        elif path.suffix == ".npz":
            np.savez(file, **tree)
        else:
            eqx.tree_serialise_leaves(file, tree)


@pytest.mark.parametrize("suffix", [".msgpack", ".npz", ".eqx"])
def test_a_file_that_is_written_to_meanwhile_is_never_a_mixture(tmp_path, suffix):
    path, stop = tmp_path / f"model{suffix}", threading.Event()
    rewrite(path, 0)
    like = {f"l{i}": np.zeros(20_000, np.float32) for i in range(8)} if suffix == ".eqx" else None

    def keep_writing():
        number = 0
        while not stop.is_set():
            number += 1
            rewrite(path, number)
            stop.wait(0.005)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    whole = 0
    try:
        for _ in range(150):
            with suppress(EformerError):
                tree = checkpoint.load(path, like=like)
                assert len({float(x) for leaf in tree.values() for x in (leaf.min(), leaf.max())}) == 1
                whole += 1
    finally:
        stop.set()
        writer.join()
    assert whole


def test_a_view_notices_that_its_file_was_written_to(tmp_path):
    rewrite(tmp_path / "a.npz", 0)
    with checkpoint.open(tmp_path / "a.npz") as view:
        assert view["l0"][0] == 0
        time.sleep(0.02)  # the clock of files is coarse
        rewrite(tmp_path / "a.npz", 1)
        with pytest.raises(FileNotFoundError, match="has been written to since it was opened; open it again"):
            view["l0"][0]


def test_a_view_reads_on_when_its_file_is_replaced_as_a_whole(tmp_path):
    rewrite(tmp_path / "a.npz", 0)
    rewrite(tmp_path / "b.npz", 1)
    with checkpoint.open(tmp_path / "a.npz") as view:
        (tmp_path / "b.npz").replace(tmp_path / "a.npz")
        assert view["l0"][0] == 0


# ------------------------------------------------------------------------------------ what it is not


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "but an empty file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "but a picture"),
        (b"\x89HDF\r\n\x1a\n" + bytes(50), "but an HDF5 file"),
        (b"GGUF\x03" + bytes(50), "but a GGUF file"),
        (b"\x1f\x8b\x08" + bytes(50), "compressed by gzip; unpack it first"),
        (
            pickle.dumps({"a": 1}),
            "but a pickle, which is not run, perhaps of PyTorch; there, safetensors.torch",
        ),
    ],
)
def test_files_of_something_else_are_called_by_their_names(tmp_path, content, what):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        checkpoint.load(tmp_path / "model.bin")
    assert what in str(caught.value)


def test_a_file_of_pytorch_is_called_so(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"x")
        for number in range(50):
            archive.writestr(f"model/data/{number}", b"x")
    with pytest.raises(FormatError, match="is a file of PyTorch, of pickles, which are not run") as caught:
        checkpoint.load(tmp_path / "model.pt")
    assert len(str(caught.value)) < 400


def test_many_problems_are_counted(tmp_path):
    np.savez(tmp_path / "a.npz", **{f"t{i}": np.array(["a", "b"]) for i in range(30)})
    with pytest.raises(FormatError, match="; and 25 more"):
        checkpoint.load(tmp_path / "a.npz")


def test_a_directory_of_flax_points_to_its_files(tmp_path):
    (tmp_path / "checkpoint_3").write_bytes(flax.serialization.to_bytes({"w": np.ones(2)}))
    with pytest.raises(NotFoundError, match=r"Is it one of \['checkpoint_3'\]"):
        checkpoint.load(tmp_path)
    assert checkpoint.load(tmp_path / "checkpoint_3")["w"].shape == (2,)


def test_very_many_values_are_refused_soon(tmp_path):
    (tmp_path / "many.msgpack").write_bytes(b"\xdd" + struct.pack(">I", 2**21) + bytes(2**21))
    with pytest.raises(FormatError, match="more than 1,048,576 values"):
        checkpoint.inspect(tmp_path / "many.msgpack")


def test_plain_numbers_of_equinox_stay_plain_wherever_arrays_go(tmp_path):
    model = [eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5)]
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", model)
    mesh = jax.make_mesh((1,), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for how in (
        {"mesh": mesh, "rules": [(".*", jax.sharding.PartitionSpec())]},
        {"mesh": mesh, "shardings": jax.sharding.PartitionSpec()},
        {"shardings": everywhere},
    ):
        _, dropout = checkpoint.load(tmp_path / "m.eqx", like=model, **how)
        assert (type(dropout.p), type(dropout.inference)) == (float, bool)


def test_verify_says_what_kind_of_checksums_there_were(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(1000))
    assert str(checkpoint.verify(tmp_path / "a.npz")).endswith("every checksum matches")
    assert "checksums of whole arrays" in eformer("inspect", tmp_path / "a.npz").stdout


def test_copies_of_files_without_names_are_the_same(tmp_path):
    copy = tmp_path / "copy.eqx"
    copy.write_bytes((DATA / "equinox.eqx").read_bytes())
    found = checkpoint.diff(DATA / "equinox.eqx", copy)
    assert found.same
    assert found.notes == ()
