"""Conversions by real processes on loopback: the same bytes for any number, and a killed process leaves nothing visible."""

import os

import pytest

from eformer.checkpoint import convert, verify
from support.conversions import CASES, EPOCH, arguments_of, make_sources, words_of
from support.launched import QUICK, dying_at, files_below, launched

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("sources")
    make_sources(place)
    return place


@pytest.fixture
def alone(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)

    def converted(case):
        source, name, arguments = arguments_of(case, sources)
        (tmp_path / "alone").mkdir(exist_ok=True)
        convert(source, tmp_path / "alone" / name, **arguments)
        return files_below(tmp_path / "alone" / name)

    return converted


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_writes_the_same_bytes(sources, alone, tmp_path, case, count):
    source, name, words = words_of(case, sources)
    (tmp_path / "many").mkdir()
    outcome = launched(count, "convert", source, tmp_path / "many" / name, *words)
    assert outcome.codes == [0] * count, outcome
    assert outcome.outputs[1:] == [""] * (count - 1)
    assert files_below(tmp_path / "many" / name) == alone(case)
    assert os.listdir(tmp_path / "many") == [name]


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [1, 5, 9, 14, 22, 30, 45, 60, 90])
@pytest.mark.parametrize("case", ["shards", "zarr"])
def test_a_killed_process_is_named_and_the_next_try_goes_on(sources, alone, tmp_path, case, at):
    source, _name, words = words_of(case, sources)
    programs = {0: QUICK, 1: QUICK + dying_at(at), 2: QUICK}
    outcome = launched(3, "convert", source, tmp_path / "new", *words, programs=programs)
    assert at > 9 or outcome.codes[1] == -9
    if outcome.codes != [0, 0, 0]:  # it made fewer calls
        assert outcome.codes == [1, -9, 1], outcome
        assert "process 1 of 3 gave no sign of life for 3 s" in outcome.errors[0]
        assert not (tmp_path / "new").exists()
        outcome = launched(3, "convert", source, tmp_path / "new", *words)
        assert outcome.codes == [0, 0, 0], outcome
    assert files_below(tmp_path / "new") == alone(case)
    assert [entry for entry in os.listdir(tmp_path) if entry.startswith(".")] == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [1, 8, 20, 40, 60, 80, 100, 120, 140])
def test_the_first_process_is_killed_and_nothing_half_done_is_visible(sources, alone, tmp_path, at):
    source, _name, words = words_of("shards", sources)
    programs = {0: dying_at(at)}
    outcome = launched(2, "convert", source, tmp_path / "new", *words, programs=programs)
    assert at > 8 or outcome.codes[0] == -9
    if outcome.codes[0] == -9:  # it had the service of JAX, which ends the other process
        assert outcome.codes[1] != 0, outcome
    if (tmp_path / "new").exists():  # committed, before it could say so
        assert verify(tmp_path / "new").ok
        return
    outcome = launched(2, "convert", source, tmp_path / "new", *words)
    assert outcome.codes == [0, 0], outcome
    assert files_below(tmp_path / "new") == alone("shards")


def test_an_error_in_one_process_is_one_error_in_all_and_nothing_is_visible(sources, tmp_path):
    source, _name, words = words_of("shards", sources)
    full = "import eformer._engine.stores.new_files as f, errno\n"
    full += "def fail(*a): raise OSError(errno.ENOSPC, 'No space left', 'model-3')\nf.write_all = fail"
    outcome = launched(3, "convert", source, tmp_path / "new", *words, programs={2: full})
    assert outcome.codes == [1, 1, 1], outcome
    assert "process 2: OSError(28, 'No space left')" in outcome.errors[0]
    assert outcome.errors[1:] == ["", ""]
    assert not (tmp_path / "new").exists()


def test_damage_in_the_source_is_an_error_with_leaf_and_bytes(sources, tmp_path):
    convert(sources / "tree", tmp_path / "damaged", to="safetensors")
    (file,) = (tmp_path / "damaged").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-7] ^= 255
    file.write_bytes(data)
    outcome = launched(2, "convert", tmp_path / "damaged", tmp_path / "new", "--to", "zarr")
    assert outcome.codes == [1, 1], outcome
    assert "leaf '" in outcome.errors[0]
    assert "are damaged: their digest is" in outcome.errors[0]


def test_processes_that_convert_different_things_are_refused(sources, tmp_path):
    other = "import sys\nsys.argv[sys.argv.index('safetensors')] = 'zarr'"
    words = ("convert", sources / "plain", tmp_path / "new", "--to", "safetensors")
    outcome = launched(2, *words, programs={1: other})
    assert outcome.codes == [1, 1], outcome
    assert "the processes convert different things: process 1" in outcome.errors[0]
