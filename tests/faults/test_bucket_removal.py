"""Checkpoints are removed from buckets while saves run there, other removals run, and removals die between any two
requests: nothing is ever torn, and the next removal goes on."""

import datetime as dt
import itertools
import threading
from contextlib import ExitStack, suppress
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer._engine.formats import steps
from eformer._engine.runs.retention import sweep_remains as sweep
from eformer._engine.stores import leases
from eformer._engine.stores.bucket_removal import _Claim
from eformer._engine.stores.checkpoints import held, remove_checkpoint, set_aside
from eformer._engine.stores.checkpoints import sweep as sweep_checkpoint
from eformer._engine.stores.leases import Leases
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.objects import Objects
from eformer._engine.tools.prune import plan_removal, remove_planned
from eformer.checkpoint import Run, SaveOptions, load, prune, save
from eformer.errors import NotFoundError
from support.bucket_faults import (
    EXPIRED,
    STRIDE,
    Countdown,
    Deaths,
    Died,
    Paused,
    hooked,
    interleaved,
    is_torn,
    new_url,
    watched,
)
from support.buckets import around
from support.faults import noted

KINDS = pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
ZOMBIE = 9.0
MOST = 24  # requests of a removal


def tree(number):
    return {"w": np.full(3000, float(number)), "n": float(number)}


def put(url, number, kind, prefix=None, *, reuse=False):
    save(tree(number), url, prefix=prefix, format=kind, options=SaveOptions(threads=1, reuse=reuse))


def fill(run, kind, numbers=(1, 2, 3)):
    for number in numbers:
        put(f"{run}/step-{number}", number, kind)


def upload_foreign(run):
    """Put two steps that another program wrote, each of several files without an index."""
    found, start = around(f"{run}/x")
    for step in (1, 2, 3):
        for name in ("a", "b"):
            data = safetensors.numpy.save({name: np.full(9, step, np.float32)})
            found.put(f"{start}step-{step}/{name}.safetensors", data)


def keys(run):
    """Return the keys of all objects of a run, counted from there."""
    found, start = around(f"{run}/x")
    return sorted(entry.key.removeprefix(start) for entry in found.list(start))


def numbers(run):
    return [step.number for step in checkpoint.steps(run)]


def passed(**time):
    """Let all leases have run out; and with hours=48, all saves be over."""
    return mock.patch.multiple(
        leases, LEASE=EXPIRED, DEAD_FOR=dt.timedelta(seconds=EXPIRED) if time else leases.DEAD_FOR
    )


def check_whole(run, there):
    """Check that every step is whole or gone, for those who list steps and for those who know its URL."""
    assert numbers(run)[-1] == there
    for step in (1, 2, 3):
        url = f"{run}/step-{step}"
        try:
            found = load(url)
        except NotFoundError:
            assert step not in numbers(run)
            continue
        assert (found["w"] == step).all()
        assert step in numbers(run)
        assert checkpoint.verify(url).ok


