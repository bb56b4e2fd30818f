"""Arrays that numpy wrote to one file load like any checkpoint: whole, in parts, onto meshes, mapped."""

import io
import os
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, FormatError
from support.commands import run
from support.damage import flip
from support.samples import write
from support.trees import assert_same

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
    for at in (600, zipfile.ZipFile(path).infolist()[1].header_offset + 400):
        flip(path, at)
    report = checkpoint.verify(path)
    assert {damage.leaf for damage in report.damages} == {"a", "f"}
    with pytest.raises(CorruptionError, match=r"x\.npz"):
        checkpoint.load(path)


def test_a_damaged_text_is_named_with_its_file(npz):
    path = npz(t="text" * 50)
    flip(path, path.read_bytes().index(b"PK\x01\x02") - 5)  # before the directory: the member's last bytes
    with pytest.raises(CorruptionError, match=r"x\.npz: member 't.npy' is damaged"):
        checkpoint.inspect(path)


def test_members_that_claim_more_than_they_can_hold_are_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
            archive.writestr("a.npy", header.getvalue() + bytes(64))
        with pytest.raises(FormatError, match=r"member 'a.npy'.*the header needs"):
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
    refused("is a zip archive without arrays of numpy.*: data.pkl", "data.pkl")
    refused("compressed by method 14", "a.npy", compression=zipfile.ZIP_LZMA)
    refused("not an array of numpy", "a.npy")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", "", "a..b", "%", "x" * 300, "a/b"])
def test_names_in_npz_are_only_names(tmp_path, name):
    np.savez(tmp_path / "x.npz", **{name: np.ones(2)})
    (leaf,) = jax.tree.leaves(checkpoint.load(tmp_path / "x.npz"))
    np.testing.assert_array_equal(leaf, np.ones(2))


def test_many_problems_are_counted(tmp_path):
    np.savez(tmp_path / "a.npz", **{f"t{i}": np.array(["a", "b"]) for i in range(30)})
    with pytest.raises(FormatError, match="; and 25 more"):
        checkpoint.load(tmp_path / "a.npz")


def test_verify_names_the_kind_of_checksums(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(1000))
    assert str(checkpoint.verify(tmp_path / "a.npz")).endswith("every checksum matches")
    assert "checksums of whole arrays" in run("inspect", tmp_path / "a.npz").stdout
