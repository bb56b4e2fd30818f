"""The checkpointer that trainers call at every step."""

import datetime as dt
import json
import signal
import uuid
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer.errors import CorruptionError
from eformer.paths import ePath
from eformer.serialization import (
    AsyncCheckpointManager,
    Checkpointer,
    CheckpointInterval,
    find_latest_checkpoint,
)
from eformer.serialization.checkpointer import _read_checkpoint_metadata
from support import programs
from support.damage import flip
from support.original import DATA


class Now:
    """A clock that the test sets, with a naive time, as `datetime.now` returns."""

    def __init__(self):
        self.time = dt.datetime(2026, 3, 29, 1, 50)

    def __call__(self):
        return self.time

    def pass_(self, **some):
        self.time += timedelta(**some)


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("x",))


def state(step=0):
    return {"w": jnp.full((4, 2), step, jnp.float32), "step": jnp.int32(step)}


def names(path):
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def train(checkpointer, steps, each=lambda step: None):
    for step in steps:
        each(step)
        checkpointer.on_step(None, state(step), step=step)
    checkpointer.wait_until_finished()


# ------------------------------------------------------------------------------------------- when


def test_the_first_policy_that_has_not_ended_decides(tmp_path):
    train(Checkpointer(tmp_path, None, [CheckpointInterval(10, until=20), CheckpointInterval(25)]), range(81))
    assert names(tmp_path) == ["run-10", "run-20", "run-25", "run-50", "run-75"]


def test_no_policy_is_in_force_after_the_last_has_ended(tmp_path):
    train(Checkpointer(tmp_path, None, [CheckpointInterval(10, until=20)]), range(51))
    assert names(tmp_path) == ["run-10", "run-20"]


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([(10, None), (20, 50)], "Only the last step policy"),
        ([(10, 50), (20, 50)], "sorted by 'until'"),
        ([(10, 50), (20, 40), (30, None)], "sorted by 'until'"),
    ],
)
def test_policies_that_could_never_be_asked_are_refused(tmp_path, policies, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, None, [CheckpointInterval(*one) for one in policies])
    with pytest.raises(ValueError, match="every must be positive"):
        CheckpointInterval(0)


def test_step_0_and_the_step_just_saved_are_saved_by_force_alone(tmp_path):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)])
    checkpointer.on_step(None, state(7), step=0)
    assert not names(tmp_path)
    checkpointer.on_step(None, state(7), force=True, step=0)
    checkpointer.on_step(None, state(1), step=1)
    checkpointer.on_step(None, state(99), step=1)
    assert checkpointer.load_checkpoint(None)[0]["step"] == 1
    checkpointer.on_step(None, state(98), force=True, step=1)
    assert checkpointer.load_checkpoint(None)[0]["step"] == 98
    assert names(tmp_path) == ["run-0", "run-1"]


def test_nothing_to_save_is_an_error_and_not_a_save_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="nothing to save"):
        Checkpointer(tmp_path, None, [CheckpointInterval(10)]).on_step(None, step=1)


# ------------------------------------------------------------------------------------ what stays


def test_temporary_checkpoints_make_way_and_those_of_policies_stay(tmp_path, now):
    checkpointer = Checkpointer(
        tmp_path, timedelta(minutes=10), [CheckpointInterval(100)], dt_now_injection=now
    )
    train(checkpointer, range(1, 96), each=lambda _: now.pass_(minutes=1))
    assert names(tmp_path) == ["run-90"]
    assert _read_checkpoint_metadata(tmp_path / "run-90")["is_temporary"] is True
    train(checkpointer, range(96, 226), each=lambda _: now.pass_(minutes=1))
    assert names(tmp_path) == ["run-100", "run-200", "run-220"]
    assert _read_checkpoint_metadata(str(tmp_path / "run-200"))["is_temporary"] is False


