"""Conversions in parts, as independent jobs write them: any number of parts gives the same bytes."""

import os
import shutil

import numpy as np
import pytest

from eformer.checkpoint import convert, load, verify
from eformer.errors import ProcessError
from support import forkserver
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
    from eformer._engine.tools.view import View

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
