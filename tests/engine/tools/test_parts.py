"""Conversions and merges in parts, as independent jobs write them: any number of parts gives the same bytes."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer._engine.tools.view import View
from eformer.checkpoint import convert, load, merge, save, verify
from eformer.errors import ProcessError
from support import forkserver, merges
from support.conversions import CASES, DIVIDED, EPOCH, arguments_of, make_sources
from support.faults import hooked, noted, struck
from support.launched import files_below


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("sources")
    make_sources(place)
    return place


@pytest.fixture(autouse=True)
def epoch(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)


def convert_case(case, sources, folder, **more):
    source, name, arguments = arguments_of(case, sources)
    folder.mkdir(exist_ok=True)
    convert(source, folder / name, **arguments, **more)
    return folder / name


@pytest.mark.parametrize("case", CASES)
def test_equal_conversions_have_equal_bytes(sources, tmp_path, case):
    one, other = (convert_case(case, sources, tmp_path / name) for name in "ab")
    assert files_below(one) == files_below(other)


@pytest.mark.parametrize("count", [1, 2, 4, 13])
@pytest.mark.parametrize("case", DIVIDED)
def test_any_number_of_parts_gives_the_same_bytes(sources, tmp_path, case, count):
    alone = convert_case(case, sources, tmp_path / "alone")
    for number in reversed(range(count)):
        parts = convert_case(case, sources, tmp_path / "parts", part=f"{number}/{count}")
        assert not parts.exists()
    convert_case(case, sources, tmp_path / "parts", commit=True)
    assert files_below(parts) == files_below(alone)
    assert os.listdir(parts.parent) == [parts.name]
    assert verify(parts).ok


def test_parts_are_resumed(sources, tmp_path):
    for number in range(3):
        convert_case("shards", sources, tmp_path / "new", part=f"{number}/3")
    before = {name: os.stat(tmp_path / "new/.new.parts" / name).st_mtime_ns for name in ("part-0", "part-1")}
    (file, *_) = sorted((tmp_path / "new/.new.parts/0/data").iterdir())
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))
    written = {}
    for number in range(3):
        convert_case("shards", sources, tmp_path / "new", part=f"{number}/3")
        written[number] = os.stat(tmp_path / f"new/.new.parts/part-{number}").st_mtime_ns
    assert written[1] == before["part-1"]
    assert written[0] != before["part-0"]  # the damage is in its bytes
    new = convert_case("shards", sources, tmp_path / "new", commit=True)
    assert verify(new).ok


def test_a_commit_lists_all_parts_that_are_missing(sources, tmp_path):
    convert_case("zarr", sources, tmp_path / "new", part="1/4")
    with pytest.raises(FileNotFoundError, match=r"3 of 4 parts of .*/new are missing: 0; 2; 3; write them"):
        convert_case("zarr", sources, tmp_path / "new", commit=True)
    assert os.listdir(tmp_path / "new") == [".new.parts"]
    with pytest.raises(FileNotFoundError, match=r"other has no parts that could be committed"):
        convert(sources / "tree", tmp_path / "other", to="zarr", commit=True)


def test_parts_of_two_conversions_are_never_mixed(sources, tmp_path):
    convert(sources / "tree", tmp_path / "new", to="safetensors", part="0/2")
    with pytest.raises(ValueError, match=r"\.new\.parts belongs to another conversion.*same arguments"):
        convert(sources / "tree", tmp_path / "new", to="safetensors", dtype="bf16", part="1/2")
    with pytest.raises(ValueError, match=r"\.new\.parts has 2 parts, expected 3"):
        convert(sources / "tree", tmp_path / "new", to="safetensors", part="1/3")
    with pytest.raises(ValueError, match="another conversion"):
        convert(sources / "several", tmp_path / "new", to="safetensors", commit=True)


def test_two_tries_at_once_one_wins_and_the_other_says_so(sources, tmp_path):
    failed = []

    def again(number, name):
        if name == "ftruncate" and not failed:
            failed.append(None)
            with pytest.raises(ProcessError) as error:
                convert(sources / "tree", tmp_path / "new", to="safetensors", part="0/2")
            failed.append(str(error.value))

    with hooked(before=again):
        convert(sources / "tree", tmp_path / "new", to="safetensors", part="0/2")
    assert "part 0 of" in failed[1]
    assert "is being written by another command; wait for it, or end it" in failed[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": "2/2"}, r"part='2/2': expected I/N with I from 0 to N-1"),
        ({"part": "0/2", "commit": True}, "part= and commit= are two calls"),
        ({"part": "0/2", "to": "orbax"}, "is one orbax file; convert by one process"),
    ],
)
def test_parts_that_cannot_be_written(sources, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(sources / "tree", tmp_path / "new", **{"to": "zarr"} | arguments)
    assert os.listdir(tmp_path) == []


def test_a_destination_that_exists_is_refused(sources, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").touch()
    with pytest.raises(FileExistsError, match="already exists"):
        convert(sources / "tree", tmp_path / "new", to="zarr", part="0/2")
    assert os.listdir(tmp_path) == ["new"]


def test_parts_read_little_more_than_their_bytes(sources, tmp_path):
    reads = []
    original = View.read

    def counted(view, name, entry, box, threads=None):
        reads.append(box.size * np.dtype(np.float32).itemsize)
        return original(view, name, entry, box, threads)

    View.read = counted
    try:
        for number in range(4):
            convert(sources / "tree", tmp_path / "new", to="safetensors", keys="large", part=f"{number}/4")
    finally:
        View.read = original
    assert sum(reads) <= 1.05 * 1500 * 700 * 4
    convert(sources / "tree", tmp_path / "new", to="safetensors", keys="large", commit=True)
    np.testing.assert_array_equal(load(tmp_path / "new")["large"], load(sources / "tree")["large"])


def die_at(at, moment, case, sources, folder, **more):
    """Convert in a process that dies before or after one of its calls. Return False if it has fewer."""
    process = forkserver.context().Process(target=_die, args=(at, moment, case, sources, folder), kwargs=more)
    process.start()
    process.join()
    return process.exitcode == 9


def _die(at, moment, case, sources, folder, **more):
    os.environ["SOURCE_DATE_EPOCH"] = EPOCH
    with hooked(**{moment: lambda number, _: os._exit(9) if number == at else None}):
        convert_case(case, sources, folder, **more)


@pytest.mark.sample(3)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("case", ["file", "zarr"])
def test_a_part_or_a_commit_that_is_killed_at_any_call_goes_on(sources, tmp_path, case, moment):
    alone = files_below(convert_case(case, sources, tmp_path / "alone"))
    ways = ({"part": "1/2"}, {"commit": True})
    for way in ways:
        for at in struck(lambda at, way=way: dies(at, moment, case, sources, tmp_path, way), (case, moment)):
            with noted(f"{way}: call {at}"):
                new = tmp_path / str(at) / ("new.safetensors" if case == "file" else "new")
                if new.exists():  # the rename was the commit
                    assert "commit" in way
                else:
                    convert_case(case, sources, tmp_path / str(at), part="1/2")
                    convert_case(case, sources, tmp_path / str(at), commit=True)
                assert files_below(new) == alone
            shutil.rmtree(tmp_path / str(at))


def dies(at, moment, case, sources, place, way):
    """Write part 0, and for a commit part 1, too; then die. Return the number of the call, None if there are fewer."""
    convert_case(case, sources, place / str(at), part="0/2")
    if "commit" in way:
        convert_case(case, sources, place / str(at), part="1/2")
    return at if die_at(at, moment, case, sources, place / str(at), **way) else None


# --------------------------------------------------------------------------------------------- merges


@pytest.fixture(scope="module")
def merged_sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("merged")
    merges.make_sources(place)
    return place


def merge_case(case, sources, where, **more):
    paths, arguments = merges.arguments_of(case, sources)
    merge(paths, where, **arguments, **more)
    return where


@pytest.mark.sample(5)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("case", merges.CASES)
def test_any_number_of_parts_merges_to_the_same_bytes(merged_sources, tmp_path, case, count):
    alone = merge_case(case, merged_sources, tmp_path / "alone" / "new")
    new = tmp_path / "parts" / "new"
    for number in reversed(range(count)):
        merge_case(case, merged_sources, new, part=f"{number}/{count}")
        assert not new.exists()
    merge_case(case, merged_sources, new, commit=True)
    assert files_below(new) == files_below(alone)
    assert os.listdir(new.parent) == ["new"]
    assert verify(new).ok


def test_a_part_of_a_merge_is_not_written_again(merged_sources, tmp_path):
    for number in range(3):
        merge_case("mean shards", merged_sources, tmp_path / "new", part=f"{number}/3")
    before = os.stat(tmp_path / ".new.parts/part-1").st_mtime_ns
    with hooked(before=lambda number, name: calls.append(name)):
        calls = []
        merge_case("mean shards", merged_sources, tmp_path / "new", part="1/3")
    assert os.stat(tmp_path / ".new.parts/part-1").st_mtime_ns == before
    assert not {"pwrite", "write", "replace", "rename"} & set(calls)


def test_parts_of_merges_by_other_numbers_are_never_mixed(merged_sources, tmp_path):
    run, lora = merged_sources / "run", merged_sources / "lora"
    merge(run, tmp_path / "sum", last=2, weights=[0.5, 0.25], to="zarr", part="0/2")
    merge(run / "step-1", tmp_path / "lora", lora=lora, lora_config={"lora_alpha": 8}, to="zarr", part="0/2")
    with pytest.raises(ValueError, match="another conversion"):
        merge(run, tmp_path / "sum", last=2, weights=[0.5, 0.2500001], to="zarr", part="1/2")
    config = {"lora_alpha": 8.0000001}
    with pytest.raises(ValueError, match="another conversion"):
        merge(run / "step-1", tmp_path / "lora", lora=lora, lora_config=config, to="zarr", part="1/2")


@pytest.mark.parametrize("changed", ["first", "last", "lora"])
def test_parts_of_a_merge_belong_to_the_contents_of_all_sources(tmp_path, changed):
    lora = {"w": {"lora_a": np.ones((40, 2), np.float32), "lora_b": np.ones((2, 30), np.float32)}}
    trees = {"first": {"w": np.ones((40, 30))}, "last": {"w": np.zeros((40, 30))}, "lora": lora}
    for name, tree in trees.items():
        save(tree, tmp_path / name)
    more = {"lora": tmp_path / "lora", "lora_config": {"lora_alpha": 2}} if changed == "lora" else {}
    paths = [tmp_path / name for name in (["last"] if more else ["first", "last"])]
    merge(paths, tmp_path / "new", to="zarr", part="0/2", **more)
    save(trees[changed], tmp_path / changed, overwrite=True)
    with pytest.raises(ValueError, match="another conversion"):
        merge(paths, tmp_path / "new", to="zarr", part="1/2", **more)


def test_parts_of_a_merge_belong_to_the_files_of_a_source_without_digests(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        safetensors.numpy.save_file({"w": np.ones(9)}, path)
    merge(paths, tmp_path / "new", keys="w", to="zarr", part="0/2")
    safetensors.numpy.save_file({"w": np.zeros(9), "x": np.ones(9)}, paths[0])
    with pytest.raises(ValueError, match="another conversion"):
        merge(paths, tmp_path / "new", keys="w", to="zarr", part="1/2")


def test_parts_of_a_merge_belong_to_the_dtype_of_dequantised_weights(tmp_path):
    leaves = {
        "w.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
        "w.weight_scale_inv": np.full((1, 1), 0.3, np.float32),
    }
    for name in "ab":
        safetensors.numpy.save_file(leaves, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    merge(paths, tmp_path / "new", to="zarr", dtype="float32", dequant="bf16", part="0/2")
    with pytest.raises(ValueError, match="another conversion"):
        merge(paths, tmp_path / "new", to="zarr", dtype="float32", dequant="float32", part="1/2")


def test_small_leaves_of_all_sources_of_a_sum_are_read_in_one_batch_each(tmp_path, monkeypatch):
    for name in "ab":
        save({f"l{n}": np.full(8, float(n)) for n in range(50)}, tmp_path / name)
    batches, original = [], View.read_all
    monkeypatch.setattr(
        View, "read_all", lambda view, names: batches.append(len(names)) or original(view, names)
    )
    monkeypatch.setattr(View, "read", lambda *_: pytest.fail("a small leaf was read alone"))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "new", to="safetensors")
    assert batches == [50, 50]
    monkeypatch.undo()
    assert all((leaf == float(name[1:])).all() for name, leaf in load(tmp_path / "new").items())


def test_parts_of_a_merge_read_little_more_than_their_bytes(merged_sources, tmp_path, monkeypatch):
    reads, original = [], View.read

    def counted(view, name, entry, box, threads=None):
        reads.append(box.size * entry.nbytes // np.prod(entry.shape))
        return original(view, name, entry, box, threads)

    monkeypatch.setattr(View, "read", counted)
    for number in range(4):
        merge(
            merged_sources / "run",
            tmp_path / "new",
            last=3,
            keys="large",
            to="safetensors",
            part=f"{number}/4",
        )
    assert 3 * 1500 * 700 * 4 <= sum(reads) <= 1.05 * 3 * 1500 * 700 * 4
