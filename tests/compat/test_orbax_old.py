"""Checkpoints by Orbax 0.2.7 to 0.12.8, by flax over it and by T5X load equal to the trees that Orbax restored."""

import json
import os
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest

from compat.make_samples.describe import described, described_leaves
from eformer import checkpoint
from eformer.errors import CorruptionError, FormatError
from eformer.pytree._serialization import msgpack_serialize

ARCHIVE = Path(__file__).parent / "orbax-old" / "samples.tar.xz"
T5X = "t5x-like-checkpoint_1000"


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """The unpacked samples: checkpoints, and `expected.json` with the tree that Orbax restored from each."""
    directory = tmp_path_factory.mktemp("orbax-old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def _names():
    with tarfile.open(ARCHIVE) as archive:
        member = next(m for m in archive if m.name.endswith("expected.json"))
        return json.load(archive.extractfile(member))


EXPECTED = _names()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_loads_equal_to_the_tree_that_orbax_restored(samples, name):
    for item, leaves in EXPECTED[name].items():
        tree = checkpoint.load(samples / name, prefix=item or None)
        assert described_leaves(tree) == leaves


def test_a_tree_of_t5x_has_the_leaves_of_the_file_and_the_arrays_beside_it(samples):
    tree = checkpoint.load(samples / T5X)
    encoder = tree["optimizer"]["target"]["encoder"]
    assert tree["version"] == 3
    assert tree["optimizer"]["state"]["step"] == 1000
    assert encoder["kernel"].shape == (4, 8)
    assert encoder["scale"].shape == (3,)
    assert set(tree["optimizer"]["state"]["param_states"]["encoder"]["kernel"]) == {"m", "v"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*EXPECTED, T5X])
def test_nothing_of_a_sample_is_left_out(samples, name):
    report = checkpoint.verify(samples / name)
    assert report.ok, report
    assert report.left_out == ()


@pytest.mark.parametrize("name", ["orbax-0.2.7/ptmixagg_base", "orbax-0.4.1/ptmixagg_base", T5X])
def test_a_conversion_has_all_leaves(samples, tmp_path, name):
    checkpoint.convert(samples / name, tmp_path / "new", to="safetensors")
    before, after = checkpoint.load(samples / name), checkpoint.load(tmp_path / "new")
    assert described_leaves(after) == described_leaves(before)


def test_the_last_step_is_the_one_that_is_read(samples):
    assert checkpoint.load(samples / "orbax-0.2.7" / "mgr_legacy")["step"] == 10
    assert checkpoint.load(samples / "orbax-0.2.7" / "mgr_legacy" / "2")["step"] == 2


@pytest.mark.parametrize("name", ["orbax-0.2.7/mgr_legacy", "orbax-0.5.3/mgr_legacy"])
def test_steps_of_a_manager_before_it_marked_them_are_steps(samples, tmp_path, name):
    run = shutil.copytree(samples / name, tmp_path / "run")
    assert checkpoint.latest(run) == f"{run}/10"
    with checkpoint.Run(run, keep=1, signals=()) as job:
        assert job.resume().tree["step"] == job.step == 10
        job.save(11, {"w": np.ones(2)})
    assert [step.number for step in checkpoint.steps(run)] == [2, 10, 11]


@pytest.mark.parametrize(
    "shardings",
    [
        b'{"layer": {"kernel": "{}"}}',  # Orbax 0.4.1 writes this for a leaf called "layer/kernel"
        b'{"a": [1], "b": null, "c": 3, "ZA==": "[]"}',
        b'{"ZA==": "{\\"sharding_type\\": \\"NamedSharding\\", \\"shape\\": [2], \\"axis_names\\": []}"}',
        b'{"a": ' * 100_000,
        b'{"a": NaN}',
        b"[]",
        b"null",
        b"\xff",
        b"",
    ],
    ids=lambda shardings: repr(shardings[:20]),
)
def test_a_file_of_shardings_that_cannot_be_parsed_does_not_stop_a_load(samples, tmp_path, shardings):
    path = shutil.copytree(samples / "orbax-0.4.1" / "pt_base", tmp_path / "pt_base")
    (path / "_sharding").write_bytes(shardings)
    (leaves,) = EXPECTED["orbax-0.4.1/pt_base"].values()
    assert described_leaves(checkpoint.load(path)) == leaves
    assert checkpoint.verify(path).ok


