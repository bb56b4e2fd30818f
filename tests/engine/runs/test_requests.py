"""Requests for a save from outside the job."""

import json
import threading

import numpy as np
import pytest
from click.testing import CliRunner

from eformer import checkpoint
from eformer._engine.processes.coordination import Board
from eformer._engine.runs import requests
from eformer._engine.runs.requests import Requests
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import Run
from eformer.cli.commands import main
from eformer.errors import NotFoundError, SaveRequestError

WITHIN = 30  # seconds


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(requests, "_ON_DISK", 0.01)
    monkeypatch.setattr(requests, "_IN_BUCKET", 0.01)
    monkeypatch.setattr(requests, "_ASKING", 0.01)


def tree(number):
    return {"w": np.full(3, number)}


def refused(path):
    with pytest.raises(SaveRequestError) as error:
        checkpoint.request_save(path)
    return str(error.value)


class Training:
    """A loop of quick steps in a thread of its own, which no rule ever saves after its first step."""

    def __init__(self, path, **arguments):
        self.run = Run(path, signals=(), **arguments)
        self.is_over = False
        self.run.save(1, tree(1)).result()
        self.thread = threading.Thread(target=self.train)

    def train(self):
        step = 1
        while not self.is_over:
            step += 1
            self.run.after(step, tree(step))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.thread.join(WITHIN)
        self.run.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_job_saves_when_it_is_asked_and_says_so(tmp_path, place):
    path = tmp_path / "run" if place == "disk" else f"memory://requests-{tmp_path.name}/run"
    with Training(path):
        first = checkpoint.request_save(path, timeout=WITHIN)
        second = checkpoint.request_save(path, timeout=WITHIN)
    assert first != second
    step = checkpoint.steps(path)[1]
    assert (step.path, step.reason) == (first, "asked")
    assert checkpoint.load(first)["w"][0] == step.number
    assert len(checkpoint.steps(path)) == 3


def test_the_command_prints_the_path(tmp_path):
    with Training(tmp_path / "run"):
        result = CliRunner().invoke(main, ["request", str(tmp_path / "run"), "--timeout", str(WITHIN)])
    assert result.output.strip() == checkpoint.latest(tmp_path / "run"), result.exception


def test_requests_at_one_time_are_one_save(tmp_path):
    run, answers = Run(tmp_path, signals=()), []
    run.save(1, tree(1)).result()
    asking = [
        threading.Thread(target=lambda: answers.append(checkpoint.request_save(tmp_path, timeout=WITHIN)))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    step = 1
    while any(thread.is_alive() for thread in asking):
        step += 1
        run.after(step, tree(step))
    run.close()
    assert len(answers) == 3
    assert len(checkpoint.steps(tmp_path)) <= 4


def test_a_save_that_fails_is_the_answer(tmp_path, monkeypatch):
    with Training(tmp_path, tolerate=5) as training:
        monkeypatch.setattr(training.run._main, "_refuse_link", lambda _: 1 / 0)
        with pytest.raises(SaveRequestError, match="was not carried out: ZeroDivisionError"):
            checkpoint.request_save(tmp_path, timeout=WITHIN)


def test_a_job_that_does_not_answer_is_named_and_one_that_ends_says_so(tmp_path, monkeypatch):
    run = Run(tmp_path, signals=())
    run.save(1, tree(1)).result()
    with pytest.raises(TimeoutError, match=r"no answer after 0\.1 s from the job .* \(process \d+ on .*\)"):
        checkpoint.request_save(tmp_path, timeout=0.1)
    answer_to, waits, asked = requests._answer_to, threading.Event(), []
    monkeypatch.setattr(requests, "_answer_to", lambda *given: waits.set() or answer_to(*given))
    thread = threading.Thread(target=lambda: asked.append(refused(tmp_path)))
    thread.start()
    assert waits.wait(WITHIN)
    run.close()
    thread.join(WITHIN)
    assert "the job has ended without another step" in asked[0]


def test_a_request_to_a_job_that_another_has_replaced_is_an_error(tmp_path):
    with Run(tmp_path, signals=()) as run:
        run.save(1, tree(1))
    claim = json.loads((tmp_path / "run.json").read_text())
    request = {"id": "a", "job": "another", "since": ""}
    (tmp_path / "request.json").write_text(json.dumps(request))
    with Run(tmp_path, signals=()) as run:
        run.resume()
        run.after(2, tree(2))
    assert json.loads((tmp_path / "request.json").read_text()) == request
    assert claim["id"] != "another"


def test_a_directory_without_a_job_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"has no run\.json: no job has saved a run there"):
        checkpoint.request_save(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"id": 3}', "\xff"])
def test_a_request_that_cannot_be_read_is_no_request(tmp_path, text):
    (tmp_path / "request.json").write_text(text)
    with Run(tmp_path, signals=()) as run:
        for number in range(1, 5):
            run.after(number, tree(number))
    assert checkpoint.steps(tmp_path) == ()


# ------------------------------------------------------------------------------------ several processes


class Shared(Board):
    """The keys of two processes, which threads play. A process does not see the keys that end with `hidden`."""

    count = 2

    def __init__(self, keys, number, hidden):
        self._keys, self.number, self.hidden, self.waits = keys, number, hidden, threading.Event()

    def look(self, key):
        if key.endswith(self.hidden):
            self.waits.set()
            return None
        return super().look(key)

    def all_below(self, start):
        if start.endswith(self.hidden):
            self.waits.set()
            return []
        return super().all_below(start)


@pytest.mark.parametrize(("ends", "hidden"), [(1, "freeze"), (1, "step"), (0, "ready/"), (0, "at/")])
def test_a_process_whose_run_ends_while_they_agree_does_not_stop_the_others(tmp_path, ends, hidden):
    keys, both = {}, [Requests(store_at(tmp_path), "job") for _ in range(2)]
    for number, one in enumerate(both):
        one._board = Shared(keys, number, hidden if number == ends else "none")
        one.reached(5 + ends - number)
        one.watch()
    both[0].ask()
    assert both[ends]._board.waits.wait(WITHIN)
    both[ends].close()
    other = threading.Thread(target=lambda: [both[1 - ends].reached(step) for step in (6, 7)], daemon=True)
    other.start()
    other.join(WITHIN)
    assert not other.is_alive()
    both[1 - ends].close()


def test_a_save_that_the_program_asks_for_counts_as_a_step(tmp_path, monkeypatch):
    steps = []
    with Run(tmp_path, signals=()) as run:
        monkeypatch.setattr(run._requests, "reached", steps.append)
        run.save(1, tree(1))
    assert steps == [1]


def test_a_run_that_is_collected_ends_its_thread(tmp_path):
    run = Run(tmp_path, signals=())
    run.save(1, tree(1)).result()
    thread = run._requests._thread
    del run
    thread.join(WITHIN)
    assert not thread.is_alive()
