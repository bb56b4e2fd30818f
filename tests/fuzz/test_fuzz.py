"""A few seconds of the fuzzer: the corpus, every input that was a finding once, and some new ones."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from random import Random

import pytest

from fuzz.cases import Case
from fuzz.fuzzer import Finding, Fuzzer
from fuzz.readers import CORPUS, READERS, REGRESSIONS

FEW = 16
INPUTS = int(os.environ.get("EFORMER_FUZZ_INPUTS", FEW))  # of each reader, times its share


@pytest.fixture
def fuzzer(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # such as those of numpy, about numbers that overflow
        yield Fuzzer(tmp_path)


def of_reader(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.zip"))


@pytest.mark.sample(12)
@pytest.mark.parametrize("path", of_reader(CORPUS), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_corpus_is_read_by_every_door(fuzzer, path):
    reader = READERS[path.parent.name]
    case = Case.unpacked(path.read_bytes())
    fuzzer.begin(reader, case)
    others = sorted(path.parent.glob("*.zip"))[1:]
    if INPUTS == FEW and path in others:  # the first file is given to all doors
        turns = itertools.islice(itertools.cycle(dict.fromkeys(reader.doors)), others.index(path), None)
        for door in itertools.islice(turns, 1 if reader.is_slow else 3):
            fuzzer.call(reader, case, door)
    else:
        fuzzer.run_all(reader, case)
    assert fuzzer.outcomes["read"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", of_reader(REGRESSIONS), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_a_finding_is_one_no_more(fuzzer, path):
    reader = READERS[path.parent.name]
    for seed in reader.seeds():
        fuzzer.begin(reader, seed)
        fuzzer.run_all(reader, Case.unpacked(path.read_bytes()))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", READERS)
def test_changed_files_raise_documented_errors(fuzzer, name):
    left = INPUTS * READERS[name].share // (2 if READERS[name].is_slow else 1)
    tried: list[Case] = []

    def tell(case: Case) -> None:
        nonlocal left
        left -= 1
        tried[:] = [case]

    try:
        fuzzer.inputs(READERS[name], Random(f"test:{name}"), lambda: left <= 0, tell)
    except Finding as finding:
        kept = Path(__file__).parent / "findings" / f"{name}--test.zip"
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(tried[0].packed())
        pytest.fail(f"python tests/fuzz/run.py --repeat {kept}\n{finding.text}")
    assert fuzzer.outcomes["read"]
    assert fuzzer.outcomes.total() > fuzzer.outcomes["read"] or name == "near"  # of which a run goes without


def test_an_error_that_is_not_documented_is_a_finding(fuzzer, monkeypatch):
    """The control: a reader that lets a KeyError out is caught."""

    def broken(path: str) -> None:
        raise KeyError(path)

    monkeypatch.setattr(fuzzer.doors, "inspect", broken)
    reader = READERS["safetensors"]
    with pytest.raises(Finding, match="KeyError"):
        fuzzer.call(reader, reader.seeds()[0], "inspect")
