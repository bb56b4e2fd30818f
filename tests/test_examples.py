"""Every example in the documents does what it says: blocks of Python, blocks of shell, and sessions with their output.

The blocks of a page run one after the other in a directory of their own, with the files and variables that
`support/stages.py` puts there. A comment before a block, `<!-- not run: why -->`, leaves it out, and is counted here.
"""

import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from eformer import checkpoint
from eformer._engine.stores import store_options
from support import commands, ministack, programs
from support.pages import ROOT, blocks, pages
from support.stages import HOLDS, REPLACED, STAGES, Done

# These have tests of their own, section by section: tests/models/test_guide.py, tests/frameworks/test_guide.py.
ELSEWHERE = {"docs/guides/frameworks.md"}
RUN = {"python", "sh"}
NOT_CODE = {"json", "text", "", "{eval-rst}", "{toctree}", "{literalinclude}"}
PAGES = [page for page in pages() if page not in ELSEWHERE]


def to_run(page):
    return [block for block in blocks(page) if (block.language in RUN or block.file) and not block.not_run]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(store_options, "_given", {})
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)  # blocks leave runs open


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
@pytest.mark.usefixtures("alone")
def test_the_blocks_of_a_page_run(page):
    variables = {"__name__": "__main__", **STAGES[page]()}
    try:
        for block in to_run(page):
            text = block.text
            for old, new in REPLACED.get(page, {}).items():
                text = text.replace(old, new)
            run(block, text, variables)
        assert HOLDS.get(page, bool)(variables)
    finally:
        if "run" in variables:
            variables["run"].close()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.usefixtures("alone")
def test_the_first_block_can_be_pasted_into_a_new_interpreter(page):
    first = next(block for block in to_run(page) if block.language == "python")
    run(first, first.text, {"__name__": "__main__"})
    assert Path("run/step-100").is_dir()


@pytest.mark.usefixtures("alone")
def test_the_loop_for_schedulers_ends_with_its_code_and_goes_on_at_the_next_start():
    page = "docs/guides/integrations.md"
    loop, *_ = to_run(page)
    variables = STAGES[page]()
    step = variables["train_step"]

    def last_step(state):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(state)

    with pytest.raises(SystemExit, match="75"):
        run(loop, loop.text, variables | {"train_step": last_step})
    run(loop, loop.text, variables)
    assert [step.number for step in checkpoint.steps("run")] == [1, 1000, 2000, 3000]
    assert checkpoint.load("run")["w"][0] == 3000


@pytest.mark.thorough
@pytest.mark.usefixtures("alone")
def test_reinforcement_learning_that_is_killed_goes_on_bit_for_bit():
    [loop] = [block for block in blocks("docs/guides/recipes.md") if "class Prompts" in block.text]
    for name in ("killed", "whole"):
        Path(f"{name}.py").write_text(loop.text.replace('train("rl", 100)', f'train("{name}", 500)'))
    for least in (1, 250):
        with subprocess.Popen([sys.executable, "killed.py"]) as process:
            wait_for_step("killed", least)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    for name in ("killed", "whole"):
        done = programs.run(Path(f"{name}.py").read_text())
        assert done.returncode == 0, done.stderr
    assert checkpoint.diff("killed", "whole").same
    assert checkpoint.load("whole")["version"] == 500


@pytest.mark.thorough
@pytest.mark.skipif(ministack.program() is None, reason="ministack is not installed")
@pytest.mark.usefixtures("alone")
def test_a_run_resumes_in_a_bucket_on_this_machine(monkeypatch):
    page, port = "docs/guides/buckets.md", str(ministack.free_port())
    [train] = [block for block in blocks("docs/quickstart.md") if block.file == "train.py"]
    Path("train.py").write_text(train.text)
    [block] = [block for block in blocks(page) if "ministack -d" in block.text]
    lines = block.text.replace("4566", port).splitlines()
    assert lines[1] == "~/server-env/bin/pip install ministack"
    programs_of_server = Path("server-env/bin")
    programs_of_server.mkdir(parents=True)
    (programs_of_server / "ministack").symlink_to(ministack.program())
    monkeypatch.setenv("GATEWAY_PORT", port)
    script = "\n".join(["set -eu", "trap '~/server-env/bin/ministack --stop || true' EXIT", *lines[2:]])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "begins at step 0\nbegins at step 100\n" in done.stdout
    assert re.search(r"100 .* resumed from\n +250 .*\n +300 ", done.stdout)


def wait_for_step(path, least):
    deadline = time.monotonic() + 60
    while not Path(path).exists() or all(step.number < least for step in checkpoint.steps(path)):
        assert time.monotonic() < deadline, f"{path} has no step {least}"
        time.sleep(0.005)


def run(block, text, variables):
    if block.file:
        Path(block.file).write_text(text)
    elif block.language == "sh":
        for line in filter(None, text.replace("\\\n", " ").splitlines()):
            run_line(line, f"{block.page}, line {block.line}")
    else:
        with suppress(Done):
            exec(compile("\n" * block.line + text, ROOT / block.page, "exec", dont_inherit=True), variables)


def run_line(line, where):
    """Run a line of shell; a plain command of eformer or a program by a fork of an interpreter, which is faster."""
    words = [os.path.expanduser(word) for word in shlex.split(line, comments=True)]
    may_fail = words[-2:] == ["||", "true"]
    if words and words[0] == "eformer" and not {"|", "||", "&&", ">", ">>"} & set(words):
        commands.run(*words[1:])
    elif words[:1] == ["python"] and words[2:] == (["||", "true"] if may_fail else []):
        done = programs.run(Path(words[1]).read_text("utf-8"))
        assert may_fail or done.returncode == 0, f"{where}: {line}\n{done.stdout}\n{done.stderr}"
    else:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{where}: {line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "pycon" for b in blocks(page))])
def test_the_sessions_of_a_page_show_what_happens(page):
    # Output is wrapped like code, so that a page shows all of it.
    options = doctest.NORMALIZE_WHITESPACE
    assert doctest.testfile(str(ROOT / page), module_relative=False, optionflags=options).failed == 0


def test_every_block_is_of_a_known_kind():
    for page in pages():
        for block in blocks(page):
            assert block.language.partition(" ")[0] in RUN | NOT_CODE | {"pycon"}, (
                f"{page}, line {block.line}: {block.language}"
            )
            is_command = block.text.lstrip().startswith(("eformer ", "$ ", "pip "))
            assert block.language.partition(" ")[0] in RUN or not is_command, (
                f"{page}, line {block.line}: mark it as sh"
            )


def test_few_blocks_are_not_run_and_say_why():
    left_out = [block for page in pages() for block in blocks(page) if block.not_run]
    assert len(left_out) == 22, [f"{block.page}, line {block.line}: {block.not_run}" for block in left_out]
