"""The near tier of a run, in one process."""

import errno
import logging
import shutil
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.runs import near as near_module
from eformer.checkpoint import Every, Near, Run
from eformer.errors import CorruptionError, MismatchError, SupersededError
from support.links import contents
from support.trees import assert_same


class Data:
    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@jax.jit
def train(state, batch):
    key, inner = jax.random.split(state["key"])
    return {"w": state["w"] * 0.9 + batch + jax.random.normal(inner, (4,)), "key": key}


def fresh():
    return {"w": jnp.zeros(4), "key": jax.random.key(0)}


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path):
    return tmp_path / "near"


def loop(far, near, until, every=10, near_every=3, resume=None, **arguments):
    """Trains; returns the state, the step that it resumed from, and the steps that were skipped."""
    state, data, skipped = fresh(), Data(), {}
    with Run(far, every=every, near=Near(near, every=near_every), signals=(), **arguments) as run:
        if found := run.resume(like=state, data=data, **(resume or {})):
            state, skipped = found.tree, found.skipped
        began = run.step
        for step in range(run.step, until):
            state = train(state, next(data))
            run.after(step + 1, state, data=data, metrics={"n": step})
    return state, began, skipped


def resumed(far, near):
    """The step that a job without data resumes from."""
    with Run(far, near=Near(near, every=3), signals=()) as run:
        run.resume(like=fresh())
    return run.step


def held(near):
    """The numbers of the near steps of the only process."""
    return sorted(int(path.name[5:]) for path in near.glob("process-0/*/step-*"))


def newest(near):
    return max(near.glob("process-0/*/step-*"), key=lambda path: int(path.name[5:]))


def damage(path):
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


def test_a_run_resumes_from_the_near_step_and_equals_one_that_was_never_interrupted(far, near, tmp_path):
    whole, _, _ = loop(tmp_path / "whole", tmp_path / "other", 40)
    loop(far, near, 29)
    parts, began, _ = loop(far, near, 40)
    assert began == 27
    assert_same(parts, whole)


def test_near_steps_are_not_steps_of_the_run(far, near):
    loop(far, near, 29)
    assert numbers(far) == [10, 20]
    assert checkpoint.latest(far).endswith("step-20")
    with Run(far, near=Near(near, every=3), signals=()) as run:
        assert [step.number for step in run.steps] == [10, 20]


def test_a_run_without_a_far_step_yet_resumes_from_a_near_one(far, near):
    loop(far, near, 8)
    assert loop(far, near, 8)[1] == 6


def test_a_step_that_is_due_for_both_is_saved_far_alone(far, near):
    loop(far, near, 12, every=6)
    assert (numbers(far), held(near)) == ([6, 12], [3, 9])
    assert loop(far, near, 12, every=6)[1] == 12


def test_three_near_steps_stay(far, near):
    loop(far, near, 29)
    assert held(near) == [21, 24, 27]


def test_a_damaged_near_step_is_skipped_for_the_one_before(far, near):
    loop(far, near, 29)
    damage(newest(near))
    _, began, skipped = loop(far, near, 24)
    assert began == 24
    assert list(skipped) == [27]
    assert held(near) == [21, 24]


def test_damaged_near_steps_are_skipped_for_the_far_one(far, near):
    loop(far, near, 29)
    for path in near.glob("process-0/*/step-*"):
        damage(path)
    _, began, skipped = loop(far, near, 20)
    assert began == 20
    assert list(skipped) == [27, 24, 21]
    assert numbers(far) == [10, 20]


def test_a_damaged_far_step_is_skipped_for_a_near_one(far, near):
    loop(far, near, 21, every=20, near_every=9)
    damage(far / "step-20")
    _, began, skipped = loop(far, near, 18, every=20, near_every=9)
    assert (began, list(skipped)) == (18, [20])


def test_without_fallback_a_damaged_near_step_is_an_error(far, near):
    loop(far, near, 29)
    damage(newest(near))
    with pytest.raises(CorruptionError, match="step 27"):
        loop(far, near, 29, resume={"fallback": False})