@pytest.mark.parametrize(
    ("delete", "left"), [(True, ["run-10"]), (False, ["run-10", "run-3"])], ids=["removed", "left"]
)
def test_temporary_checkpoints_of_an_earlier_job(tmp_path, now, delete, left):
    interval, policies = timedelta(minutes=1), [CheckpointInterval(10)]
    train(
        Checkpointer(tmp_path, interval, policies, dt_now_injection=now),
        [1, 2, 3],
        lambda _: now.pass_(minutes=1),
    )
    assert names(tmp_path) == ["run-3"]
    second = Checkpointer(tmp_path, interval, policies, delete_old_temp_checkpoints=delete)
    train(second, [10])
    assert names(tmp_path) == left


def test_a_temporary_checkpoint_that_is_saved_by_force_stays(tmp_path, now):
    checkpointer = Checkpointer(tmp_path, timedelta(minutes=1), [], dt_now_injection=now)
    train(checkpointer, [1], lambda _: now.pass_(minutes=1))
    checkpointer.on_step(None, state(1), force=True, step=1)
    train(checkpointer, [2, 3], lambda _: now.pass_(minutes=1))
    assert names(tmp_path) == ["run-1", "run-3"]


def test_a_damaged_checkpoint_does_not_displace_a_temporary_one(tmp_path, now):
    checkpointer = Checkpointer(tmp_path, timedelta(minutes=1), [], dt_now_injection=now)
    train(checkpointer, [1], lambda _: now.pass_(minutes=1))
    checkpointer.on_step(
        None, force=True, step=2, true_callbacks=[lambda name, *_: (tmp_path / name).mkdir()]
    )
    checkpointer.wait_until_finished()
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-1")


def test_the_newest_checkpoint_is_never_removed(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)])
    train(checkpointer, [1, 2])
    for name in ("run-2", "run-1", "nothing"):
        checkpointer._queue_checkpoint_removal(str(tmp_path / name))
    checkpointer.wait_until_finished()
    assert names(tmp_path) == ["run-2"]
    assert "run-2 is not removed" in caplog.text


def test_temporary_checkpoints_in_a_bucket_make_way_too(now):
    url = f"memory://{uuid.uuid4()}/runs"
    checkpointer = Checkpointer(url, timedelta(minutes=1), [CheckpointInterval(3)], dt_now_injection=now)
    train(checkpointer, [1, 2], lambda _: now.pass_(minutes=1))
    assert [step.path for step in checkpoint.steps(url)] == [f"{url}/run-2"] == [find_latest_checkpoint(url)]
    train(checkpointer, [3])
    assert [step.path for step in checkpoint.steps(url)] == [f"{url}/run-3"] == [find_latest_checkpoint(url)]
    assert find_latest_checkpoint(f"{url}/run-2") is None


def test_a_checkpoint_in_a_bucket_that_is_replaced_in_parts_is_not_finished_meanwhile(now):
    url, seen = f"memory://{uuid.uuid4()}/runs", []
    checkpointer = Checkpointer(url, None, [CheckpointInterval(1)], dt_now_injection=now)
    inner = Checkpointer(f"{url}/run-1", None, [])
    for _ in range(2):
        saves = [lambda *_: inner.save_pytree(state(1), "model"), lambda *_: seen.append(metadata_there(url))]
        checkpointer.on_step(None, force=True, step=1, true_callbacks=saves)
    assert (seen, metadata_there(url)) == ([False, False], True)


def test_a_removal_that_is_under_way_is_not_begun_again(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)])
    train(checkpointer, [1, 2, 3])
    for name in ("run-1", "run-1/", "run-2", "run-1"):
        checkpointer._queue_checkpoint_removal(f"{tmp_path}/{name}")
    checkpointer.wait_until_finished()
    assert (names(tmp_path), caplog.text) == (["run-3"], "")


def metadata_there(url):
    return store_at(url).exists("run-1/metadata.json")


