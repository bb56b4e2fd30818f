"""What a run in a bucket does: the same as one in a directory."""

from __future__ import annotations

import re

import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import Keep, Run
from eformer.errors import CorruptionError, SupersededError
from support.buckets import around, objects, overwrite
from support.trees import assert_same

ZARRAY = b"""{"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "<f4", "order": "C", "compressor": null,
    "filters": null, "fill_value": null}"""


def tree(number):
    return {"frozen": np.arange(5000.0), "w": np.full(100, number)}


def numbers(url):
    return [step.number for step in checkpoint.steps(url)]


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
class BucketRuns:
    """Steps that are saved, kept and resumed."""

    def save(self, url, kind, stop, **how):
        with Run(url, every=1, signals=(), format=kind, **how) as run:
            run.resume()
            for step in range(run.step + 1, stop + 1):
                run.after(step, tree(step), metrics={"loss": -step})
            return run.step

    def test_steps_are_kept_by_rule_and_resumed(self, url, kind):
        self.save(url, kind, 5, keep=[Keep(last=2), Keep(every=3)])
        assert numbers(url) == [3, 4, 5]
        assert not [key for key in objects(f"{url}/x") if "/step-1/" in key]
        assert checkpoint.latest(url) == f"{url}/step-5"
        assert_same(checkpoint.load(url), tree(5))
        with Run(url, signals=()) as run:
            found = run.resume(like=tree(0))
        assert (found.step, found.skipped) == (5, {})
        assert_same(found.tree, tree(5))

    def test_the_best_step_and_others_are_loaded(self, url, kind):
        self.save(url, kind, 3, keep=[Keep(last=9), Keep(best=1, by="loss")])
        checkpoint.score(url, 2, {"loss": -9})
        assert checkpoint.best(url) == checkpoint.best(url, by="loss") == f"{url}/step-2"
        assert_same(checkpoint.load(url, step="best"), tree(2))
        assert_same(checkpoint.load(url, step=1), tree(1))

    def test_a_damaged_step_is_skipped_and_put_aside(self, url, kind):
        self.save(url, kind, 3)
        data = {key: len(data) for key, data in objects(f"{url}/x").items() if "/step-3/" in key}
        overwrite(f"{url}/x", max(data, key=data.get), lambda data: data[:100])
        with Run(url, signals=()) as run:
            found = run.resume()
        assert (found.step, list(found.skipped)) == (2, [3])
        assert_same(found.tree, tree(2))
        assert numbers(url) == [1, 2]
        assert set(data) - set(objects(f"{url}/x")) == {
            key for key in data if key.endswith(("t.json", "x.json"))
        }

    def test_a_job_that_has_not_resumed_saves_nothing_among_steps(self, url, kind):
        self.save(url, kind, 2)
        before = objects(f"{url}/x")
        with Run(url, signals=(), format=kind) as run, pytest.raises(FileExistsError, match="newest is 2"):
            run.save(1, tree(0))
        assert objects(f"{url}/x") == before

    def test_steps_that_fresh_runs_have_put_aside_stay_whatever_is_removed(self, url, kind):
        for first in (1, 100):
            with Run(url, signals=(), format=kind, fresh=first > 1) as run:
                run.save(1, tree(first))
            checkpoint.score(url, 1, {"eval": first})
        with Run(url, signals=(), format=kind, fresh=True, keep=1) as run:
            for number in (1, 2):
                run.save(number, tree(200))
        assert numbers(url) == [2]
        assert_same(checkpoint.load(url), tree(200))
        there = objects(f"{url}/x")
        marks = sorted(
            key for key in there if re.search(r"/step-1/(manifest|tensorstore_index)\.json\.old", key)
        )
        assert [key.rpartition(".")[2] for key in marks] == ["old", "old-2"]
        for mark, first in zip(marks, (1, 100), strict=True):
            overwrite(f"{url}/x", mark, lambda data: data, mark.rpartition(".")[0])
            assert_same(checkpoint.load(f"{url}/step-1"), tree(first))
        assert {key.rpartition("/")[2] for key in there if "scores" in key} == {
            f"step-1.{end}.scores.json" for end in ("old", "old-2")
        }

    @pytest.mark.parametrize("left", [b"", b"{"])
    def test_the_data_of_a_step_with_a_damaged_index_stay_whatever_is_removed(self, url, kind, left):
        with Run(url, signals=(), format=kind) as run:
            for number in (1, 2):
                run.save(number, {"w": np.full(100, number)})
        there = objects(f"{url}/x")
        index = next(key for key in there if re.search(r"/step-2/(manifest|tensorstore_index)\.json$", key))
        overwrite(f"{url}/x", index, lambda _: left)
        with Run(url, signals=(), format=kind, keep=1) as run:
            assert run.resume().step == 1
            for number in (2, 3):
                run.save(number, {"w": np.full(100, -number)})
        assert numbers(url) == [1, 3]
        overwrite(f"{url}/x", f"{index}.damaged", lambda _: there[index], index)
        assert_same(checkpoint.load(f"{url}/step-2"), {"w": np.full(100, 2)})

    def test_a_damaged_newest_step_is_not_passed_over(self, url, kind):
        self.save(url, kind, 3)
        data = {key: len(data) for key, data in objects(f"{url}/x").items() if "/step-3/" in key}
        overwrite(f"{url}/x", max(data, key=data.get), lambda data: data[:100])
        for read in (checkpoint.load, checkpoint.latest, checkpoint.open):
            with pytest.raises(CorruptionError, match=f"step, 3, is damaged: .* before is {url}/step-2"):
                read(url)
        assert [report.ok for report in checkpoint.verify(url).steps] == [True, True, False]

    def test_the_step_that_it_was_resumed_from_stays(self, url, kind):
        self.save(url, kind, 2)
        self.save(url, kind, 4, keep=1)
        assert numbers(url) == [2, 4]
        assert checkpoint.prune(url, keep=1).removed == ()

    def test_what_a_dead_save_left_is_no_step(self, url, kind):
        from eformer._engine.stores.locate import store_at

        self.save(url, kind, 2)
        upload = store_at(f"{url}/step-3").begin("tree.0123456789abcdef", save_id="0123456789abcdef")
        upload.put([("w/.zarray", ZARRAY), ("w/0", b"half")])
        upload.abandon()
        upload = store_at(f"{url}/step-4").begin("tree.0123456789abcdef", save_id="0123456789abcdef")
        array = (
            b'{"zarr_format":2,"shape":[1],"chunks":[1],"dtype":"|u1","compressor":null,"fill_value":null,'
        )
        upload.put([("v/.zarray", array + b'"order":"C","filters":null,"eformer":"0123456789abcdef"}')])
        upload.abandon()
        assert numbers(url) == [1, 2]
        assert_same(checkpoint.load(url), tree(2))
        assert self.save(url, kind, 3) == 3
        assert_same(checkpoint.load(url), tree(3))

    def test_checkpoints_of_another_program_are_refused_and_remains_of_a_save_are_not(self, url, kind):
        from eformer._engine.stores.locate import store_at

        for step in (3, 4):
            upload = store_at(f"{url}/step-{step}").begin("tree.0123456789abcdef", save_id="0123456789abcdef")
            upload.put([("w/.zarray", ZARRAY), ("w/0", b"half")])
            upload.abandon()
        with Run(url, signals=(), format=kind) as run:
            assert run.resume() is None
        around(f"{url}/x")[0].put(f"{around(f'{url}/x')[1]}checkpoint_200", b"a tree in msgpack")
        with (
            Run(url, signals=(), format=kind) as run,
            pytest.raises(FileExistsError, match=r"another program \(checkpoint_200\)"),
        ):
            run.save(1, tree(1))

    def test_the_older_of_two_jobs_ends(self, url, kind):
        older = Run(url, signals=(), format=kind)
        older.save(1, tree(1)).result()
        with Run(url, signals=(), format=kind) as newer:
            assert newer.resume().step == 1
            with pytest.raises(SupersededError):
                older.save(2, tree(2)).result()
        assert numbers(url) == [1]

    def test_steps_are_scored_and_held(self, url, kind):
        self.save(url, kind, 2)
        for step in checkpoint.follow(url, poll=0.01, timeout=0.0):
            checkpoint.score(url, step.number, {"eval": 10 - step.number})
            checkpoint.score(url, step.number, {"other": 1})
        assert checkpoint.steps(url)[0].metrics == {"loss": -1, "eval": 9, "other": 1}
        with checkpoint.steps(url)[0].hold() as path:
            self.save(url, kind, 4, keep=1)
            assert_same(checkpoint.load(path), tree(1))
            assert 1 in numbers(url)
        self.save(url, kind, 5, keep=1)
        assert 1 not in numbers(url)
        assert not [key for key in objects(f"{url}/x") if "step-1" in key]
