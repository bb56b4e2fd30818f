"""A checkpoint as a lazy mapping; inspect; both without jax."""

import pickle
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer import checkpoint
from eformer.checkpoint import save
from eformer.errors import CorruptionError

ARRAY = np.arange(6 * 5 * 4, dtype=np.int16).reshape(6, 5, 4)


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    path = tmp_path_factory.mktemp("view")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 16)
        save({"a": ARRAY, "b": {"c": jnp.float32(2.5)}, "n": 3, "t": "x"}, path, metadata={"step": 1})
    with checkpoint.open(path) as view:
        yield view


def test_a_view_is_a_mapping_of_leaves_and_values(view):
    assert list(view) == ["a", "b.c", "n", "t"]
    assert len(view) == 4
    assert "b.c" in view
    assert "b" not in view
    assert (view["n"], view["t"], view.metadata) == (3, "x", {"step": 1})
    assert "2 arrays, 121 parameters, 244 B, 2 plain values" in repr(view)
    with pytest.raises(KeyError, match=r"no leaf 'bc' \(nearest is 'b.c'\)"):
        view["bc"]


def test_a_view_takes_either_spelling_and_subtrees(tmp_path):
    names = ["h.0.bias", "h.0.weight", "h.1.bias"]
    save({name: np.full(3, number) for number, name in enumerate(names)} | {"h.step": 5}, tmp_path)
    with checkpoint.open(tmp_path) as view:
        for spelling in ("h.1.bias", "h%2E1%2Ebias"):
            assert spelling in view
            np.testing.assert_array_equal(view[spelling][:], [2, 2, 2])
        assert list(view["h.0"]) == ["h%2E0%2Ebias", "h%2E0%2Eweight"]
        assert view["h"]["h%2Estep"] == view["h.step"] == 5
        with pytest.raises(KeyError, match=r"no leaf 'h.2.bias' \(nearest is 'h.[01].bias'\)"):
            view["h.2.bias"]
        assert "h.2.bias" not in view
        assert "h" not in view  # which is not a leaf
        assert 1 not in view


def test_a_spelling_that_means_two_leaves_is_refused_with_both(tmp_path):
    save({"a.b.c": np.ones(1), "a.b": {"c": np.ones(2)}}, tmp_path)
    record = checkpoint.inspect(tmp_path).trees[""].leaves
    with checkpoint.open(tmp_path) as view:
        assert (len(view["a%2Eb.c"]), len(view["a%2Eb%2Ec"])) == (2, 1)
        assert "a.b.c" not in view
        for mapping in (view, record):
            with pytest.raises(KeyError, match=r"'a.b.c' is ambiguous.*'a%2Eb.c', 'a%2Eb%2Ec'"):
                mapping["a.b.c"]


def test_a_record_takes_either_spelling(tmp_path):
    save({"h.0.bias": np.ones(3)}, tmp_path)
    leaves = checkpoint.inspect(tmp_path).trees[""].leaves
    assert leaves["h.0.bias"] is leaves["h%2E0%2Ebias"]
    assert list(leaves) == ["h%2E0%2Ebias"]
    with pytest.raises(KeyError, match=r"no leaf 'h.0.bia' \(nearest is 'h.0.bias'\)"):
        leaves["h.0.bia"]


def test_a_leaf_has_its_shape_and_dtype_without_being_read(view):
    leaf = view["a"]
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.size, leaf.nbytes, len(leaf)) == (
        (6, 5, 4),
        np.int16,
        3,
        120,
        240,
        6,
    )
    assert repr(leaf) == "<leaf a: int16[6, 5, 4]>"
    with pytest.raises(TypeError, match="without axes"):
        len(view["b.c"])


parts = st.integers(-7, 6) | st.slices(6) | st.just(Ellipsis)


@given(index=st.lists(parts, max_size=4).map(tuple) | parts)
def test_indexing_equals_numpys(view, index):
    try:
        expected = ARRAY[index]
    except IndexError:
        with pytest.raises(IndexError):
            view["a"][index]
        return
    found = view["a"][index]
    np.testing.assert_array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)


