"""Progress bars, and that nothing depends on them."""

import os
import pty
import subprocess
import sys

import numpy as np
import pytest
from jupyter_client.manager import start_new_kernel

from eformer.checkpoint import load, save

_SAVE = """
import sys, numpy as np
from eformer.checkpoint import load, save
save({"w": np.arange(10**6)}, sys.argv[1], progress=True)
assert load(sys.argv[1], callback=lambda a, n: (print("loaded", n), a)[1], progress=True)["w"][-1] == 999_999
print("done")
"""


def test_a_notebook_has_a_live_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's home need be writable
    manager, client = start_new_kernel()
    try:
        shown = []

        def see(message):
            if message["msg_type"] in ("display_data", "update_display_data"):
                shown.append(message["content"]["data"]["text/html"])

        code = _SAVE.replace("sys.argv[1]", repr(str(tmp_path / "c")))
        reply = client.execute_interactive(code, output_hook=see, timeout=120)
        assert reply["content"]["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert shown[0].startswith("saving <progress")
    assert any('value="8000000" max="8000000"' in text and "8 MB of 8 MB" in text for text in shown)
    assert shown[-1].startswith("loading <progress")


def ends(path, stdout, stderr):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", _SAVE, path]
    return subprocess.run(command, stdout=stdout, stderr=stderr, timeout=120, env=environment).returncode


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_errors_of_a_bar_are_ignored(tmp_path):
    with open("/dev/full", "w") as full:
        assert ends(tmp_path / "a", subprocess.DEVNULL, full) == 0
    read, write = os.pipe()
    os.close(read)  # nobody listens
    with os.fdopen(write, "w") as broken:
        assert ends(tmp_path / "b", subprocess.DEVNULL, broken) == 0
    assert load(tmp_path / "b")["w"][-1] == 999_999


def test_a_bar_does_not_redirect_piped_output(tmp_path):
    master, terminal = pty.openpty()
    with open(tmp_path / "printed", "w") as printed:
        assert ends(tmp_path / "c", printed, terminal) == 0
    os.close(terminal)
    assert (tmp_path / "printed").read_text() == "loaded w\ndone\n"
    assert b"saving" in os.read(master, 100_000)
    os.close(master)


@pytest.mark.parametrize("progress", [1, "yes", 0, []])
def test_an_invalid_progress_is_refused_before_anything_is_done(tmp_path, progress):
    with pytest.raises(TypeError, match="expected True for a bar, or a function"):
        save({"w": 1}, tmp_path / "c", progress=progress)
    assert not (tmp_path / "c").exists()


def test_a_bool_of_numpy_is_a_bool(tmp_path):
    save({"w": 1}, tmp_path / "c", progress=np.False_)
    assert load(tmp_path / "c", progress=np.False_) == {"w": 1}
