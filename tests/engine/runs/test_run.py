"""A run in one process: what is saved, kept and resumed."""

import logging
import os
import signal
from contextlib import suppress

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer._engine.record.manifest import Manifest
from eformer._engine.runs import under_way
from eformer._engine.saving import recheck
from eformer.checkpoint import Every, Keep, Near, Run
from eformer.errors import (
    CorruptionError,
    LeafError,
    MismatchError,
    NotFoundError,
    SupersededError,
    VersionError,
)
from support.damage import flip as flip_bit
from support.trees import assert_same


class Data:
    """An iterator whose position can be taken and put back, as Grain's can."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


class Loader(Data):
    """The same with the names of torchdata."""

    get_state = set_state = None

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@jax.jit
def train(state, batch):
    key, inner = jax.random.split(state["key"])
    return {"w": state["w"] * 0.9 + batch + jax.random.normal(inner, (4,)), "key": key}, state["w"].sum()


def fresh():
    return {"w": jnp.zeros(4), "key": jax.random.key(0)}


def loop(path, until, data=None, **arguments):
    state, data = fresh(), data or Data()
    with Run(path, **arguments) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began = run.step
        for step in range(run.step, until):
            state, loss = train(state, next(data))
            run.after(step + 1, state, data=data, metrics={"loss": loss})
            if run.stopping:
                break
    return state, began


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("kind", [Data, Loader])
def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path, fmt, kind):
    whole, _ = loop(tmp_path / "whole", 40, kind(), every=10, format=fmt)
    loop(tmp_path / "parts", 23, kind(), every=10, format=fmt)
    parts, began = loop(tmp_path / "parts", 40, kind(), every=10, format=fmt)
    assert began == 20
    assert_same(parts, whole)


def test_a_position_may_have_arrays_in_it(tmp_path):
    class Random(Data):
        """Its position is the state of a random generator of numpy."""

        def __init__(self):
            self.random = np.random.RandomState(3)

        def __next__(self):
            return self.random.randint(100)

        def get_state(self):
            return {"generator": self.random.get_state(), "shape": [np.ones((2, 3), np.int8)]}

        def set_state(self, state):
            assert state["shape"][0].shape == (2, 3)
            self.random.set_state(state["generator"])

    whole, _ = loop(tmp_path / "whole", 30, Random(), every=10)
    loop(tmp_path / "parts", 13, Random(), every=10)
    parts, began = loop(tmp_path / "parts", 30, Random(), every=10)
    assert began == 10
    assert_same(parts, whole)


def test_what_is_recorded_with_a_step(tmp_path):
    with Run(tmp_path, every=2) as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": jnp.float32(0.5)}, metadata={"note": "x"})
        run.after(2, {"w": np.ones(2)})
        run.request_save()
        run.after(3, {"w": np.ones(2)})
        assert run.after(5, lambda: pytest.fail("it is not saved")) is None
    found = {step.number: step for step in checkpoint.steps(tmp_path)}
    assert {number: step.reason for number, step in found.items()} == {1: "call", 2: "every", 3: "asked"}
    assert (found[1].metrics, found[1].metadata) == ({"loss": 0.5}, {"note": "x"})
    assert run.step == 3


@pytest.mark.parametrize(
    ("keep", "stay"),
    [(None, [10, 20, 30, 40, 50]), (2, [40, 50]), (1, [50]), ([Keep(last=1), Keep(every=20)], [20, 40, 50]),
     (Keep(best=1, by="loss"), [10, 50])],
)  # fmt: skip
def test_steps_that_no_rule_keeps_are_removed(tmp_path, keep, stay):
    with Run(tmp_path, every=10, keep=keep) as run:
        for step in range(1, 51):
            run.after(step, {"w": np.full(3, step)}, metrics={"loss": step})
    assert numbers(tmp_path) == stay


def test_a_damaged_step_does_not_count_and_does_not_go(tmp_path):
    with Run(tmp_path, every=10, keep=2, signals=()) as run:
        for step in range(1, 41):
            if step == 40:
                run.wait()
                (file,) = (tmp_path / "step-30").glob("*.safetensors")
                os.truncate(file, 10)
            run.after(step, {"w": np.full(3, step)})
    assert numbers(tmp_path) == [20, 30, 40]  # 30 is damaged: two sound ones stay


def test_a_clock_saves_by_time_and_a_clock_that_is_set_back_does_nothing(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(Run, "_seconds", lambda _: now[0])
    with Run(tmp_path, every=Every(minutes=1)) as run:
        for step in range(1, 101):
            now[0] += 7 if step != 50 else -100
            run.after(step, {"w": np.ones(1)})
    assert numbers(tmp_path) == [9, 18, 27, 36, 45, 69, 78, 87, 96]


def test_unchanged_leaves_are_written_once(tmp_path):
    frozen = np.zeros(2**18, np.float32)
    with Run(tmp_path, every=1) as run:
        for step in range(1, 6):
            run.after(step, {"frozen": {"w": frozen}, "head": {"w": np.full(8, step, np.float32)}})
    blocks = {(s.st_ino, s.st_blocks) for p in tmp_path.rglob("*") if p.is_file() for s in [p.stat()]}
    assert 512 * sum(nblocks for _, nblocks in blocks) < 2 * frozen.nbytes


def with_frozen(step):
    """A tree of which most stays the same, under names that do not tell which part does."""
    layers = {f"l{n}": {"w": np.full(2**16, n, np.float32), "b": np.full(4, n + step)} for n in range(3)}
    return {"layers": layers, "head": np.full(8, step, np.float32)}


def save_steps(path, numbers, then=None, tree=with_frozen, **arguments):
    with Run(path, every=1, **arguments) as run:
        run.resume()
        for step in numbers:
            run.after(step, tree(step))
            run.wait()
            if then:
                then(step)


def frozen_file(path, step):
    """A file of a step that holds unchanged leaves."""
    return max((p for p in (path / f"step-{step}").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_a_flipped_bit_in_a_frozen_leaf_does_not_spread_to_later_steps(tmp_path, fmt, caplog):
    def damage(step):
        if step == 3:
            damaged = frozen_file(tmp_path, 3)
            assert damaged.stat().st_nlink > 1
            flip_bit(damaged, -1)

    save_steps(tmp_path, range(1, 6), damage, keep=3, format=fmt)
    assert [step.number for step in checkpoint.steps(tmp_path) if checkpoint.verify(step.path).ok] == [4, 5]
    with Run(tmp_path) as run:
        found = run.resume(fallback=False)
    assert_same(found.tree, with_frozen(5))
    assert f"{frozen_file(tmp_path, 3)} is damaged, and its leaves are written anew: bytes " in caplog.text
    assert "Checkpoints with the same file are damaged, too: " in caplog.text
    assert "step-2; step-3. Remove them, or restore the file from a copy" in caplog.text


def test_a_bit_that_flips_without_a_trace_is_found_by_the_job_that_goes_on(tmp_path, monkeypatch):
    save_steps(tmp_path, (1, 2, 3))
    file = frozen_file(tmp_path, 3)
    was = file.stat()
    flip_bit(file, -1)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    monkeypatch.setattr(recheck, "_sound", {})  # as in another process
    with Run(tmp_path) as run:
        run.resume(verify=False)  # with digests, it would find the damage itself
        run.save(4, with_frozen(4)).result()
    assert checkpoint.verify(tmp_path / "step-4").ok


def test_a_linked_file_is_read_once_in_ten_minutes(tmp_path, monkeypatch):
    read, opened = [], recheck.medium
    monkeypatch.setattr(recheck, "medium", lambda *how: read.append(how) or opened(*how))
    save_steps(tmp_path, range(1, 7))
    assert len(read) == 1
    monkeypatch.setattr(recheck, "_TRUSTED_SECONDS", -1.0)  # as if they had passed
    save_steps(tmp_path, range(7, 9))
    assert len(read) == 3


def opened_by_others(path):
    """Everything that the safetensors files of a step hold, as readers take it who do not know the manifest."""
    found = {}
    for file in path.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(file)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    return found


def test_steps_with_unchanged_leaves_are_open_to_other_readers(tmp_path):
    save_steps(tmp_path, range(1, 5))
    for step in range(1, 5):
        path, tree = tmp_path / f"step-{step}", with_frozen(step)
        expected = {f"layers.{n}.{k}": a for n, some in tree["layers"].items() for k, a in some.items()}
        expected["head"] = tree["head"]
        assert_same(dict(sorted(opened_by_others(path).items())), dict(sorted(expected.items())))
        assert not list(path.glob("*.private"))
        assert checkpoint.verify(path).ok
    assert frozen_file(tmp_path, 2).stat().st_ino == frozen_file(tmp_path, 4).stat().st_ino


def test_a_run_that_goes_on_from_hidden_files_writes_open_ones(tmp_path):
    checkpoint.save(with_frozen(1), tmp_path / "step-1")
    checkpoint.save(with_frozen(2), tmp_path / "step-2", options={"reuse": tmp_path / "step-1"})
    assert list((tmp_path / "step-2").glob("*.private"))
    save_steps(tmp_path, (3, 4))
    for step in (3, 4):
        assert_same(checkpoint.load(tmp_path / f"step-{step}"), with_frozen(step))
        assert (
            opened_by_others(tmp_path / f"step-{step}").keys() == opened_by_others(tmp_path / "step-1").keys()
        )


def test_files_that_hold_all_of_a_frozen_part_are_linked_from_the_first_step_on(tmp_path):
    def tree(step):
        return {"frozen": {"w": np.zeros(2**16, np.float32)}, "head": {"w": np.full(8, step, np.float32)}}

    save_steps(tmp_path, (1, 2), tree=tree)
    assert frozen_file(tmp_path, 1).samefile(frozen_file(tmp_path, 2))
    assert not list(tmp_path.rglob("*.private"))


@pytest.mark.parametrize(("reuse", "is_linked"), [(None, True), (True, True), (False, False)])
def test_reuse_says_whether_unchanged_leaves_are_linked(tmp_path, reuse, is_linked):
    save_steps(tmp_path, (1, 2, 3), options={"reuse": reuse})
    assert frozen_file(tmp_path, 2).samefile(frozen_file(tmp_path, 3)) == is_linked
    assert (tmp_path / "step-3" / "model.safetensors").exists() != is_linked


def test_reuse_where_nothing_can_be_linked_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be combined with ocdbt"):
        Run(tmp_path, format="tensorstore", options={"reuse": True, "ocdbt": True})


# -------------------------------------------------------------------------------------------- resume


def flip(path, number):
    (file,) = (path / f"step-{number}").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_new_run_resumes_from_nothing(tmp_path):
    with Run(tmp_path / "new") as run:
        assert run.resume(like=fresh()) is None
        assert run.step == 0


def test_a_damaged_step_is_skipped_and_put_aside(tmp_path, caplog):
    loop(tmp_path, 30, every=10)
    flip(tmp_path, 30)
    with Run(tmp_path) as run:
        found = run.resume(like=fresh())
    assert (found.step, run.step, list(found.skipped)) == (20, 20, [30])
    assert "are damaged" in found.skipped[30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "step-10", "step-20", "step-30.damaged"]
    assert "step 30 is skipped" in caplog.text


@pytest.mark.parametrize("how", ["cut", "gone", "manifest", "empty", "no manifest"])
def test_any_kind_of_damage_is_skipped(tmp_path, how):
    loop(tmp_path, 20, every=10)
    step = tmp_path / "step-20"
    (file,) = step.glob("*.safetensors")
    if how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "gone":
        file.unlink()
    elif how == "manifest":
        (step / "manifest.json").write_bytes((step / "manifest.json").read_bytes()[:-9])
    elif how == "no manifest":
        (step / "manifest.json").unlink()
    else:
        (step / "manifest.json").write_bytes(b"")
    with Run(tmp_path) as run:
        found = run.resume(like=fresh())
    assert (found.step, list(found.skipped)) == (10, [20])
    assert (tmp_path / "step-20.damaged").is_dir()


def test_a_step_without_its_manifest_is_no_fresh_start(tmp_path):
    loop(tmp_path, 10, every=10)
    (tmp_path / "step-10" / "manifest.json").unlink()
    with Run(tmp_path) as run, pytest.raises(CorruptionError, match="does not start afresh by itself"):
        run.resume(like=fresh())


def test_a_step_of_a_newer_eformer_is_not_damage(tmp_path):
    loop(tmp_path, 20, every=10)
    file = tmp_path / "step-20" / "manifest.json"
    manifest = Manifest.from_json(file.read_bytes(), "")
    file.write_bytes(msgspec.structs.replace(manifest, version=99).to_json())
    with Run(tmp_path) as run, pytest.raises(VersionError, match=r"version 99.*upgrade"):
        run.resume(like=fresh())
    assert (tmp_path / "step-20").is_dir()


def test_if_all_are_damaged_nothing_changes_and_nothing_starts_afresh(tmp_path):
    loop(tmp_path, 20, every=10)
    for number in (10, 20):
        flip(tmp_path, number)
    before = sorted(p.name for p in tmp_path.iterdir())
    with Run(tmp_path) as run, pytest.raises(CorruptionError, match="does not start afresh by itself"):
        run.resume(like=fresh())
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_without_fallback_damage_is_an_error(tmp_path):
    loop(tmp_path, 20, every=10)
    flip(tmp_path, 20)
    with Run(tmp_path) as run, pytest.raises(CorruptionError, match="step 20 of"):
        run.resume(like=fresh(), fallback=False)


def test_a_tree_that_does_not_fit_is_an_error_and_never_a_fresh_start(tmp_path):
    loop(tmp_path, 20, every=10)
    with Run(tmp_path) as run, pytest.raises(MismatchError, match="missing leaf 'more'"):
        run.resume(like={**fresh(), "more": jnp.zeros(2)})
    assert numbers(tmp_path) == [10, 20]


def test_an_older_step_needs_rewind_if_there_are_newer_ones(tmp_path):
    loop(tmp_path, 40, every=10)
    with Run(tmp_path) as run:
        with pytest.raises(
            ValueError, match=r"step 20 is not the newest, and 2 newer steps .*aside \(step-30; step-40\)"
        ):
            run.resume(like=fresh(), step=20)
        with pytest.raises(NotFoundError, match="no step 25"):
            run.resume(like=fresh(), step=25)
        assert run.resume(like=fresh(), step=20, rewind=True).step == 20
    assert numbers(tmp_path) == [10, 20]
    assert (tmp_path / "step-40.rewound").is_dir()


def test_the_best_step_is_that_of_the_metric(tmp_path):
    with Run(tmp_path, keep=[Keep(best=2, by="loss"), Keep(last=3)]) as run:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            run.save(step, {"w": np.full(1, step)}, metrics={"loss": loss})
        run.wait()
        assert_same(run.resume(step="best", rewind=True).tree, {"w": np.full(1, 2)})


def test_modules_are_updated_in_place(tmp_path):
    from flax import nnx

    with Run(tmp_path) as run:
        run.save(1, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        run.wait()
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
        assert run.resume(into=model).tree is model
    np.testing.assert_array_equal(model.kernel[...], nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel[...])


# ---------------------------------------------------------------------------------------------- errors


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    with Run(tmp_path, every=1) as run:
        run.after(1, {"w": np.ones(1)}).result()
        (tmp_path / "run.json").unlink()
        run.after(2, {"w": np.ones(1)}).exception()
        with pytest.raises(FileNotFoundError):
            run.after(3, {"w": np.ones(1)})


def test_so_many_errors_in_a_row_are_tolerated(tmp_path, caplog):
    with Run(tmp_path, every=1, tolerate=2) as run:
        run.after(1, {"w": np.ones(1)}).result()
        claim = (tmp_path / "run.json").read_bytes()
        (tmp_path / "run.json").unlink()
        for step in (2, 3):
            run.after(step, {"w": np.ones(1)}).exception()
        (tmp_path / "run.json").write_bytes(claim)
        run.after(4, {"w": np.ones(1)}).result()
    assert numbers(tmp_path) == [1, 4]
    assert caplog.text.count("are tolerated") == 2


def test_what_cannot_be_stored_is_raised_at_once(tmp_path):
    with Run(tmp_path) as run, pytest.raises(LeafError):
        run.save(1, {"w": object()})


def test_a_position_that_cannot_be_stored_is_raised_at_once_and_the_step_can_be_saved_again(tmp_path):
    class Bad(Data):
        def get_state(self):
            return object()

    with Run(tmp_path) as run:
        with pytest.raises(LeafError, match="Bad cannot be stored"):
            run.save(1, {"w": np.ones(1)}, data=Bad())
        run.save(1, {"w": np.ones(1)}).result(timeout=20)
    assert numbers(tmp_path) == [1]


def test_an_exception_in_the_block_waits_for_the_save_and_passes(tmp_path):
    def fail():
        with Run(tmp_path) as run:
            run.save(1, {"w": np.ones(2**20)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert numbers(tmp_path) == [1]


def test_what_comes_after_a_save_is_told_and_its_errors_are_logged(tmp_path, caplog):
    seen = []

    def on_saved(step):
        seen.append((step.number, checkpoint.verify(step.path).ok))
        raise ZeroDivisionError("in the callback")

    with Run(tmp_path, every=1, on_saved=on_saved) as run:
        run.after(1, {"w": np.ones(1)}).result()
    assert seen == [(1, True)]
    assert "in the callback" in caplog.text


def test_an_older_job_saves_nothing_any_more(tmp_path):
    older, newer = Run(tmp_path, signals=()), Run(tmp_path, signals=())
    older.save(1, {"w": np.ones(1)}).result()
    assert newer.resume().step == 1
    newer.save(2, {"w": np.ones(1)}).result()
    with pytest.raises(SupersededError, match="written by another job"):
        older.save(3, {"w": np.ones(1)}).result()
    assert numbers(tmp_path) == [1, 2]


# --------------------------------------------------------------------------------------------- signals


def test_a_signal_saves_the_step_and_stops(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, every=100) as run:
        for step in range(1, 10):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            run.after(step, {"w": np.full(1, step)})
            if run.stopping:
                break
    assert (numbers(tmp_path), step, run.stopping) == ([4], 4, True)
    assert checkpoint.steps(tmp_path)[0].reason == "signal"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_in_an_evaluation_is_seen_by_tick_and_saved_by_the_next_step(tmp_path):
    with Run(tmp_path, signals=[signal.SIGUSR1]) as run:
        assert not run.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.should_stop()
        run.after(3, {"w": np.ones(1)})
        assert run.stopping
    assert numbers(tmp_path) == [3]


def test_the_handler_before_is_called_too(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("before"))
    try:
        with Run(tmp_path, signals=[signal.SIGUSR1]) as run:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert run.should_stop()
        assert seen == ["before"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_signals_nothing_is_handled(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, signals=()):
        assert signal.getsignal(signal.SIGTERM) == before


def test_nothing_is_logged_by_a_run_that_is_well(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(under_way, "_LONG_WAIT", 60)  # a busy machine may take its time
    with caplog.at_level(logging.WARNING, "eformer"):
        loop(tmp_path, 20, every=10, keep=1)
    assert caplog.messages == []


# -------------------------------------------------------------------------------------------- warnings


def test_a_step_with_a_position_that_is_resumed_without_data_is_loaded_with_a_warning(tmp_path, caplog):
    loop(tmp_path, 20, every=10)
    with Run(tmp_path) as run:
        assert run.resume(like=fresh()).step == 20
    (said,) = caplog.messages
    assert "step 20 has a position in the data, but resume was called without data=" in said
    assert said.endswith("pass resume(data=) to go on at that position")


def test_a_step_without_a_position_is_resumed_without_a_warning(tmp_path, caplog):
    with Run(tmp_path) as run:
        run.save(1, fresh())
    with Run(tmp_path) as run:
        run.resume(like=fresh())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("every", "done", "why"),
    [
        (None, [3], "no step is saved, because without every= `after` saves at a signal or a request only"),
        (10, [3, 13, 23], "no step is saved, because no rule of every= came due"),
        (7, range(1, 121), "the last saved step is 119"),
    ],
)
def test_a_run_whose_last_step_is_not_saved_warns_once_at_its_end(tmp_path, caplog, every, done, why):
    with Run(tmp_path, every=every) as run:
        for step in done:
            run.after(step, {"w": np.ones(1)})
        assert caplog.messages == []
    run.close()
    (said,) = caplog.messages
    assert f"step {step} is done and not saved; {why}. Call run.save({step}, state) after the loop" in said


def test_a_last_step_that_is_in_the_near_tier_only_is_not_saved(tmp_path, caplog):
    with Run(tmp_path / "run", every=2, near=Near(tmp_path / "near", every=1)) as run:
        for step in (1, 2, 3):
            run.after(step, {"w": np.ones(1)})
    assert "step 3 is done and not saved; the last saved step is 2" in caplog.text


@pytest.mark.parametrize("end", ["saved", "nothing done", "raised"])
def test_a_run_warns_of_nothing_at_its_end_if_there_is_nothing_to_lose_or_an_error_says_more(
    tmp_path, caplog, end
):
    loop(tmp_path, 10, every=10)

    def again():
        with Run(tmp_path, every=10) as run:
            run.resume(like=fresh(), data=Data())
            if end == "nothing done":
                return
            run.after(11, fresh())
            if end == "raised":
                raise ZeroDivisionError
            run.save(11, fresh())

    with suppress(ZeroDivisionError):
        again()
    assert caplog.messages == []