@pytest.mark.parametrize("index", [[0, 1], np.array([True] * 6), "x", None, 1.5])
def test_other_indices_are_refused(view, index):
    with pytest.raises(IndexError, match="integers, slices and"):
        view["a"][index]


def test_a_leaf_becomes_an_array(view):
    np.testing.assert_array_equal(np.asarray(view["a"]), ARRAY)
    assert np.asarray(view["a"], np.float32).dtype == np.float32
    assert view["b.c"][()] == 2.5
    with pytest.raises(ValueError, match="copy=False is impossible"):
        np.array(view["a"], copy=False)


def test_a_closed_view_says_so(tmp_path):
    save({"a": ARRAY}, tmp_path)
    view = checkpoint.open(tmp_path)
    view.close()
    with pytest.raises(ValueError, match="is closed"):
        view["a"][0]


def test_prefixes_are_opened_by_name(tmp_path):
    save({"a": 1}, tmp_path, prefix="x")
    save({"a": 2}, tmp_path, prefix="y")
    assert checkpoint.open(tmp_path, prefix="y")["a"] == 2


def test_looking_at_a_checkpoint_imports_no_jax(tmp_path):
    save({"a": jnp.ones((3, 4), jnp.bfloat16), "k": jnp.ones(2, jnp.int4)}, tmp_path / "d")
    save({"a": jnp.ones(3)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from eformer import checkpoint as c\n"
        "for path in sys.argv[1:]:\n"
        "    assert c.inspect(path).trees[''].leaves['a'].shape; assert c.verify(path).ok\n"
        "    with c.open(path) as view: view['a'][0]\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d"), str(tmp_path / "x.safetensors")], check=True
    )


def test_inspect_lists_trees_and_leaves(tmp_path):
    save({"w": jnp.ones((3, 4)), "n": 3}, tmp_path, metadata={"step": 7})
    manifest = checkpoint.inspect(tmp_path)
    tree = manifest.trees[""]
    assert (manifest.format, manifest.version) == ("safetensors", 1)
    assert (tree.metadata, tree.values, tree.nbytes) == ({"step": 7}, {"n": 3}, 48)
    leaf = tree.leaves["w"]
    assert (leaf.dtype, leaf.shape, leaf.home) == ("float32", (3, 4), "jax")
    assert tree.written_by.startswith("eformer ")


def test_a_few_rows_do_not_keep_all_between_them(view):
    assert view["a"][::5].base is None or view["a"][::5].base.nbytes < ARRAY.nbytes


def test_a_view_of_a_checkpoint_whose_file_is_gone_says_so(tmp_path):
    save({"a": ARRAY}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptionError, match="names a file that is missing"):
        checkpoint.open(tmp_path)


def test_memory_that_is_not_there_is_missed_by_name(tmp_path, monkeypatch):
    save({"w": np.ones((2**20, 2))}, tmp_path / "c")

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("eformer._engine.loading.fetch.aligned", refuse)
    with pytest.raises(MemoryError, match=r"not enough memory for leaf 'w', float64\[1048576, 2\]"):
        checkpoint.load(tmp_path / "c")


def test_a_copy_opens_the_files_for_itself(tmp_path):
    save({"w": np.arange(5)}, tmp_path / "c", prefix="model")
    with checkpoint.open(tmp_path / "c") as view:
        copy = pickle.loads(pickle.dumps(view))
        copy.close()
        assert list(view["w"][1:3]) == [1, 2]


def test_the_metadata_is_that_of_the_tree_without_a_prefix_or_of_the_only_tree(tmp_path):
    save({"w": 1}, tmp_path, prefix="a", metadata={"step": 1})
    assert checkpoint.inspect(tmp_path).metadata == {"step": 1}
    save({"w": 1}, tmp_path, prefix="b", metadata={"step": 2})
    with pytest.raises(ValueError, match=r"use .trees\[prefix\].metadata, prefix one of \['a', 'b'\]"):
        _ = checkpoint.inspect(tmp_path).metadata
    save({"w": 1}, tmp_path, metadata={"step": 3})
    assert checkpoint.inspect(tmp_path).metadata == {"step": 3}