# ---------------------------------------------------------------------------------------------- deaths


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "foreign"])
def test_a_prune_that_dies_before_any_request_is_completed_by_the_next(kind, record_property):
    at, deaths = 1, 0
    while True:
        run = new_url()
        upload_foreign(run) if kind == "foreign" else fill(run, kind)
        death = Deaths(at)
        with hooked(death), suppress(Died):
            prune(run, keep=1, foreign=kind == "foreign")
        with noted(death.where):
            if kind != "foreign":  # it is no step of a run
                check_whole(run, 3)
            else:
                check_foreign(run)
            with passed():
                prune(run, keep=1, foreign=kind == "foreign")
            with passed(hours=48):
                prune(run, keep=1, foreign=kind == "foreign")
            assert {key.partition("/")[0] for key in keys(run)} == {"step-3"}
            assert not [key for key in keys(run) if leases.LEASES in key]
        if death.count < at:
            break
        at, deaths = at + max(1, STRIDE // 8), deaths + 1
    record_property("deaths", deaths)
    assert deaths > 5


def check_foreign(run):
    for step in (1, 2, 3):
        try:
            found = checkpoint.inspect(f"{run}/step-{step}")
        except NotFoundError:
            assert step < 3
        else:
            assert sorted(found.trees) == ["a", "b"]
            assert checkpoint.verify(f"{run}/step-{step}").ok


@KINDS
def test_two_prunes_that_meet_remove_the_same(kind):
    where, requests = 1, 99
    while where <= requests:
        run = new_url()
        fill(run, kind)
        before = Countdown(where, lambda run=run: prune(run, keep=1))
        with hooked(once(before)), suppress(FileNotFoundError):
            prune(run, keep=1)
        with noted(f"at {where}"):
            check_whole(run, 3)
            assert numbers(run) == [3]
            assert {key.partition("/")[0] for key in keys(run)} == {"step-3"}
        requests, where = before.count, where + max(1, STRIDE // 4)


def once(before):
    """Let a hook call what makes requests itself: those are not counted."""

    def hook(operation, key):
        if before.is_on and threading.current_thread() is here:
            before.is_on = before.count + 1 < before.at
            before(operation, key) if before.is_on else reached()

    def reached():
        before.count += 1
        before._call()

    here = threading.current_thread()
    return hook


# --------------------------------------------------------------------------------------------- zombies


@pytest.mark.sample(3)
@KINDS
@pytest.mark.parametrize("prefix", [None, "ema"])
def test_a_zombie_of_a_step_that_is_removed_is_committed_whole_or_refused(kind, prefix, record_property):
    outcomes = []
    for run, plan, zombie in zombies_of_step(kind, prefix):
        url = f"{run}/step-1"
        if zombie.told == "committed":
            assert load(url, prefix=prefix)["n"] == ZOMBIE
            assert not is_torn(url, [prefix or ""])
        else:
            with pytest.raises(NotFoundError, match="it was removed"):
                load(url, prefix=prefix)
        outcomes.append(zombie.told)
        del plan
    record_property("outcomes", outcomes)
    assert set(outcomes) == {"committed", "refused"}


def zombies_of_step(kind, prefix):
    """Yield all ways in which a save that was taken for dead and a removal of its step can meet."""
    at = 1
    while at < 99:
        for where in range(1, MOST, max(1, STRIDE // 4)):
            run = new_url()
            fill(run, kind, (1, 2))
            plan = plan_removal(run, 1)
            with mock.patch.object(leases, "LEASE", EXPIRED):
                zombie, _ = interleaved(
                    lambda run=run: put(f"{run}/step-1", ZOMBIE, kind, prefix),
                    at,
                    lambda plan=plan: changed(plan),
                    where,
                )
            with noted(f"the zombie at {at}, the removal at {where}"):
                yield run, plan, zombie
        if zombie.count < at:
            return
        at += max(1, STRIDE // 4)


def changed(plan):
    with suppress(ValueError):  # the zombie has replaced the step
        remove_planned(plan)


def sweeps_of_new_step(kind):
    """Yield all ways in which a save of a new step that was taken for dead and a sweep can meet."""
    at = 1
    while at < 99:
        for where in range(1, MOST, max(1, STRIDE // 8)):
            run = new_url()
            fill(run, kind, (1,))
            with mock.patch.object(leases, "LEASE", EXPIRED):
                zombie, _ = interleaved(
                    lambda run=run: put(f"{run}/step-2", ZOMBIE, kind),
                    at,
                    lambda run=run: sweep(store_at(run)),
                    where,
                )
            with noted(f"the zombie at {at}, the sweep at {where}"):
                yield run, zombie
        if zombie.count < at:
            return
        at += max(1, STRIDE // 8)


@KINDS
def test_a_zombie_of_a_new_step_is_committed_whole_or_refused(kind, record_property):
    outcomes = []
    for run, zombie in sweeps_of_new_step(kind):
        if zombie.told == "committed":
            assert load(f"{run}/step-2")["n"] == ZOMBIE
            assert not is_torn(f"{run}/step-2", [""])
            assert numbers(run) == [1, 2]
        else:
            assert numbers(run) == [1]
            with passed():
                sweep(store_at(run))
            assert [key for key in keys(run) if "step-2/" in key] == [
                f"step-2/{'manifest.json' if kind == 'safetensors' else 'tensorstore_index.json'}"
            ]
            put(f"{run}/step-2", 5.0, kind)
            assert load(run)["n"] == 5.0
        outcomes.append(zombie.told)
    record_property("outcomes", outcomes)
    assert set(outcomes) == {"committed", "refused"}


@pytest.mark.thorough
def test_the_test_can_fail_without_barring_steps_are_torn():
    """A commit that does not look at what the index bars."""
    with mock.patch.object(Leases, "_refuse_dead", mock.Mock(return_value=None)):
        torn = [
            zombie.told == "committed" and is_torn(f"{run}/step-2", [""])
            for run, zombie in sweeps_of_new_step("tensorstore")
        ]
    assert sum(torn) > 0


# --------------------------------------------------------------------------------------- living saves


@pytest.mark.sample(3)
@KINDS
@pytest.mark.parametrize("reuse", [False, True])
def test_a_living_save_to_a_step_that_is_removed_loses_nothing(kind, reuse):
    """The save begins its commit before the removal, or waits for its end; its own data are never removed."""
    outcomes = set()
    for at in (1, 2, 3, 5, 8):
        for where in range(1, MOST, max(1, STRIDE // 4)):
            run = new_url()
            fill(run, kind, (1, 2))
            plan = plan_removal(run, 1)
            one = Paused(lambda run=run: put(f"{run}/step-1", ZOMBIE, kind, "ema", reuse=reuse), at)
            before = Countdown(where, one._go.set)
            here = threading.current_thread()
            with (
                mock.patch.object(leases, "_PAUSE", 0.001),
                watched({one.thread: one.before, here: before}, {one.thread: one.commits}, looks=True),
            ):
                one.start()
                changed(plan)
                one.finish()
            with noted(f"the save at {at}, the removal at {where}"):
                outcomes.add(one.told)
                assert one.told == "refused" or load(f"{run}/step-1", prefix="ema")["n"] == ZOMBIE
                assert one.told == "refused" or checkpoint.verify(f"{run}/step-1").ok
    assert "committed" in outcomes


@KINDS
def test_a_save_that_begins_while_its_step_is_removed_waits_for_that(kind):
    for where in range(1, MOST, max(1, STRIDE // 8)):
        run, done = new_url(), []
        fill(run, kind, (1, 2))
        plan = plan_removal(run, 1)
        one = threading.Thread(
            target=lambda run=run, done=done: done.append(put(f"{run}/step-1", ZOMBIE, kind)), daemon=True
        )
        before = Countdown(where, one.start)
        with mock.patch.object(leases, "_PAUSE", 0.001), watched({threading.current_thread(): before}, {}):
            changed(plan)
            if before.count < where:
                break
            one.join(60)
        with noted(f"at {where}"):
            assert done == [None]
            assert load(f"{run}/step-1")["n"] == ZOMBIE
            assert checkpoint.verify(f"{run}/step-1").ok
    assert where > 8


# ------------------------------------------------------------------------------------- what is left alone


@KINDS
def test_a_step_that_is_held_or_saved_to_stays(kind):
    run = new_url()
    fill(run, kind)
    upload = store_at(f"{run}/step-2").begin("", save_id="0123456789abcdef")
    with checkpoint.steps(run)[0].hold() as path:
        done = prune(run, keep=1)
        assert (load(path)["w"] == 1).all()
    assert (done.removed, done.kept, sorted(done.left)) == ((), ("step-3",), ["step-1", "step-2"])
    assert "a reader holds it, or a save to it is under way" in done.left["step-1"]
    assert done.nbytes == 0
    upload.close()
    assert prune(run, keep=1).removed == ("step-1", "step-2")
    assert {key.partition("/")[0] for key in keys(run)} == {"step-3"}


def test_a_step_that_a_save_has_begun_to_write_since_the_plan_stays():
    run = new_url()
    fill(run, "safetensors")
    plan = plan_removal(run, 1)
    upload = store_at(f"{run}/step-2").begin("", save_id="0123456789abcdef")
    store_at(f"{run}/step-2").objects.put(
        store_at(run).key_of("step-2/model.0123456789abcdef.safetensors"), b"new"
    )
    done = remove_planned(plan)
    assert (done.removed, [*done.left]) == (("step-1",), ["step-2"])
    upload.close()


@KINDS
def test_a_step_at_the_root_of_a_bucket_that_is_held_stays(kind):
    name = "step-987654321"
    put(f"memory://{name}", 1, kind)
    store = store_at("memory://")
    with held(store, name) as path:
        assert not remove_checkpoint(store, name)
        assert (load(path)["w"] == 1).all()
    upload = store_at(f"memory://{name}").begin("", save_id="0123456789abcdef")
    assert not remove_checkpoint(store, name)
    upload.close()
    assert remove_checkpoint(store, name)
    assert not list(store.objects.list(f"{name}/"))


@KINDS
def test_a_reader_that_comes_before_anything_is_removed_keeps_the_step(kind):
    kept = set()
    for where in range(1, MOST, max(1, STRIDE // 8)):
        run = new_url()
        fill(run, kind, (1, 2))
        plan = plan_removal(run, 1)
        with ExitStack() as readers:

            def hold(readers=readers, run=run):
                readers.enter_context(held(store_at(run), "step-1"))

            with watched({threading.current_thread(): Countdown(where, hold)}, {}):
                removed = remove_planned(plan).removed
            with noted(f"at {where}"):
                kept.add(not removed)
                assert removed or load(f"{run}/step-1")["n"] == 1
                check_whole(run, 2)
    assert kept == {True, False}


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", ["a removal", "a sweep"])
def test_a_reader_and_two_removals_never_tear_a_step(other):
    """One puts the index back for the reader, while another is about to go on with its removal."""
    kept = set()
    every = (range(1, MOST), range(1, MOST)) if STRIDE == 1 else (range(6, 15), range(6, 13))
    for at, where in itertools.product(*every):
        if STRIDE > 1 and (at + where) % 2:  # every second moment of each beside every second of the other
            continue
        run = new_url()
        fill(run, "safetensors", (1, 2))
        plan = plan_removal(run, 1)
        two = Paused(
            lambda run=run, plan=plan: sweep(store_at(run)) if other == "a sweep" else changed(plan), at
        )
        two.commits()
        with ExitStack() as readers:

            def come(two=two, readers=readers, run=run):
                two.start()
                readers.enter_context(held(store_at(run), "step-1"))

            here = threading.current_thread()
            with watched({here: Countdown(where, come), two.thread: two.before}, {}):
                changed(plan)
                if two.thread.ident:
                    two.finish()
            with noted(f"the removal at {where}, the other at {at}"):
                check_whole(run, 2)
                kept.add(1 in numbers(run))
    assert kept == {True, False}


@KINDS
def test_a_dead_save_of_a_new_step_is_swept_by_the_next_start_of_the_run(kind):
    run = new_url()
    fill(run, kind, (1, 2))
    die_before_commit(f"{run}/step-3", kind)
    left = [key for key in keys(run) if "step-3/" in key]
    assert left
    with Run(run, signals=(), format=kind) as one:
        assert one.resume().step == 2
    assert [key for key in keys(run) if "step-3/" in key] == left  # it may be alive
    with passed(), Run(run, signals=(), format=kind) as one:
        assert one.resume().step == 2
    assert len([key for key in keys(run) if "step-3/" in key]) == 1
    assert numbers(run) == [1, 2]
    with passed(hours=48):
        prune(run, keep=1)
    assert not [key for key in keys(run) if "step-3/" in key]


@KINDS
def test_a_sweep_that_dies_before_any_request_is_completed_by_the_next(kind):
    at = 1
    while True:
        run = new_url()
        fill(run, kind, (1,))
        die_before_commit(f"{run}/step-2", kind)
        death = Deaths(at)
        with passed():
            with hooked(death), suppress(Died):
                sweep(store_at(run))
            with noted(death.where):
                assert numbers(run) == [1]
                with pytest.raises(NotFoundError):
                    load(f"{run}/step-2")
                sweep(store_at(run))
                assert len([key for key in keys(run) if "step-2/" in key]) == 1
        with passed(hours=48):
            sweep(store_at(run))
        assert {key.partition("/")[0] for key in keys(run)} == {"step-1"}
        if death.count < at:
            return
        at += max(1, STRIDE // 8)


def die_before_commit(url, kind):
    """Leave the lease and the objects of a save that dies."""
    death = Deaths(0)

    def die(*_):
        death.at = 1
        raise Died

    with suppress(Died), hooked(death), mock.patch.object(Objects, "swap", die):
        put(url, 9, kind)


def test_data_of_a_step_that_was_put_aside_stay():
    run = new_url()
    fill(run, "safetensors", (1, 2))
    with Run(run, signals=()) as one:
        assert one.resume(step=1, rewind=True).step == 1
    before = [key for key in keys(run) if "step-2/" in key]
    assert any(".safetensors" in key for key in before)
    with passed(hours=48):
        sweep(store_at(run))
        prune(run, keep=1)
    assert [key for key in keys(run) if "step-2/" in key] == before


def test_a_step_that_is_saved_while_it_is_put_aside_stays():
    run = new_url()
    fill(run, "safetensors", (1, 2))
    store, (found, start) = store_at(run), around(f"{run}/x")
    put_copy, new = type(found).put, b'{"another": "save"}'

    def put_and_commit(objects, key, data):
        put_copy(objects, key, data)
        if key.endswith("manifest.json.rewound"):
            put_copy(objects, key.removesuffix(".rewound"), new)

    with mock.patch.object(type(found), "put", put_and_commit):
        set_aside(store, "step-2", "rewound", ("manifest.json",))
    assert bytes(found.read(f"{start}step-2/manifest.json")[0]) == new


def test_the_steps_of_a_run_are_looked_for_several_at_once():
    run, meeting = new_url(), threading.Barrier(3, timeout=30)
    fill(run, "safetensors", (1, 2, 3))
    has_mark = steps.has_mark

    def met(*arguments):
        meeting.wait()
        return has_mark(*arguments)

    with mock.patch.object(steps, "has_mark", met):
        assert [number for number, _ in steps.steps_in(store_at(run))] == [1, 2, 3]


def test_a_step_that_was_replaced_since_the_plan_stays():
    run = new_url()
    fill(run, "safetensors", (1, 2))
    plan = plan_removal(run, 1)
    put(f"{run}/step-1", 7, "safetensors")
    with pytest.raises(ValueError, match="step-1 has changed since its removal was planned"):
        remove_planned(plan)
    assert load(f"{run}/step-1")["n"] == 7


def test_a_sweep_whose_index_is_removed_by_another_one_does_nothing():
    run = new_url()
    put(f"{run}/step-1", 1, "safetensors")
    store, death = store_at(run), Deaths(8)
    with suppress(Died), hooked(death):
        remove_checkpoint(store, "step-1")
    found, start = around(f"{run}/x")
    index = f"{start}step-1/manifest.json"
    assert b"gone" in bytes(found.read(index)[0])

    look = _Claim.look

    def looked(claim):
        found.delete([index])
        return look(claim)

    with passed(), mock.patch.object(_Claim, "look", looked):
        sweep_checkpoint(store, "step-1")
    with pytest.raises(NotFoundError):
        load(f"{run}/step-1")


def test_a_removal_makes_few_requests():
    run = new_url()
    fill(run, "safetensors", (1, 2))
    plan, counted = plan_removal(run, 1), Deaths(0)
    with hooked(counted):
        remove_checkpoint(store_at(run), plan.removed[0], plan.planned[plan.removed[0]].identity)
    assert counted.count <= 14