def test_a_lost_near_directory_costs_what_came_after_the_far_step(far, near, tmp_path):
    whole, _, _ = loop(tmp_path / "whole", tmp_path / "other", 40)
    loop(far, near, 29)
    shutil.rmtree(near)
    parts, began, _ = loop(far, near, 40)
    assert began == 20
    assert_same(parts, whole)


def test_near_steps_of_another_run_are_not_taken_and_give_way(far, near, tmp_path):
    loop(tmp_path / "other", near, 4)
    loop(far, tmp_path / "lost", 11)
    assert loop(far, near, 11)[1] == 10
    assert held(near) == []
    assert loop(tmp_path / "other", near, 29)[1] == 0
    assert loop(far, near, 11)[1] == 10


def test_near_steps_of_a_run_that_was_removed_are_not_taken(far, near):
    loop(far, near, 29)
    shutil.rmtree(far)
    assert loop(far, near, 5)[1] == 0


def test_near_steps_are_not_taken_by_a_copy_of_the_run(far, near, tmp_path):
    loop(far, near, 22)
    shutil.copytree(far, tmp_path / "copy")
    loop(far, near, 29)
    assert loop(tmp_path / "copy", near, 20)[1] == 20


def test_near_steps_are_not_taken_after_a_job_without_them(far, near):
    loop(far, near, 29)
    with Run(far, every=10, signals=()) as run:
        run.resume(like=fresh(), step=10, rewind=True)
        for step in range(11, 22):
            run.after(step, fresh())
    assert resumed(far, near) == 20
    assert held(near) == []


def test_near_steps_survive_jobs_that_die_before_they_save(far, near):
    loop(far, near, 29)
    for _ in range(3):
        assert loop(far, near, 0)[1] == 27


def test_a_tree_that_does_not_fit_a_near_step_is_an_error(far, near):
    loop(far, near, 29)
    with (
        Run(far, near=Near(near, every=3), signals=()) as run,
        pytest.raises(MismatchError, match="w"),
    ):
        run.resume(like={**fresh(), "w": jnp.zeros(5)})


def test_newer_near_steps_are_an_error_or_are_discarded(far, near):
    loop(far, near, 29)
    with pytest.raises(ValueError, match=r"3 newer near steps would be removed \(21; 24; 27\)"):
        loop(far, near, 29, resume={"step": 20})
    assert loop(far, near, 0, resume={"step": 20, "rewind": True})[1] == 20
    assert held(near) == []
    assert loop(far, near, 0)[1] == 20


def test_near_steps_that_came_back_after_a_rewind_are_not_taken(far, near, tmp_path):
    loop(far, near, 29)
    shutil.copytree(near, tmp_path / "copy")
    loop(far, near, 0, resume={"step": 20, "rewind": True})
    shutil.rmtree(near)
    shutil.copytree(tmp_path / "copy", near)
    assert loop(far, near, 0)[1] == 20


def test_a_near_step_can_be_named(far, near):
    loop(far, near, 29)
    assert loop(far, near, 0, resume={"step": 24, "rewind": True})[1] == 24
    assert loop(far, near, 0)[1] == 24


def test_what_a_killed_save_has_left_is_removed(far, near):
    loop(far, near, 29)
    epoch = newest(near).parent
    (epoch / "step-30" / ".eformer-1" / "data").mkdir(parents=True)
    assert loop(far, near, 0)[1] == 27
    assert not (epoch / "step-30").exists()


def test_nothing_is_removed_through_links(far, near, tmp_path):
    loop(far, near, 29)
    outside = tmp_path / "outside"
    for epoch in ("0" * 16, "f" * 16):
        (outside / epoch / ".hidden").mkdir(parents=True)
        (outside / epoch / "thesis").write_text("years")
    (near / "process-0" / ("0" * 16)).symlink_to(outside / ("0" * 16))
    (near / "process-7").symlink_to(outside)  # as of a job that had more processes
    newest(near).parent.joinpath("linked").symlink_to(outside / ("f" * 16))
    before = contents(outside)
    assert loop(far, near, 40)[1] == 27
    assert contents(outside) == before
    shutil.rmtree(near / "process-0")
    (near / "process-0").symlink_to(outside)
    with pytest.raises(ValueError, match="process-0 is a link"):
        loop(far, near, 0)