def test_a_damaged_file_of_shardings_is_named_in_the_log(samples, tmp_path, caplog):
    path = shutil.copytree(samples / "orbax-0.4.1" / "pt_base", tmp_path / "pt_base")
    (path / "_sharding").unlink()
    (path / "_sharding").mkdir()
    checkpoint.load(path)
    assert f"{path / '_sharding'} is not a regular file" in caplog.text
    assert "the arrays are read without their recorded shardings" in caplog.text


def test_items_of_json_are_metadata_of_the_trees(samples):
    state = checkpoint.inspect(samples / "orbax-0.12.8" / "mgr_new").trees["state"]
    assert state.metadata == {"meta": {"a": 10}, "metrics": {"loss": 0.1}}


def test_the_state_of_numpys_generator_is_a_tree(samples):
    name, keys, *_ = checkpoint.load(samples / "orbax-0.12.8" / "mgr_new", prefix="nprng")
    assert name == "MT19937"
    assert keys.shape == (624,)


# ---------------------------------------------------------------------------------------------- a tree by hand


def zarr(directory, name, array):
    """A zarr array as TensorStore writes it."""
    (directory / name).mkdir(parents=True)
    about = {
        "chunks": list(array.shape), "compressor": None, "dimension_separator": ".", "dtype": array.dtype.str,
        "fill_value": None, "filters": None, "order": "C", "shape": list(array.shape), "zarr_format": 2,
    }  # fmt: skip
    (directory / name / ".zarray").write_text(json.dumps(about))
    (directory / name / ".".join("0" * array.ndim)).write_bytes(array.tobytes())


W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def path(tmp_path):
    """A directory with the array `w`, and a directory beside it that is none of its business."""
    zarr(tmp_path / "checkpoint", "w", W)
    zarr(tmp_path / "outside", "secret", W)
    return tmp_path / "checkpoint"


def write(path, tree):
    (path / "checkpoint").write_bytes(msgpack_serialize(tree))
    return path


def t5x(array, **more):
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": array},
        "metadata": {"shape": [2, 3]},
    } | more


@pytest.mark.parametrize("array", ["PLACEHOLDER://w", t5x("w"), t5x("w/"), t5x("w", dtype="float32")])
def test_a_leaf_is_the_array_that_is_named_in_its_place(path, array):
    tree = checkpoint.load(write(path, {"a": {"b": array}, "n": None, "e": {}, "l": [], "i": 3, "s": "text"}))
    np.testing.assert_array_equal(tree["a"].pop("b"), W)
    assert tree == {"a": {}, "n": None, "e": {}, "l": [], "i": 3, "s": "text"}


def test_a_specification_of_the_whole_array_is_that_array(path):
    whole = {"input_exclusive_max": [[2], [3]], "input_inclusive_min": [0, 0]}
    np.testing.assert_array_equal(checkpoint.load(write(path, {"w": t5x("w", transform=whole)}))["w"], W)


