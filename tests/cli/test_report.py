"""`eformer report`."""

import json
import os
import subprocess

import numpy as np
import pytest

from eformer.checkpoint import Run, save
from support.commands import EFORMER
from support.commands import run as command
from support.damage import flip
from support.programs import on_terminal


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save({"w": np.full(4, step, "f4")}, tmp_path / f"step-{step}")
    return tmp_path


def test_the_page_is_named_after_the_checkpoint(there):
    assert "step-1-report.html" in command("report", "step-1").stdout
    assert "<!doctype html>" in (there / "step-1-report.html").read_text()


def test_open_opens_the_page_in_the_browser_of_the_environment(there):
    browser = there / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {there}/opened\n")
    browser.chmod(0o755)
    assert "no browser" not in command("report", "step-1", "--open", BROWSER=f"{browser} %s").stdout
    assert (there / "opened").read_text() == f"file://{there}/step-1-report.html\n"


def test_open_prints_the_path_where_there_is_no_browser(there):
    nowhere = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    shown = command("report", "step-1", "--open", **nowhere).stdout
    assert f"no browser found; open {there}/step-1-report.html" in " ".join(shown.split())
    assert "--open needs a file" in command("report", "step-1", "--open", "--json", code=2).stderr


def test_output_goes_where_it_is_said(there):
    command("report", "step-2", "--against", "step-1", "-o", there / "deep" / "page.html")
    assert "step-1" in (there / "deep" / "page.html").read_text()
    assert command("report", "step-1", "-o", "-", "--no-values").stdout.startswith("<!doctype html>")


def test_a_file_that_is_not_a_report_is_not_replaced(there):
    (there / "notes.html").write_text("mine")
    assert "is not a report" in command("report", "step-1", "-o", "notes.html", code=1).stderr
    assert (there / "notes.html").read_text() == "mine"


def test_a_directory_or_a_pipe_is_refused_before_anything_is_read(there):
    os.mkfifo(there / "pipe")
    assert "pipe exists and is not a report" in command("report", "step-1", "-o", "pipe", code=1).stderr
    assert "step-2 is a directory" in command("report", "nothing", "-o", "step-2", code=1).stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_of_one_line_also_with_json(there):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [EFORMER, "report", "step-1", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_a_leaf_that_became_nan_is_a_warning(there):
    save({"w": np.full(4, np.nan, "f4")}, there / "step-3")
    done = command("report", "step-3", "--against", "step-2")
    assert "1 leaf became NaN or Inf: w" in done.stderr
    assert "became" not in command("report", "step-2", "--against", "step-1").stderr
    assert "step-3: 1 leaf became NaN or Inf" in command("report", there).stderr


def test_json_has_what_the_page_shows(there):
    found = json.loads(command("report", "step-2", "--against", "step-1", "--json").stdout)
    assert found["against"]["largest"][0]["relative"] == 1.0


def test_a_run_has_a_page_and_so_has_each_step(there):
    found = json.loads(command("report", there, "--keep", 1, "--json").stdout)
    assert [step["is_removed"] for step in found["run"]["steps"]] == [True, False]
    assert json.loads(command("report", there, "--step", 1, "--json").stdout)["kind"] == "checkpoint"


def test_nothing_there_is_an_error(there):
    assert "no checkpoint at" in command("report", "nothing", code=1).stderr
    assert not list(there.glob("*.html"))


@pytest.mark.parametrize("how", [[], ["-o", "-"], ["--json"]])
def test_damage_is_a_warning_and_the_exit_code_of_verify(there, how):
    flip(there / "step-1" / "model.safetensors", -1)
    done = command("report", "step-1", *how, code=1)
    assert done.stderr.startswith("warning: step-1: 1 damaged array: leaf 'w': bytes ")
    assert done.stdout
    assert how or "rows in red" in (there / "step-1-report.html").read_text()
    command("verify", "step-1", code=1)


def test_a_missing_file_is_damage_even_if_no_values_are_read(there):
    (there / "step-1" / "model.safetensors").unlink()
    warning = command("report", "step-1", "--no-values", code=1).stderr
    assert warning.startswith("warning: step-1: the tree cannot be read as a whole: ")
    assert (there / "step-1-report.html").exists()


def test_damaged_steps_of_a_run_are_named(there):
    (there / "step-1" / "model.safetensors").unlink()
    warning = command("report", ".", "-o", "run.html", code=1).stderr
    assert "1 damaged step: step-1: " in warning
    assert "damaged" not in command("report", "step-2").stderr


def test_a_page_for_a_closed_standard_output_is_an_error(there):
    done = subprocess.run(f"{EFORMER} report step-1 -o - >&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output is closed: the page has nowhere to go\n",
    )


def test_the_bar_of_a_run_counts_steps(there):
    shown, _ = on_terminal("report", there, columns=120)
    assert "1 of 1 steps" in shown
    assert "bytes" not in shown


def test_a_run_without_steps_says_so(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        run.resume(like={"w": 0})
    (tmp_path / "empty").mkdir()
    for name in ("run", "empty"):
        message = command("report", tmp_path / name, code=1).stderr
        assert "the run has no step yet. Wait for its first save" in message