def test_a_near_save_that_fails_is_logged_and_the_run_goes_on(far, near, monkeypatch, caplog):
    complete, failing = near_module.complete, {"step-24", "step-27"}

    def full(save):
        if save.store.url.rpartition("/")[2] in failing:
            save.turn.end()
            raise OSError(errno.ENOSPC, "No space left on device")
        complete(save)

    monkeypatch.setattr(near_module, "complete", full)
    with caplog.at_level(logging.ERROR):
        loop(far, near, 29)
    assert [r.getMessage().rpartition("/")[2] for r in caplog.records] == [
        "step-24 was not saved", "step-27 was not saved",
    ]  # fmt: skip
    assert loop(far, near, 0)[1] == 21


def test_a_run_that_was_not_resumed_saves_near_steps(far, near):
    with Run(far, near=Near(near, every=2), signals=()) as run:
        for step in range(1, 6):
            run.after(step, fresh())
    assert resumed(far, near) == 4


def test_the_run_goes_back_to_a_near_step_of_its_own(far, near):
    with Run(far, near=Near(near, every=2), signals=()) as run:
        run.resume(like=fresh())
        for step in range(1, 6):
            run.after(step, fresh())
        assert run.resume(like=fresh()).step == run.step == 4
        assert run.resume(like=fresh(), step=2, rewind=True).step == 2
        run.after(4, fresh())
    assert resumed(far, near) == 4


def test_near_steps_of_a_job_that_was_superseded_are_not_taken(far, near):
    with Run(far, near=Near(near, every=3), signals=()) as zombie:
        zombie.resume(like=fresh())
        zombie.after(3, fresh())
        zombie.wait()
        with Run(far, near=Near(near, every=3), signals=()) as run:
            assert run.resume(like=fresh()).step == 3
            for step in (6, 9, 12):
                zombie.after(step, fresh())
            with pytest.raises(SupersededError):
                zombie.resume(like=fresh())
            zombie.after(15, fresh())
            zombie.wait()
            run.after(6, fresh())
    assert resumed(far, near) == 6


def test_a_record_of_the_line_that_cannot_be_read_makes_the_run_resume_from_the_far_step(far, near):
    loop(far, near, 29)
    (far / "near.json").write_text("{")
    assert loop(far, near, 20)[1] == 20


def test_a_clock_says_when_to_save_near(far, near, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(Run, "_seconds", lambda _: now[0])
    by_time = Near(near, every=Every(minutes=1))
    with Run(far, every=timedelta(minutes=10), near=by_time, signals=()) as run:
        run.resume(like=fresh())
        for step in range(1, 12):
            now[0] += 30
            run.after(step, fresh())
    assert held(near) == [6, 8, 10]
    assert numbers(far) == []


def test_every_kind_of_leaf_comes_back_as_it_was(far, near):
    tree = {
        "a.b": {"c": np.arange(3), "keys": jax.random.split(jax.random.key(1), 3), "weak": jnp.asarray(1.0)},
        "bits": jnp.arange(8, dtype=jnp.int4),
        "empty": jnp.zeros((0, 3)),
        "large": jnp.arange(700_000.0),
        "plain": [1, 2.5, "text", None, (b"bytes", True)],
    }
    with Run(far, near=Near(near, every=1), signals=()) as run:
        run.after(1, tree, metadata={"note": 1})
        run.wait()
        assert_same(run.resume(like=tree).tree, tree)
        assert_same(run.resume().tree, tree)


def test_leaves_that_are_cast_far_are_saved_near_as_they_are(far, near):
    tree = {"w": jnp.asarray([1.0 + 2**-20])}
    with Run(far, near=Near(near, every=1), signals=(), options={"dtype": "bfloat16"}) as run:
        run.after(1, tree)
        assert_same(run.resume(like=tree).tree, tree)


def test_a_near_tier_needs_a_place_and_a_rule(far):
    with pytest.raises(TypeError, match=r"near='x': expected near=Near\(path, every=\.\.\.\)"):
        Run(far, near="x", signals=())
    with pytest.raises(ValueError, match="in memory or on a local disk"):
        Run(far, near=Near("memory://x", every=3), signals=())
    with pytest.raises(ValueError, match=r"Near\(every=None\): no rule says when"):
        Near("x", every=None)
