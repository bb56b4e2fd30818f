"""Merges by real processes on loopback: the same bytes for any number, and a killed process leaves nothing visible."""

import os

import pytest

from eformer.checkpoint import merge, save
from support.conversions import EPOCH
from support.launched import QUICK, dying_at, files_below, launched
from support.merges import CASES, arguments_of, make_sources, state, words_of

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("sources")
    make_sources(place)
    return place


@pytest.fixture
def alone(sources, tmp_path, monkeypatch):
    """Merge in this process, and return the files."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)

    def merged(case):
        paths, arguments = arguments_of(case, sources)
        merge(paths, tmp_path / "alone" / "new", **arguments)
        return files_below(tmp_path / "alone" / "new")

    return merged


@pytest.mark.sample(20)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.thorough), 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_merges_to_the_same_bytes(sources, alone, tmp_path, case, count):
    paths, words = words_of(case, sources)
    (tmp_path / "many").mkdir()
    outcome = launched(count, "merge", *paths, tmp_path / "many" / "new", *words)
    assert outcome.codes == [0] * count, outcome
    assert outcome.outputs[1:] == [""] * (count - 1)
    assert files_below(tmp_path / "many" / "new") == alone(case)
    assert os.listdir(tmp_path / "many") == ["new"]


@pytest.mark.thorough
@pytest.mark.parametrize("at", [1, 4, 7, 10])
@pytest.mark.parametrize("case", ["mean shards", "lora zarr"])
def test_a_killed_process_is_named_and_the_next_try_goes_on(sources, alone, tmp_path, case, at):
    paths, words = words_of(case, sources)
    programs = {0: QUICK, 1: QUICK + dying_at(at), 2: QUICK}
    command = ("merge", *paths, tmp_path / "new", *words)
    outcome = launched(3, *command, programs=programs)
    assert outcome.codes == [1, -9, 1], outcome
    assert "process 1 of 3 gave no sign of life for 3 s" in outcome.errors[0]
    assert not (tmp_path / "new").exists()
    outcome = launched(3, *command)
    assert outcome.codes == [0, 0, 0], outcome
    assert files_below(tmp_path / "new") == alone(case)
    assert [entry for entry in os.listdir(tmp_path) if entry.startswith(".")] == []


@pytest.mark.thorough
def test_damage_in_an_earlier_source_is_one_error_and_nothing_is_visible(tmp_path):
    for step in (1, 2):
        save(state(step), tmp_path / f"{step}")
    (file,) = (tmp_path / "1").glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"damaged")
    outcome = launched(3, "merge", tmp_path / "1", tmp_path / "2", tmp_path / "new", "--to", "zarr")
    assert outcome.codes == [1, 1, 1], outcome
    assert "are damaged: their digest is" in outcome.errors[0]
    assert str(file) in outcome.errors[0]
    assert outcome.errors[1:] == ["", ""]
    assert not (tmp_path / "new").exists()


@pytest.mark.thorough
def test_processes_that_merge_by_other_weights_are_refused(sources, tmp_path):
    other = "import sys\nsys.argv[sys.argv.index('1,2')] = '1,3'"
    paths, _ = words_of("numbers zarr", sources)
    words = ("merge", *paths, tmp_path / "new", "--to", "zarr", "--weights", "1,2")
    outcome = launched(2, *words, programs={1: other})
    assert outcome.codes == [1, 1], outcome
    assert "the processes convert different things: process 1" in outcome.errors[0]


@pytest.mark.thorough
def test_several_processes_do_not_write_parts_of_independent_jobs(sources, tmp_path):
    paths, words = words_of("mean zarr", sources)
    outcome = launched(2, "merge", *paths, tmp_path / "new", *words, "--part", "0/2")
    assert outcome.codes == [1, 1], outcome
    assert "2 processes run this command together; leave them out" in outcome.errors[0]
    assert os.listdir(tmp_path) == []
