"""`faults/run.py`: cases that can be repeated, turns that cover every kind, and tables that the page shows."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAULTS = ROOT / "faults"


@pytest.fixture
def program(monkeypatch):
    """Import modules of the program, whose names are as short as those of others, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FAULTS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FAULTS)):
            del sys.modules[name]


def run(*arguments, out):
    """Run the program without its scratch in the checkout."""
    command = [sys.executable, str(FAULTS / "run.py"), "--dir", str(out / "scratch"), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )


def records(out, name="ours"):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------------- page


def test_the_page_shows_the_tables_of_the_committed_results(program):
    report = program("report")
    page = report.PAGE.read_text("utf-8")
    blocks = report.blocks(FAULTS / "results")
    assert all(f"<!-- faults: {name} -->" in page for name in blocks)
    assert report.filled(page, blocks) == page, "python faults/report.py puts them there"


def test_the_committed_results_of_eformer_have_no_failure():
    for name in ("ours", "peers"):
        found = json.loads((FAULTS / "results" / f"{name}.json").read_text())
        ours = [f for f in found["failures"] if name == "ours" or f["layout"].startswith("eformer")]
        assert ours == []


# ---------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("count", [1, 2, 5, 60, 73, 1000])
def test_seeds_reach_every_call_once(program, count):
    spread = program("cases").spread
    assert sorted(spread(seed, count) for seed in range(count)) == list(range(count))


def test_a_case_is_read_as_it_is_printed(program):
    case = program("cases").Case("kills", "arrays, synced at once", 7)
    assert type(case).parse(str(case)) == case
    with pytest.raises(ValueError, match="expected KIND/LAYOUT/SEED"):
        type(case).parse("kills arrays 7")


def test_every_kind_gets_the_same_time(program):
    plan, kinds = program("plan"), program("kinds").KINDS
    chosen = plan.Plan.of([kinds["flips"], kinds["edits"]], peers=False, seed=0)
    costs, spent = {"flips": 1.0, "edits": 10.0}, {"flips": 0.0, "edits": 0.0}
    for _ in range(200):
        lane = chosen.take(1000)
        chosen.begin(lane)
        spent[lane.kind.name] += costs[lane.kind.name]
        chosen.end(lane, "old", costs[lane.kind.name])
    assert abs(spent["flips"] - spent["edits"]) <= 10
    assert len({lane.next_seed for lane in chosen.lanes if lane.kind.name == "flips"}) <= 2


def test_what_cannot_run_is_said(program, monkeypatch):
    plan, kinds = program("plan"), program("kinds").KINDS
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen = plan.Plan.of([kinds["power"]], peers=False, seed=0)
    assert not chosen.lanes
    assert set(chosen.cannot.values()) == {"needs root"}


# ----------------------------------------------------------------------------------------------- cuts


def test_a_cut_keeps_every_write_before_the_last_flush_and_any_after_it(program):
    log = program("block_log")
    writes = [log.Write(n * 4096, bytes([n]) * 4096) for n in range(6)]
    history = log.History([], [*writes[:3], None, *writes[3:]], returned=4)
    seen = set()
    for seed in range(300):
        kept, has_returned = history.cut(random.Random(seed))
        whole = [write for write in kept if write in writes]
        if has_returned:
            assert set(writes[:3]) <= set(whole)
        seen.add(tuple(sorted(write.offset for write in whole)))
        assert all(write.data in writes[write.offset // 4096].data for write in kept)
    assert len(seen) > 10


# -------------------------------------------------------------------------------------------- program


@pytest.mark.thorough
def test_a_short_run_gives_a_table_and_goes_on_with_other_seeds(tmp_path):
    kinds = ("--only", "flips", "kills", "--workers", "1", "--cases", "6")
    done = run(*kinds, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| `flips`: one bit of one file is flipped |" in done.stdout
    first = records(tmp_path)
    assert {record["kind"] for record in first} == {"flips", "kills"}
    assert run(*kinds, "--resume", out=tmp_path).returncode == 0
    both = records(tmp_path)
    assert (both[:6], len(both)) == (first, 12)
    cases = [(record["kind"], record["layout"], record["seed"]) for record in both]
    assert len(set(cases)) == 12


@pytest.mark.thorough
def test_a_save_that_is_not_atomic_is_found_and_its_fault_can_be_repeated(tmp_path):
    here = ("--peers-python", sys.executable)
    repeated = [run("--repeat", f"kills/flax msgpack/{seed}", *here, out=tmp_path) for seed in (0, 1)]
    assert sorted(done.returncode for done in repeated) == [0, 1]
    said = " ".join(done.stdout for done in repeated)
    assert "old" in said
    assert "lost call 2, write: ValueError" in said


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_saves_without_syncs_are_found_by_power_cuts(tmp_path):
    done = run("--repeat", "blocks/control without syncs on ext4/0", out=tmp_path)
    if "CannotMount" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert (done.returncode, "undone" in done.stdout) == (1, True)


@pytest.mark.thorough
def test_loads_without_digests_are_found_by_flipped_bits(tmp_path):
    assert "wrong" in run("--repeat", "flips/control without digests/1", out=tmp_path).stdout


def test_a_kind_or_layout_that_does_not_exist_is_refused(tmp_path):
    done = run("--only", "floods", out=tmp_path)
    assert done.returncode == 2
    assert "no kind floods; the kinds are flips, edits, kills" in done.stderr
    assert "kills has no layout 'x'" in run("--repeat", "kills/x/0", out=tmp_path).stderr


def test_files_of_which_the_suite_runs_a_sample_are_run_whole(program):
    suites = program("kinds.suites").SUITES
    whole = {path for suite in suites for path in suite.files()}
    marked = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.(sample|thorough)\b", path.read_text("utf-8"))
    }
    assert len(marked) > 90
    assert marked <= whole


def test_tests_that_masked_runs_leave_out_exist(program):
    for tests in program("kinds.masked").NOT_KEPT.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text("utf-8"), test


def test_a_masked_run_of_tests_that_nothing_masks_fails(program, tmp_path, monkeypatch):
    masked, kind = program("kinds.masked"), program("kinds.kind")
    suite = masked.Masked("macos", "")
    suite.environment = {**suite.environment, "EFORMER_MASK": ""}
    outcome = suite.run("engine.stores.directory", 0, kind.Bench(tmp_path, tmp_path))
    assert outcome.word == "failed"