def test_a_clock_that_is_set_back_saves_nothing_too_much_and_decides_nothing(tmp_path, now):
    checkpointer = Checkpointer(tmp_path, timedelta(minutes=1), [], dt_now_injection=now)
    train(checkpointer, [1], lambda _: now.pass_(minutes=1))
    train(checkpointer, [2, 3], lambda _: now.pass_(hours=-1))
    assert names(tmp_path) == ["run-1"]
    for step in (1, 4):
        checkpointer.on_step(None, state(step), force=True, step=step)
    checkpointer.wait_until_finished()
    (tmp_path / "run-1" / "metadata.json").write_text(
        json.dumps({"step": 1, "timestamp": "2999-01-01T00:00:00", "is_temporary": False})
    )
    assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "run-4")


# --------------------------------------------------------------------------------- what is recorded


def test_the_step_is_recorded_in_the_checkpoint_and_beside_it(tmp_path):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(5)])
    checkpointer.on_step(None, state(5), step=5, extras={"loss": 0.5})
    assert checkpointer._last_save_step == 5
    _, metadata = checkpointer.load_checkpoint(None)
    assert (metadata["step"], metadata["is_temporary"], metadata["loss"]) == (5, False, 0.5)
    written = json.loads((tmp_path / "run-5" / "metadata.json").read_text())
    assert (written["step"], written["is_temporary"]) == (5, False)
    assert dt.datetime.fromisoformat(written["timestamp"]).tzinfo is not None


def test_a_checkpoint_by_name_has_the_step_of_its_name(tmp_path):
    called = []
    checkpointer = Checkpointer(tmp_path, None, [])
    checkpointer.save_checkpoint(
        state(8), "run-8", commit_callback=lambda: called.append(find_latest_checkpoint(tmp_path))
    )
    checkpointer.wait_until_finished()
    assert called == [str(tmp_path / "run-8")]
    assert checkpointer.load_checkpoint(None)[1]["step"] == 8


def test_extras_of_the_caller_are_not_changed_and_names_are_below_the_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extras = {"lr": 0.1}
    checkpointer = Checkpointer("base", None, [])
    assert checkpointer.save_pytree(state(), "model", destination="final", extras=extras) == "base/final"
    assert checkpointer.save_pytree(state(), "model", step=5, extras=extras) == "base/run-5"
    assert extras == {"lr": 0.1}
    assert names(tmp_path / "base") == ["final", "run-5"]
    _, metadata = checkpointer.load_pytree(None, prefix="model")
    assert (metadata["lr"], metadata["step"]) == (0.1, 5)


def test_shardings_of_a_save_are_refused(tmp_path, mesh):
    with pytest.raises(ValueError, match="as they are sharded"):
        Checkpointer(tmp_path, None, []).save_checkpoint(state(), "run-1", partition_rules=[(".*", None)])
    with pytest.raises(ValueError, match="prefix is required"):
        Checkpointer(tmp_path, None, []).save_checkpoint(state(), "run-1", structured=True)


# -------------------------------------------------------------------------------------------- load


def test_a_structure_and_placements_come_back(tmp_path, mesh):
    checkpointer = Checkpointer(tmp_path, None, [])
    tree = {"layers": [state(1), state(2)], "names": ("a", None)}
    checkpointer.save_checkpoint(tree, "run-1", prefix="model", structured=True, dtype="bf16")
    loaded, _ = checkpointer.load_checkpoint(mesh, prefix="model", structured=True, dtype="fp32")
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert loaded["layers"][1]["w"].dtype == jnp.float32
    assert loaded["layers"][1]["w"].sharding.mesh == mesh
    template = jax.eval_shape(
        lambda: {**tree, "layers": [{"w": jnp.zeros((8,)), "step": jnp.int32(0)}] * 2, "names": ()}
    )
    with pytest.raises(ValueError, match="need structured=True"):
        checkpointer.load_checkpoint(mesh, template=template)


