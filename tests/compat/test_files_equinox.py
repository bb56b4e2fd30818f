"""Arrays without names, which equinox wrote one after the other, fill a tree by their order."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import FormatError, MismatchError, StructureError
from support.samples import FILES, write


def read_by_equinox(name):
    with (FILES / name).open("rb") as file:
        if "line" in name:
            file.readline()
        return eqx.tree_deserialise_leaves(file, write.model())


@pytest.mark.parametrize("name", ["equinox.eqx", "equinox_with_line.eqx"])
def test_a_tree_of_equinox_is_filled_by_order(name):
    model = write.model()
    blank = jax.tree.map(
        lambda leaf: type(leaf)() if isinstance(leaf, (bool, int, float, complex)) else leaf, model
    )
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else leaf, blank)
    loaded = checkpoint.load(FILES / name, like=blank)
    assert eqx.tree_equal(loaded, read_by_equinox(name), typematch=True)


def test_a_shape_is_enough_for_equinox():
    like = write.model() | {"module": eqx.filter_eval_shape(lambda: write.model()["module"])}
    loaded = checkpoint.load(FILES / "equinox.eqx", like=like)
    assert eqx.tree_equal(loaded["module"], read_by_equinox("equinox.eqx")["module"])


def test_equinox_lists_arrays_by_number_and_keeps_the_line_before_them():
    tree = checkpoint.inspect(FILES / "equinox_with_line.eqx").trees[""]
    assert tree.metadata == {"width": 4, "depth": 2}
    assert list(tree.leaves) == [str(number) for number in range(len(tree.leaves))]
    with checkpoint.open(FILES / "equinox.eqx") as view:
        assert view["0"].dtype == ml_dtypes.bfloat16
    assert set(checkpoint.load(FILES / "equinox.eqx", keys=["0", "2"])) == {"0", "2"}


def test_equinox_without_like_is_an_error_that_helps():
    with pytest.raises(StructureError, match=r"equinox.eqx holds 15 arrays without names.*pass like="):
        checkpoint.load(FILES / "equinox.eqx")


def test_all_that_does_not_fit_equinox_is_one_error():
    like = write.model()
    like["arrays"]["bfloat16"] = jnp.ones((3, 2), jnp.bfloat16)
    like["numbers"]["float"] = 3
    like["zzz"] = jnp.ones(1)
    with pytest.raises(MismatchError) as error:
        checkpoint.load(FILES / "equinox.eqx", like=like)
    assert len(error.value.problems) == 3
    for problem in (
        "missing leaf 'zzz'",
        "leaf 'arrays.bfloat16': expected bfloat16[3, 2], found bfloat16[2, 3]",
        "leaf 'numbers.float': expected a plain int",
    ):
        assert problem in str(error.value)
    with pytest.raises(MismatchError, match=r"unexpected leaf '%array 14'"):
        checkpoint.load(FILES / "equinox.eqx", like=write.model() | {"module": None})


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


def test_copies_of_files_without_names_are_the_same(tmp_path):
    copy = tmp_path / "copy.eqx"
    copy.write_bytes((FILES / "equinox.eqx").read_bytes())
    found = checkpoint.diff(FILES / "equinox.eqx", copy)
    assert found.same
    assert found.notes == ()
