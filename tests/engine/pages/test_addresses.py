"""Pages of a run and of a checkpoint: what each address answers, while steps come, go and are damaged."""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.pages import checkpoints, live
from eformer._engine.pages.addresses import Pages
from eformer._engine.pages.requests import HttpRequest, RefusedError
from eformer._engine.record.policies import Keep
from eformer.errors import FormatError, NotFoundError
from support.columns import leaf_paths, numbers_of, statistics_of, verdicts_in

SAMPLES = Path(__file__).parents[2] / "compat" / "data"


def tree(step):
    return {
        "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4) + step, "b": np.zeros(4, np.float32)},
        "step": step,
    }


def save(path, *numbers):
    with checkpoint.Run(path, every=1) as run:
        run.resume()
        for number in numbers:
            run.after(number, tree(number), metrics={"loss": 1 / number})


@pytest.fixture
def run(tmp_path):
    save(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """Follow quickly, and not beyond the test."""
    monkeypatch.setattr(live, "_SECONDS_BETWEEN", 0.01)
    monkeypatch.setattr(live, "_REST", 0)
    monkeypatch.setattr(live, "_PATIENCE", 2)
    pages = []
    start = Pages.__init__
    monkeypatch.setattr(Pages, "__init__", lambda self, *given: (start(self, *given), pages.append(self))[0])
    yield
    for one in pages:
        one.close()


def ask(pages, path, /, **parameters):
    answer = pages(
        HttpRequest(tuple(path.split("/")), {name: str(value) for name, value in parameters.items()})
    )
    return answer.status, json.loads(answer.body)


def steps_of(pages):
    return {step["number"]: step for step in ask(pages, "run.json")[1]["steps"]}


def until(pages, is_so, ask=steps_of):
    """Ask again and again, as a page does, until the run is as expected."""
    end = time.monotonic() + 30
    while not is_so(found := ask(pages)):
        assert time.monotonic() < end, found
    return found


def test_a_run_lists_its_steps_with_sizes_metrics_and_why(run):
    status, found = ask(Pages(str(run)), "run.json")
    assert (status, found["title"], found["metrics"], found["notes"]) == (200, "run", ["loss"], [])
    assert [step["number"] for step in found["steps"]] == [1, 2, 3]
    assert [step["metrics"]["loss"] for step in found["steps"]] == [1, 1 / 2, 1 / 3]
    assert found["nbytes"] == sum(step["nbytes"] for step in found["steps"]) > 0
    assert {step["why"] for step in found["steps"]} == {"every"}


def test_the_facts_of_a_live_run_are_those_of_its_report(run):
    facts = ask(Pages(str(run), [Keep(last=1)]), "run.json")[1]
    reported = checkpoint.report(run, values=False, keep=1).data["run"]
    assert facts["steps"] == reported["steps"]
    assert {name: facts[name] for name in ("title", "path", "metrics", "rules", "nbytes")} == {
        name: reported[name] for name in ("title", "path", "metrics", "rules", "nbytes")
    }


def test_a_new_step_appears_and_the_etag_says_so(run):
    pages = Pages(str(run))
    before = pages(HttpRequest(("run.json",))).etag
    assert pages(HttpRequest(("run.json",))).etag == before
    save(run, 4)
    assert until(pages, lambda steps: 4 in steps and steps[4]["metrics"])[4]["problem"] is None
    assert pages(HttpRequest(("run.json",))).etag != before


def test_a_step_that_is_damaged_later_is_shown_as_damaged(run):
    pages = Pages(str(run))
    assert steps_of(pages)[2]["problem"] is None
    data = next((run / "step-2").glob("*.safetensors"))
    data.unlink()
    assert data.name in until(pages, lambda steps: steps[2]["problem"])[2]["problem"]


def test_a_score_that_is_added_later_is_shown(run):
    pages = Pages(str(run))
    steps_of(pages)
    checkpoint.score(run, 3, {"eval": 0.5})
    assert until(pages, lambda steps: "eval" in steps[3]["metrics"])[3]["metrics"]["eval"] == 0.5


def test_steps_that_rules_would_remove_are_marked_and_those_that_stay_say_why(run):
    steps = steps_of(Pages(str(run), [Keep(last=1), Keep(at=(1,))]))
    assert [step["is_removed"] for step in steps.values()] == [False, True, False]
    assert steps[3]["kept_by"] == ["the newest", "the last 1"]
    assert steps[1]["kept_by"] == ["1"]


def test_a_step_that_retention_removes_is_a_plain_message(run):
    pages = Pages(str(run))
    assert ask(pages, "step/2/summary.json")[0] == 200
    shutil.rmtree(run / "step-2")
    for name in ("summary.json", "columns.json", "leaf.json", "changes.json", ""):
        status, found = ask(pages, f"step/2/{name}", path="params.w")
        assert status == 404
        assert found["error"].startswith("step 2 is not there: it was removed")
    assert 2 not in until(pages, lambda steps: 2 not in steps)


def test_a_step_that_was_saved_again_is_read_again(run):
    pages = Pages(str(run))
    before = ask(pages, "step/2/leaf.json", path="params.w")[1]["statistics"]["max"]
    checkpoint.save(tree(100), run / "step-2")
    assert ask(pages, "step/2/leaf.json", path="params.w")[1]["statistics"]["max"] == before + 98


def test_a_whole_run_that_is_removed_is_a_note(run):
    pages = Pages(str(run))
    steps_of(pages)
    shutil.rmtree(run)
    (note,) = until(pages, bool, lambda pages: ask(pages, "run.json")[1]["notes"])
    assert "is not a directory of steps" in note


def test_a_directory_without_steps_is_a_run_that_begins_later(tmp_path):
    pages = Pages(str(tmp_path))
    assert steps_of(pages) == {}
    save(tmp_path, 7)
    assert until(pages, lambda steps: steps)[7]["number"] == 7


def test_a_leaf_is_read_and_checked_when_it_is_asked_for(run):
    pages = Pages(str(run))
    assert ask(pages, "step/1/columns.json")[1]["statistics"] is None
    status, leaf = ask(pages, "step/1/leaf.json", path="params.w")
    assert (status, leaf["checked"], leaf["statistics"]["min"], leaf["statistics"]["max"]) == (
        200,
        True,
        1,
        12,
    )
    columns = ask(pages, "step/1/columns.json")[1]
    assert statistics_of(columns, "params.w", ["std"]) == {"std": leaf["statistics"]["std"]}
    assert statistics_of(columns, "params.b") is None


def test_a_leaf_with_a_flipped_bit_is_damaged_and_so_says_every_page_from_then_on(run):
    mark = np.float32(12).tobytes()
    data = next(file for file in (run / "step-1").glob("*.safetensors") if mark in file.read_bytes())
    data.write_bytes(data.read_bytes().replace(mark, np.float32(13).tobytes()))
    pages = Pages(str(run))
    assert ask(pages, "step/1/leaf.json", path="params.w")[1]["damaged"] is True
    assert ask(pages, "step/1/leaf.json", path="params.b")[1]["damaged"] is False
    columns = ask(pages, "step/1/columns.json")[1]
    ((number, (problem, is_damaged)),) = columns["problems"].items()
    assert (int(number), is_damaged) == (numbers_of(columns)["params.w"], 1)
    assert "params.w" in problem


def test_a_read_stops_when_its_client_has_gone(run):
    pages = Pages(str(run))
    with pytest.raises(RefusedError, match="no longer waits"):
        pages(HttpRequest(("step", "1", "leaf.json"), {"path": "params.w"}, has_gone=lambda: True))
    assert ask(pages, "step/1/leaf.json", path="params.w")[1]["checked"] is True


def test_a_leaf_that_waits_for_others_to_be_read_gives_up_when_its_client_goes(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.01)
    pages = Pages(str(run))
    for _ in range(checkpoints.MOST_READERS):
        pages._checkpoints._readers.acquire()
    with pytest.raises(RefusedError, match="no longer waits"):
        pages(HttpRequest(("step", "1", "leaf.json"), {"path": "params.w"}, has_gone=lambda: True))


def test_only_a_few_checkpoints_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MOST_OPEN", 2)
    save(tmp_path / "run", *range(1, 6))
    pages = Pages(str(tmp_path / "run"))
    for number in range(1, 6):
        assert ask(pages, f"step/{number}/summary.json")[0] == 200
    paths = [path for (path, _), _ in pages._checkpoints._open]
    assert [path.rpartition("-")[2] for path in paths] == ["4", "5"]


def test_many_who_ask_for_the_same_step_open_it_once(run, monkeypatch):
    opened = []
    real = checkpoints.page_contents
    monkeypatch.setattr(checkpoints, "page_contents", lambda path: opened.append(path) or real(path))
    pages = Pages(str(run))
    threads = [threading.Thread(target=ask, args=(pages, "step/3/summary.json")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


def test_a_step_that_cannot_be_read_is_a_message_with_no_path_of_the_machine(run, tmp_path):
    (run / "step-2" / "manifest.json").write_bytes(b"{")
    status, found = ask(Pages(str(run)), "step/2/summary.json")
    assert status == 422
    assert found["error"].startswith("step-2/manifest.json is damaged")
    assert str(tmp_path) not in found["error"]


NO_PAGES = (
    "nothing", "step", "step/x", "step/x/", "step/1/nothing.json", "step/-1/", "step/1e3/", "step/١/", "step/../run.json",
    "../run.json", "step/..%2f..%2fetc/", "step/1/../../manifest.json", "step/1/manifest.json", "step-1/manifest.json",
    "/etc/passwd", "step/1//", "summary.json", "run.json/", "live.html", "base.js", "step/9999999999999999999/",
)  # fmt: skip


def test_an_address_that_is_no_page_is_not_found(run):
    pages = Pages(str(run))
    for path in NO_PAGES:
        with pytest.raises(RefusedError, match="this page does not exist") as caught:
            pages(HttpRequest(tuple(path.split("/"))))
        assert caught.value.status == 404


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_checkpoint_alone_has_the_pages_of_a_step(tmp_path, kind):
    path = tmp_path / ("model" if kind == "directory" else "model.safetensors")
    checkpoint.save(tree(1), path)
    pages = Pages(str(path))
    assert b'data-kind="checkpoint"' in pages(HttpRequest(("",))).body
    assert ask(pages, "summary.json")[1]["leaves"] == 3
    assert ask(pages, "leaf.json", path="params.w")[1]["checked"] is True
    assert ask(pages, "leaf.json", path="no.such.leaf") == (200, None)
    with pytest.raises(RefusedError):
        pages(HttpRequest(("run.json",)))


def test_what_is_no_checkpoint_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        Pages(str(tmp_path / "nothing"))


def test_a_run_in_a_bucket_is_served_too():
    save("memory://serve/run", 1, 2)
    pages = Pages("memory://serve/run")
    assert [step["problem"] for step in steps_of(pages).values()] == [None, None]
    assert ask(pages, "step/2/leaf.json", path="params.w")[1]["checked"] is True
    checkpoint.prune("memory://serve/run", keep=1)
    assert ask(pages, "step/1/summary.json")[0] == 404


@pytest.mark.parametrize("sample", ["msgpack_arrays.msgpack", "pytree_basic", "gathered_bf16.safetensors"])
def test_checkpoints_of_other_programs_are_served_too(sample):
    pages = Pages(str(SAMPLES / sample))
    leaves = leaf_paths(ask(pages, "columns.json")[1])
    assert leaves
    for path in leaves:
        assert ask(pages, "leaf.json", path=path)[1]["problem"] is None


def test_a_run_that_takes_long_to_read_is_shown_as_far_as_it_is_known(run, monkeypatch):
    is_allowed = threading.Event()
    real = live.read_step
    monkeypatch.setattr(live, "read_step", lambda *given: is_allowed.wait(30) and real(*given))
    monkeypatch.setattr(live, "_PATIENCE", 0.01)
    pages = Pages(str(run))
    facts = until(pages, lambda facts: facts["steps"], lambda pages: ask(pages, "run.json")[1])
    assert [step["number"] for step in facts["steps"]] == [1, 2, 3]
    assert (facts["is_complete"], facts["nbytes"], facts["notes"]) == (
        False,
        None,
        ["reading the steps: 0 of 3"],
    )
    is_allowed.set()
    assert all(step["metrics"] for step in until(pages, lambda steps: steps[1]["metrics"]).values())


def test_a_mistake_while_a_run_is_followed_is_a_note_and_it_goes_on(run, monkeypatch, caplog):
    real = live.steps
    monkeypatch.setattr(live, "steps", lambda path: 1 / 0)
    pages = Pages(str(run))
    assert "cannot be followed" in until(pages, bool, lambda pages: ask(pages, "run.json")[1]["notes"])[0]
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(live, "steps", real)
    assert until(pages, lambda steps: 3 in steps and steps[3]["metrics"])


def test_what_is_no_checkpoint_is_not_served(tmp_path):
    (tmp_path / "notes.txt").write_text("hi")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises((NotFoundError, FormatError), match="checkpoint"):
            Pages(str(path))


def test_a_run_that_a_job_has_claimed_and_not_saved_yet_waits_for_its_first_step(tmp_path):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        run.resume(like=tree(0))
        pages = Pages(str(tmp_path / "run"))
        assert steps_of(pages) == {}
        run.after(1, tree(1))
        run.wait()
        assert list(until(pages, bool)) == [1]


def test_a_step_beside_another_says_what_changed_before_anything_is_read(run):
    pages = Pages(str(run))
    summary = ask(pages, "step/3/summary.json", against=1)[1]
    assert (summary["title"], summary["against"]["title"]) == ("step-3", "step-1")
    assert (summary["run"]["steps"], summary["run"]["against"]) == ([2, 1], 1)
    changes = ask(pages, "step/3/changes.json", against=1)[1]
    assert changes["counts"] == {"same": 1, "unknown": 1, "changed": 1, "removed": 0}
    verdicts = verdicts_in(ask(pages, "step/3/columns.json", against=1)[1])
    assert {path: status for path, (status, *_) in verdicts.items()} == {
        "params.b": "same",
        "params.w": "unknown",
        "step": "changed",
    }
    assert ask(pages, "step/3/columns.json")[1]["changes"] is None
    assert ask(pages, "step/3/changes.json") == (200, None)
    assert "against" not in ask(pages, "step/3/summary.json")[1]


def test_a_leaf_that_is_selected_is_compared_and_its_row_shows_it(run):
    pages = Pages(str(run))
    change = ask(pages, "step/3/leaf.json", path="params.w", against=1)[1]["change"]
    assert (change["status"], change["largest"], change["share"]) == ("changed", 2.0, 1.0)
    columns = ask(pages, "step/3/columns.json", against=1)[1]
    assert verdicts_in(columns)["params.w"] == ("changed", 0, 0)
    assert change["relative"] in columns["changes"]["relative"]
    assert ask(pages, "step/3/leaf.json", path="params.w")[1]["change"] is None
    assert ask(pages, "step/3/leaf.json", path="step", against=1)[1]["change"]["what"] == "1 → 3"


@pytest.mark.parametrize("against", ["x", "-1", "../1", "9" * 19])
def test_only_steps_of_the_run_can_be_compared(run, against):
    with pytest.raises(RefusedError, match="no such step"):
        ask(Pages(str(run)), "step/3/summary.json", against=against)
    assert ask(Pages(str(run)), "step/3/summary.json", against="77")[0] == 404


def test_a_comparison_counts_as_two_checkpoints_that_are_open(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "MOST_OPEN", 2)
    pages = Pages(str(run))
    ask(pages, "step/1/summary.json")
    ask(pages, "step/3/summary.json", against="1")
    assert len(pages._checkpoints._open) == 1