def test_a_shape_may_change_if_that_is_asked_for(tmp_path, mesh):
    checkpointer = Checkpointer(tmp_path, None, [])
    checkpointer.save_pytree({"w": jnp.arange(8.0)}, "model", step=1)
    like = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    with pytest.raises(ValueError, match="w"):
        checkpointer.load_pytree(mesh, prefix="model", template=like)
    loaded, _ = checkpointer.load_pytree(mesh, prefix="model", template=like, strict_shapes=False)
    assert loaded["w"].shape == (4, 2)


def test_where_nothing_is_is_an_error_or_nothing_if_that_is_asked_for(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none", None, [])
    assert find_latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError, match="No checkpoint found under"):
        checkpointer.load_checkpoint(None)
    with pytest.raises(FileNotFoundError, match="No checkpoint found under"):
        checkpointer.load_pytree(None, prefix="model")
    assert checkpointer.load_pytree(None, prefix="model", discover_raise=False) == (None, {})
    with pytest.raises(FileNotFoundError, match="No checkpoint found under"):
        checkpointer.load_pytree(None, prefix="model", path=tmp_path / "typo", discover_raise=False)


def test_a_damaged_checkpoint_is_skipped_and_one_with_a_flipped_bit_is_an_error(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)], manager=AsyncCheckpointManager())
    train(checkpointer, [1, 2])
    chunk = next(path for path in (tmp_path / "run-2").rglob("0.0") if path.is_file())
    flip(chunk, chunk.stat().st_size - 1)
    with pytest.raises(CorruptionError, match="w"):
        checkpointer.load_checkpoint(None)
    chunk.unlink()
    assert checkpointer.load_checkpoint(None)[1]["step"] == 1
    assert "run-2 is skipped" in caplog.text


def test_checkpoints_of_the_original_and_of_runs_are_found(tmp_path, mesh):
    found = find_latest_checkpoint(str(DATA / "checkpointer"))
    assert found == str(DATA / "checkpointer" / "run-5")
    assert find_latest_checkpoint(found) == found
    _, metadata = Checkpointer(DATA / "checkpointer", None, []).load_pytree(
        mesh, prefix="tx", load_treedef=True
    )
    assert metadata["step"] == 5
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        run.after(1, state(1))
    assert find_latest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "step-1")


# ------------------------------------------------------------------------------------------ failures


def test_an_error_in_the_background_is_raised_by_the_next_call_and_the_step_can_be_saved_again(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run", None, [CheckpointInterval(1)])
    (tmp_path / "run").write_text("in the way")
    checkpointer.on_step(None, state(1), step=1)
    with pytest.raises(OSError, match="run"):
        checkpointer.wait_until_finished()
    (tmp_path / "run").unlink()
    train(checkpointer, [1])
    assert names(tmp_path / "run") == ["run-1"]


def test_a_callback_that_fails_finishes_nothing(tmp_path, now):
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)], dt_now_injection=now)
    trainer = Trainer(checkpointer, tmp_path)
    trainer.save(1)
    trainer.fails = True
    with pytest.raises(RuntimeError, match="disk full"):
        trainer.save(2)
    assert (tmp_path / "run-2").is_dir()
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-1")
    assert checkpointer._last_save_step == 1
    trainer.fails = False
    trainer.save(2)
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-2")


def test_a_checkpoint_that_is_replaced_in_parts_is_not_finished_meanwhile(tmp_path):
    trainer = Trainer(Checkpointer(tmp_path, None, [CheckpointInterval(1)]), tmp_path)
    trainer.save(1)
    trainer.save(2)
    trainer.fails = True  # after the model, before the optimizer
    with pytest.raises(RuntimeError, match="disk full"):
        trainer.save(2, force=True)
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-1")