@pytest.mark.parametrize(
    "value", [True, -1, 2**63, 2.5, 1 + 2j, "text", np.float32(2.5), np.int8(-3), "PLACEHOLDER:/"]
)
def test_plain_values_keep_their_types(path, value):
    loaded = checkpoint.load(write(path, {"v": value, "w": "PLACEHOLDER://w"}))["v"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_arrays_of_all_kinds_lie_in_the_file(path):
    arrays = {
        "bf16": jnp.arange(3, dtype=jnp.bfloat16), "i64": np.arange(3), "bool": np.array([True, False]),
        "c64": np.ones(2, np.complex64), "none": np.zeros((0, 3), np.float32), "scalar": np.array(3.0, np.float32),
    }  # fmt: skip
    loaded = checkpoint.load(write(path, arrays | {"w": "PLACEHOLDER://w"}))
    for name, array in arrays.items():
        assert described(loaded[name]) == described(array)


def test_an_array_in_flat_chunks_lies_in_the_file(path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    chunked = flax.serialization.to_bytes({"big": W, "big2": W + 1, "w": "PLACEHOLDER://w", "x": W[0, :1]})
    (path / "checkpoint").write_bytes(chunked)
    loaded = checkpoint.load(path)
    np.testing.assert_array_equal(loaded["big"], W)
    np.testing.assert_array_equal(loaded["big2"], W + 1)
    np.testing.assert_array_equal(loaded["w"], W)
    assert checkpoint.verify(path).ok


# -------------------------------------------------------------------------------------------------- hostile ones


@pytest.mark.parametrize(
    "name", ["../outside/secret", "/etc/passwd", "..", "w/../../outside/secret", "w\0", "./w"]
)
@pytest.mark.parametrize("named", [lambda name: f"PLACEHOLDER://{name}", t5x])
def test_an_array_outside_of_the_directory_is_refused(path, name, named):
    with pytest.raises(FormatError, match="leads out"):
        checkpoint.load(write(path, {"a": named(name)}))


@pytest.mark.parametrize("is_array", [True, False])
def test_links_are_not_followed(path, is_array):
    target = path.parent / "outside" / "secret"
    if is_array:
        (path / "linked").symlink_to(target)
    else:
        (path / "w" / "0.0").unlink()
        (path / "w" / "0.0").symlink_to(target / "0.0")
    with pytest.raises(FormatError, match="not a regular file"):
        checkpoint.load(write(path, {"a": "PLACEHOLDER://linked" if is_array else "PLACEHOLDER://w"}))


def test_a_file_that_is_a_link_to_elsewhere_is_not_read(path):
    (path.parent / "other").write_bytes(msgpack_serialize({"a": 3}))
    (path / "checkpoint").symlink_to(path.parent / "other")
    assert set(checkpoint.load(path)) == {"w"}
    assert checkpoint.verify(path).left_out == ("checkpoint",)


@pytest.mark.parametrize("array", ["PLACEHOLDER://", "PLACEHOLDER://gone", "PLACEHOLDER://w/0", t5x("gone")])
def test_a_leaf_whose_array_is_not_there_is_an_error(path, array):
    with pytest.raises(CorruptionError, match="no such array"):
        checkpoint.load(write(path, {"a": array, "w": "PLACEHOLDER://w"}))


@pytest.mark.parametrize("other", ["PLACEHOLDER://w", t5x("w/")])
def test_two_leaves_that_are_one_array_are_refused(path, other):
    with pytest.raises(FormatError, match="'a' and 'b' are both the array 'w'"):
        checkpoint.load(write(path, {"a": "PLACEHOLDER://w", "b": other}))


@pytest.mark.parametrize(
    "more",
    [
        {"transform": {"input_exclusive_max": [1, 3], "input_inclusive_min": [0, 0]}},
        {"transform": {"output": [{"input_dimension": 1}, {"input_dimension": 0}]}},
        {"driver": "n5"},
        {"kvstore": "memory://"},
        {"metadata": {"shape": "wide"}},
        {"scale": 2},
    ],
)
def test_a_specification_that_is_not_known_is_refused_by_its_leaf(path, more):
    with pytest.raises(FormatError, match=r"leaf 'a' is a (part of an array|specification)"):
        checkpoint.load(write(path, {"a": t5x("w") | more}))


def test_an_array_of_another_shape_than_t5x_says_is_refused(path):
    with pytest.raises(FormatError, match=r"has the shape .*, expected \[3, 2\]"):
        checkpoint.load(write(path, {"a": t5x("w", metadata={"shape": [3, 2]})}))


def test_a_chunk_that_is_gone_is_not_taken_for_zeros(path):
    (path / "w" / "0.0").unlink()
    with pytest.raises(CorruptionError, match=r"w/0\.0"):
        checkpoint.load(write(path, {"w": "PLACEHOLDER://w"}))


@pytest.mark.parametrize("nbytes", [1, 10, -1])
def test_a_file_that_was_cut_short_is_an_error(path, nbytes):
    data = msgpack_serialize({"a": np.ones(3), "w": "PLACEHOLDER://w"})
    (path / "checkpoint").write_bytes(data[:nbytes])
    with pytest.raises(FormatError, match="checkpoint cannot be read"):
        checkpoint.load(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["flaxorbax-0.2.7/flax_guide_mixed", "orbax-0.4.8/ptmixagg_base", T5X])
def test_a_file_with_wrong_bytes_is_an_error_or_a_tree(copy, name):
    path = copy(name)
    data = (path / "checkpoint").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        wrong = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            wrong[at] = rng.integers(256)
        (path / "checkpoint").write_bytes(
            wrong[: rng.integers(len(data)) or None] if rng.random() < 0.2 else wrong
        )
        with suppress(FormatError):
            checkpoint.inspect(path)


def test_a_file_of_which_nothing_is_left_is_left_out(path):
    (path / "checkpoint").write_bytes(b"")
    assert checkpoint.verify(path).left_out == ("checkpoint",)


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_file_that_is_nested_too_deep_is_refused(path, depth):
    (path / "checkpoint").write_bytes(b"\x81\xa1a" * depth + b"\xc0")
    with pytest.raises(FormatError, match=r"nested|deep"):
        checkpoint.load(path)


@pytest.mark.parametrize("data", [b"\x80\x04\x95K\x03.", b"model_checkpoint_path: x", b"\0" * 20])
def test_a_file_of_that_name_that_is_something_else_is_left_out(path, data):
    (path / "checkpoint").write_bytes(data)
    assert set(checkpoint.load(path)) == {"w"}
    assert checkpoint.verify(path).left_out == ("checkpoint",)


def test_a_pipe_of_that_name_is_not_waited_for(path):
    os.mkfifo(path / "checkpoint")
    assert checkpoint.inspect(path).left_out == ("checkpoint",)


def test_the_file_alone_is_refused_with_advice(path):
    with pytest.raises(FormatError, match="pass the path of the directory"):
        checkpoint.load(write(path, {"w": "PLACEHOLDER://w"}) / "checkpoint")
    with pytest.raises(FormatError, match="pass the path of the directory"):
        checkpoint.load(write(path, {"w": t5x("w")}) / "checkpoint")


def test_a_file_of_flax_whose_arrays_are_elsewhere_is_refused_by_name(tmp_path):
    (tmp_path / "checkpoint_3").write_bytes(msgpack_serialize({"w": "//GDAPlaceholder:w"}))
    with pytest.raises(FormatError, match=r"'w' is an array of several processes.*_gda"):
        checkpoint.load(tmp_path / "checkpoint_3")


# ----------------------------------------------------------------------------------------- with _METADATA


@pytest.fixture
def copy(samples, tmp_path):
    def make(name):
        return Path(shutil.copytree(samples / name, tmp_path / "copy"))

    return make


def test_leaves_that_only_one_of_the_lists_has_are_an_error(copy):
    path = copy("orbax-0.4.8/ptmixagg_nulls")
    write(path, {"a": "PLACEHOLDER://a", "b": np.ones(2), "n": np.ones(2), "more": 3})
    with pytest.raises(FormatError, match="disagree about these leaves: more"):
        checkpoint.load(path)


def test_a_leaf_that_the_lists_have_in_different_arrays_is_an_error(copy):
    path = copy("orbax-0.4.8/ptmixagg_nulls")
    write(path, {"a": "PLACEHOLDER://b", "b": np.ones(2), "n": np.ones(2)})
    with pytest.raises(FormatError, match="disagree about these leaves: a"):
        checkpoint.load(path)


def test_leaves_in_a_file_that_is_gone_are_missed_by_name(copy):
    path = copy("orbax-0.4.8/ptmixagg_nulls")
    (path / "checkpoint").unlink()
    with pytest.raises(CorruptionError, match=r"leaf 'b' is in .*checkpoint, which is missing"):
        checkpoint.load(path)


def test_arrays_that_no_leaf_names_are_left_out(copy):
    path = copy("orbax-0.4.8/ptmixagg_nulls")
    zarr(path, "stray", W)
    assert checkpoint.inspect(path).left_out == ("stray/",)


@pytest.mark.parametrize("name", ["orbax-0.4.1/ptmixagg_base", "orbax-0.3.5/ptmixagg_base"])
def test_arrays_of_the_database_that_no_leaf_names_are_left_out(copy, name):
    path = copy(name)
    write(path, {"np_f64": "PLACEHOLDER://np_f64"})
    there = ("manifest.ocdbt/params.dense.kernel", "manifest.ocdbt/params.layers.1")
    assert checkpoint.verify(path).left_out == there


# ------------------------------------------------------------------------------------------- steps and items


def test_items_that_are_called_like_steps_are_all_there(samples, tmp_path):
    for name in ("head_1", "head_2"):
        shutil.copytree(samples / "orbax-0.2.7" / "ptagg_nulls", tmp_path / name)
    assert set(checkpoint.inspect(tmp_path).trees) == {"head_1", "head_2"}


def test_steps_with_a_prefix_are_steps(samples, tmp_path):
    for name in ("run_9", "run_10"):
        shutil.copytree(samples / "orbax-0.2.7" / "ptagg_nulls", tmp_path / name / "default")
    assert checkpoint.open(tmp_path)._path.endswith("run_10")


def test_a_key_whose_kind_is_not_known_is_an_error_of_that_item_alone(copy):
    path = copy("orbax-0.12.8/mgr_new/10")
    (path / "key" / "jax_random_key_metadata" / "metadata").write_text("{}")
    with pytest.raises(FormatError, match="does not record whether the PRNG key is typed"):
        checkpoint.load(path, prefix="key")
    assert checkpoint.load(path, prefix="state")["step"] == 10


def test_a_run_is_not_pruned_from_within_a_checkpoint(samples):
    with pytest.raises(ValueError, match="is itself a checkpoint: it contains checkpoint"):
        checkpoint.prune(samples / "orbax-0.2.7" / "pt_base", keep=1)
