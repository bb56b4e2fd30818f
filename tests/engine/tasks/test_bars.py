"""Progress bars, and that nothing depends on them."""

import os

import numpy as np
import pytest
from jupyter_client.manager import start_new_kernel

from eformer.checkpoint import load, save
from support import programs

_SAVE = """
import sys, numpy as np
from eformer.checkpoint import load, save
save({"w": np.arange(10**6)}, sys.argv[1], progress=True)
assert load(sys.argv[1], callback=lambda a, n: (print("loaded", n), a)[1], progress=True)["w"][-1] == 999_999
print("done")
"""


@pytest.mark.thorough
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


# Nobody reads the standard error, or its disk is full.
_UNREAD = "import os\nread, write = os.pipe()\nos.close(read), os.dup2(write, 2)"
_FULL = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_errors_of_a_bar_are_ignored(tmp_path):
    for name, errors in (("a", _FULL), ("b", _UNREAD)):
        done = programs.run(errors + _SAVE, tmp_path / name)
        assert (done.returncode, done.stdout) == (0, "loaded w\ndone\n")
        assert load(tmp_path / name)["w"][-1] == 999_999


def test_a_bar_does_not_redirect_piped_output(tmp_path):
    printed = tmp_path / "printed"
    shown, code = programs.with_errors_on_terminal(_SAVE, tmp_path / "c", out=printed)
    assert (code, printed.read_text()) == (0, "loaded w\ndone\n"), shown
    assert "saving" in shown


@pytest.mark.parametrize("progress", [1, "yes", 0, []])
def test_an_invalid_progress_is_refused_before_anything_is_done(tmp_path, progress):
    with pytest.raises(TypeError, match="expected True for a bar, or a function"):
        save({"w": 1}, tmp_path / "c", progress=progress)
    assert not (tmp_path / "c").exists()


def test_a_bool_of_numpy_is_a_bool(tmp_path):
    save({"w": 1}, tmp_path / "c", progress=np.False_)
    assert load(tmp_path / "c", progress=np.False_) == {"w": 1}