def test_a_tree_with_callbacks_is_finished_after_both(tmp_path):
    seen = []
    checkpointer = Checkpointer(tmp_path, None, [CheckpointInterval(1)])
    checkpointer.on_step(
        None, state(3), step=3, true_callbacks=[lambda *_: seen.append(find_latest_checkpoint(tmp_path))]
    )
    assert seen == [None]
    assert checkpointer.load_checkpoint(None)[0]["step"] == 3


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from eformer.serialization import Checkpointer, CheckpointInterval

base, at = sys.argv[1:]
inner = lambda path: Checkpointer(path, None, [])
def save(name, mesh, meta):
    step = meta["step"]
    inner(f"{base}/{name}").save_pytree({"w": jnp.full(4, step)}, prefix="model")
    if step == 2 and at == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    inner(f"{base}/{name}").save_pytree({"m": jnp.full(4, step)}, prefix="tx")
    if step == 2 and at == "after":
        os.kill(os.getpid(), signal.SIGKILL)

checkpointer = Checkpointer(base, None, [CheckpointInterval(1)])
for step in (1, 2):
    checkpointer.on_step(None, step=step, true_callbacks=[save])
"""


@pytest.mark.parametrize("at", ["between", "after"])
def test_a_trainer_that_is_killed_between_two_trees_resumes_from_the_step_before(tmp_path, at):
    killed = programs.run(KILLED, tmp_path, at)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run-2").is_dir()
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-1")
    checkpointer = Checkpointer(tmp_path, None, [])
    model, _ = checkpointer.load_pytree(None, prefix="model")
    moments, _ = checkpointer.load_pytree(None, prefix="tx")
    assert model["w"][0] == moments["m"][0] == 1


# ------------------------------------------------------------------------------- as EasyDeL calls it


class Trainer:
    """Calls the checkpointer as EasyDeL's trainer does: it saves by a callback, in two trees, with files beside them.

    `repairs` are the two things that it does after each save because of the original.
    """

    def __init__(self, checkpointer, directory, *, repairs=False, limit=None):
        self.checkpointer, self.directory = checkpointer, directory
        self.repairs, self.limit, self.fails = repairs, limit, False

    def save(self, step, *, force=False):
        saved = []

        def save_callback(name, mesh, metadata):
            place = self.directory / name
            place.mkdir(exist_ok=True)
            (place / "README.md").write_text(f"step {step}")
            tree = {"params": state(step), "opt": {"mu": jnp.ones(3) * step}}
            inner = Checkpointer(base_path=str(place), save_interval=None, step_policies=[])
            inner.save_pytree(tree["params"], prefix="model", mesh=mesh, dtype=jnp.float32)
            if self.fails:
                raise RuntimeError("disk full")
            inner.save_pytree(tree["opt"], prefix="tx", mesh=mesh, extras={"step": step})
            (place / "metadata.json").write_text(json.dumps({"step": step, "trainer": "sft"}))
            saved.append(place)
            self.clean_up()

        self.checkpointer.on_step(
            mesh=None, pytree=None, step=step, force=force, true_callbacks=[save_callback]
        )
        if saved and self.repairs:
            self._sync_checkpointer_after_callback_save(step)
            self._restore_checkpoint_metadata(saved[0], {"trainer": "sft"})
        return saved

    def _sync_checkpointer_after_callback_save(self, step):
        self.checkpointer._last_save_step = int(step)
        self.checkpointer._last_save_time = self.checkpointer._dt_now_injection()

    def _restore_checkpoint_metadata(self, place, mine):
        file = place / "metadata.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **mine}))

    def clean_up(self):
        if self.limit is None:
            return
        found = [path for path in ePath(self.directory).glob("run-*") if path.is_dir()]
        there = [path for path in found if (path / "metadata.json").exists()]
        stay = [path for path in there if not _read_checkpoint_metadata(str(path)).get("is_temporary", False)]
        stay.sort(key=lambda path: path.stat().get("mtime", 0))
        for path in stay[: -self.limit]:
            self.checkpointer._queue_checkpoint_removal(str(path))

    def resume(self):
        """Return the step, the model and the optimizer of the latest checkpoint; None for a new run."""
        found = find_latest_checkpoint(str(self.directory))
        if found is None:
            return None
        inner = Checkpointer(base_path=found, save_interval=None, step_policies=[])
        latest = {"discover_latest": True, "discover_raise": False}
        model, _ = inner.load_pytree(mesh=None, prefix="model", load_treedef=False, chunk_size=32, **latest)
        like = {"mu": jax.ShapeDtypeStruct((3,), jnp.float32)}
        moments, metadata = inner.load_pytree(
            mesh=None, path=found, prefix="tx", load_treedef=True, template=like, **latest
        )
        return metadata.get("step", 0), model, moments


@pytest.fixture(params=[False, True], ids=["without-repairs", "with-repairs"])
def trainer(request, tmp_path, now):
    def make(interval=None, limit=None):
        checkpointer = Checkpointer(
            base_path=str(tmp_path),
            save_interval=interval,
            step_policies=[CheckpointInterval(every=10, until=None)],
            dt_now_injection=now,
        )
        return Trainer(checkpointer, tmp_path, repairs=request.param, limit=limit)

    return make


def test_easydel_saves_and_resumes(trainer, tmp_path):
    assert trainer().resume() is None
    first = trainer()
    saved = [step for step in range(26) if first.save(step)]
    assert saved == [10, 20]
    assert first.checkpointer._last_save_step == 20
    step, model, moments = trainer().resume()
    assert step == model["step"] == 20
    np.testing.assert_array_equal(moments["mu"], [20, 20, 20])
    assert first.save(25, force=True)
    assert trainer().resume()[0] == 25
    metadata = _read_checkpoint_metadata(str(tmp_path / "run-25"))
    assert (metadata["step"], metadata["is_temporary"], metadata["trainer"]) == (25, False, "sft")


def test_easydel_saves_by_the_clock(trainer, tmp_path, now):
    one = trainer(interval=timedelta(minutes=10))
    for step in range(1, 36):
        now.pass_(minutes=1)
        one.save(step)
    one.checkpointer.wait_until_finished()
    assert names(tmp_path) == ["run-10", "run-20", "run-30"]
    for step in range(36, 39):
        now.pass_(minutes=3)
        one.save(step)
    one.checkpointer.wait_until_finished()
    assert names(tmp_path) == ["run-10", "run-20", "run-30", "run-37"]
    assert _read_checkpoint_metadata(str(tmp_path / "run-37"))["is_temporary"] is True
    now.pass_(minutes=6)
    assert not one.save(39)
    one.save(40)
    one.checkpointer.wait_until_finished()
    assert names(tmp_path) == ["run-10", "run-20", "run-30", "run-40"]


def test_easydel_saves_a_step_once(trainer, tmp_path):
    one = trainer()
    assert one.save(10)
    assert not one.save(10)


def test_easydel_keeps_the_last_ones(trainer, tmp_path):
    one = trainer(limit=2)
    for step in range(1, 61):
        one.save(step)
    one.checkpointer.wait_until_finished()
    assert names(tmp_path) == ["run-50", "run-60"]
    assert one.resume()[0] == 60
    assert checkpoint.load(tmp_path / "run-60", prefix="model")["step"] == 60
    assert not checkpoint.verify(tmp_path / "run-60").damages


def test_a_relative_path_is_that_of_the_directory_in_which_the_checkpointer_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("runs", None, [CheckpointInterval(every=1)])
    checkpointer.on_step(None, {"w": np.ones(2**20)}, step=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.on_step(None, {"w": np.ones(1)}, step=2)
    checkpointer.wait_until_finished()
    assert (tmp_path / "runs" / "run-1" / "metadata.json").exists()
    assert (tmp_path / "runs" / "run-2" / "metadata.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
