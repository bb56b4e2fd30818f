"""Which step a run goes on from, and which steps the job may then save."""

import gc
import json
import math
import os
import shutil
import signal
import threading
from unittest.mock import Mock

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.processes import hosts
from eformer._engine.runs import near as near_module
from eformer._engine.runs import retention
from eformer._engine.saving.save import Save
from eformer.checkpoint import Keep, Near, Run
from eformer.errors import CorruptionError, MismatchError, SupersededError


def tree(number):
    return {"w": np.full(3, float(number))}


def fill(path, *numbers, **losses):
    with Run(path, signals=()) as run:
        run.resume()
        for number in numbers:
            metrics = {"loss": losses[f"s{number}"]} if losses else None
            run.save(number, tree(number), metrics=metrics).result()


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


BEST = [Keep(last=9), Keep(best=1, by="loss")]


def resume_best(path, **arguments):
    with Run(path, keep=BEST, signals=()) as run:
        return run.resume(like=tree(0), step="best", rewind=True, **arguments)


# ---------------------------------------------------------------------------------------- the best step


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path):
    fill(tmp_path, 5, 10, 15, s5=math.nan, s10=0.1, s15=0.5)
    assert resume_best(tmp_path).step == 10
    assert names(tmp_path) == ["step-10", "step-15.rewound", "step-5"]


def test_the_next_best_step_takes_the_place_of_a_damaged_one(tmp_path):
    fill(tmp_path, 5, 10, 15, 20, s5=0.1, s10=0.9, s15=0.05, s20=0.5)
    os.truncate(tmp_path / "step-15" / "model.safetensors", 5)
    found = resume_best(tmp_path)
    assert (found.step, list(found.skipped)) == (5, [15])
    assert names(tmp_path) == ["step-10.rewound", "step-15.damaged", "step-20.rewound", "step-5"]


def test_newer_steps_are_refused_also_if_the_best_one_is_damaged(tmp_path):
    fill(tmp_path, 5, 10, 15, s5=0.1, s10=0.9, s15=0.05)
    os.truncate(tmp_path / "step-15" / "model.safetensors", 5)
    with (
        Run(tmp_path, keep=BEST, signals=()) as run,
        pytest.raises(ValueError, match=r"the best step is 5, .*\(step-10\). Step 15 is damaged: "),
    ):
        run.resume(like=tree(0), step="best")
    assert names(tmp_path) == ["step-10", "step-15", "step-5"]


# ------------------------------------------------------------------------------------------ one writer


def test_a_job_that_has_lost_the_run_puts_no_step_of_its_successor_aside(tmp_path):
    with Run(tmp_path, signals=()) as lost, Run(tmp_path, signals=()) as run:
        lost.resume()
        lost.save(1, tree(1)).result()
        run.resume(like=tree(0))
        run.save(2, tree(2)).result()
        with pytest.raises(SupersededError, match="is written by another job"):
            lost.resume(like=tree(0), step=1, rewind=True)
    assert names(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("text", ["", "[]", '{"host": "x"}'])
def test_a_damaged_record_of_the_writer_is_named(tmp_path, text):
    with Run(tmp_path, signals=()) as run:
        run.save(1, tree(1)).result()
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(
            CorruptionError, match=r"run\.json is damaged: .* Start the job again, which writes it anew"
        ):
            run.save(2, tree(2)).result()
        with pytest.raises(CorruptionError, match="is damaged"):
            run.wait()
    with Run(tmp_path, signals=()) as run:
        assert run.resume().step == 1


def test_a_rewind_that_dies_has_put_the_newest_steps_aside(tmp_path, monkeypatch):
    fill(tmp_path, 1, 2, 3)
    set_aside = retention.set_step_aside

    def once(*arguments):
        set_aside(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(retention, "set_step_aside", once)
    with pytest.raises(KeyboardInterrupt), Run(tmp_path, signals=()) as run:
        run.resume(step=1, rewind=True)
    assert names(tmp_path) == ["step-1", "step-2", "step-3.rewound"]


# ---------------------------------------------------------------------------- steps before the resumed one


@pytest.mark.parametrize("is_near", [False, True])
def test_a_loop_that_counts_from_zero_after_a_resume_is_an_error(tmp_path, is_near):
    fill(tmp_path / "run", 10, 20)
    rules = {"near": Near(tmp_path / "near", every=5)} if is_near else {"every": 5}
    with Run(tmp_path / "run", signals=(), **rules) as run:
        run.resume(like=tree(0))
        with pytest.raises(
            ValueError, match=r"step 1 is before step 20, which .*: range\(run\.step, \.\.\.\)"
        ):
            run.after(1, tree(1))  # though it would not be saved
        run.save(20, tree(-20)).result()
        run.save(21, tree(21)).result()
    assert [checkpoint.load(step.path)["w"][0] for step in checkpoint.steps(tmp_path / "run")] == [
        10,
        -20,
        21,
    ]


def test_after_a_rewind_the_steps_after_it_are_saved_anew(tmp_path):
    fill(tmp_path, 10, 20)
    with Run(tmp_path, signals=()) as run:
        assert run.resume(like=tree(0), step=10, rewind=True).step == 10
        run.save(15, tree(15)).result()
    assert [step.number for step in checkpoint.steps(tmp_path)] == [10, 15]


def test_a_resume_asks_the_other_processes_which_step_it_is_how_it_loaded_and_whether_the_data_are_placed(
    tmp_path, monkeypatch
):
    fill(tmp_path, 10, 20, s10=1.0, s20=2.0)
    met, current = [], hosts.current
    monkeypatch.setattr(hosts, "current", lambda doing, *more: met.append(doing) or current(doing, *more))
    with Run(tmp_path, keep=BEST, signals=()) as run:
        for arguments in ({}, {"step": "best", "rewind": True}):
            met.clear()
            run.resume(like=tree(0), **arguments)
            assert met.count("runs") == 3 + ("rewind" in arguments)  # the steps that are put aside


# --------------------------------------------------------------------------------------- other things


def test_a_fresh_run_that_dies_does_not_leave_near_steps_to_go_on_from(tmp_path, monkeypatch):
    near = {"near": Near(tmp_path / "near", every=1)}
    with Run(tmp_path / "run", signals=(), **near) as run:
        run.resume()
        run.save(10, tree(10)).result()
        run.after(11, tree(11))
    monkeypatch.setattr(near_module.NearTier, "begin", Mock(side_effect=[KeyboardInterrupt, None]))
    with Run(tmp_path / "run", signals=(), fresh=True, **near) as run, pytest.raises(KeyboardInterrupt):
        run.save(1, tree(1))
    assert names(tmp_path / "run") == ["step-10.old"]
    with Run(tmp_path / "run", signals=(), **near) as run:
        assert run.resume(like=tree(0)) is None


def test_weights_of_another_program_under_the_name_of_a_step_stay_as_they_are(tmp_path):
    fill(tmp_path, 10)
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "model.pt").write_bytes(b"weights")
    with Run(tmp_path, signals=()) as run:
        assert run.resume(like=tree(0)).step == 10
    assert names(tmp_path) == ["step-10", "step-20"]


def test_messages_of_a_resume_advise_what_was_not_passed(tmp_path):
    fill(tmp_path, 10)
    like = {"w": np.zeros(5)}
    with Run(tmp_path, signals=()) as run:
        with pytest.raises(MismatchError, match="resize= changes shapes"):
            run.resume(like=like)
        with pytest.raises(MismatchError, match=r"found float64\[3\]; no pattern of resize= matches it"):
            run.resume(like=like, resize={"other": np.resize})
        with pytest.raises(
            MismatchError, match="missing leaf 'v': `like` has it, the selection by keys= does not"
        ):
            run.resume(like={**tree(0), "v": np.zeros(3)}, keys="w")


def test_a_flipped_bit_in_the_newest_step_names_the_file(tmp_path):
    fill(tmp_path, 10)
    file = tmp_path / "step-10" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for read in (checkpoint.load, lambda path: checkpoint.open(path)["w"][...]):
        with pytest.raises(CorruptionError, match=f"leaf 'w': .*; restore {file} from a copy"):
            read(tmp_path)


def test_a_step_of_a_step_is_an_error_that_says_so(tmp_path):
    fill(tmp_path, 10)
    with pytest.raises(
        FileNotFoundError, match=r"step-10 is a checkpoint, not a run with steps: leave step=10 out"
    ):
        checkpoint.verify(tmp_path / "step-10", step=10)


def test_a_run_that_nobody_closes_warns_of_its_unsaved_end(tmp_path, caplog):
    run = Run(tmp_path, every=100, signals=())
    run.after(7, tree(7))
    del run
    assert "step 7 is done and not saved; no step is saved, because no rule of every= came due" in caplog.text
    caplog.clear()
    with Run(tmp_path, every=100, signals=()) as run:
        run.after(100, tree(100))
    del run
    assert json.loads((tmp_path / "run.json").read_text())
    assert caplog.text == ""


# ------------------------------------------------------------------------ found by a second look


def test_the_best_step_is_found_though_the_manifest_of_another_is_damaged(tmp_path, caplog):
    fill(tmp_path, 1, 2, 3, s1=3.0, s2=1.0, s3=2.0)
    (tmp_path / "step-1" / "manifest.json").write_bytes(b"{")
    assert resume_best(tmp_path).step == 2
    assert "step-1 is left out" in caplog.text


def test_a_second_resume_that_finds_nothing_begins_a_new_run(tmp_path):
    fill(tmp_path, 100)
    with Run(tmp_path, signals=()) as run:
        run.resume(like=tree(0))
        shutil.rmtree(tmp_path / "step-100")
        assert run.resume(like=tree(0)) is None
        run.save(1, tree(1)).result()
    assert names(tmp_path) == ["step-1"]


def test_another_run_of_the_program_waits_for_the_save_of_the_one_before(tmp_path, monkeypatch):
    may_write, write = threading.Event(), Save.write

    def slow(save, meter):
        may_write.wait(10)
        return write(save, meter)

    monkeypatch.setattr(Save, "write", slow)
    first = Run(tmp_path, signals=())
    pending = first.save(2, tree(2))
    threading.Timer(0.05, may_write.set).start()
    with Run(tmp_path, signals=()) as run:
        assert run.resume(like=tree(0)).step == 2
    assert pending.result()


def test_a_run_that_was_collected_leaves_signals_to_the_program(tmp_path):
    told = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: told.set())
    try:
        run = Run(tmp_path, signals=[signal.SIGUSR1])
        del run
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_step_of_several_trees_resumes_by_prefix_until_the_run_has_saved_one(tmp_path):
    for name in ("ema", "model"):
        checkpoint.save({"w": name}, tmp_path / "run" / "step-1", prefix=name)
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        with pytest.raises(ValueError, match=r"pass prefix=, one of \['ema', 'model'\]"):
            run.resume()
        assert run.resume(prefix="model").tree == {"w": "model"}
        run.after(2, {"w": "later"})
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        with pytest.raises(ValueError, match="has no prefix 'model'"):
            run.resume(prefix="model")
        assert run.resume().tree == {"w": "later"}
