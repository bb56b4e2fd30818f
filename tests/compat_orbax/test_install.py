"""The door stands in the place of `orbax.checkpoint` for programs that import it by name, and imports no Orbax."""

import subprocess
import sys

import pytest

from eformer.compat import orbax as ocp

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.args as args
from orbax.checkpoint import checkpoint_managers, type_handlers
from orbax.checkpoint.checkpoint_manager import CheckpointManager
from orbax.checkpoint._src.checkpoint_managers import preservation_policy
from orbax.checkpoint._src.handlers.composite_checkpoint_handler import CompositeCheckpointHandler

with CheckpointManager(sys.argv[1]) as it:
    it.save(0, args=args.StandardSave({"a": np.arange(3)}))
assert (Path(sys.argv[1]) / "0/default/manifest.json").exists()
assert preservation_policy.LatestN is checkpoint_managers.LatestN
assert not any(name.startswith("orbax.checkpoint._src.serialization") for name in sys.modules)
print("done")
"""


def test_an_unchanged_program_runs_with_the_door(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "eformer.compat.orbax",
        str(tmp_path / "program.py"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_install_comes_too_late_after_an_import_of_orbax():
    code = "import orbax.checkpoint\nfrom eformer.compat.orbax import install\ninstall()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "was imported before install()" in done.stderr


def test_every_public_name_is_there_and_orbax_is_not_imported():
    code = "import sys\nfrom eformer.compat import orbax as o\n[getattr(o, n) for n in dir(o)]\nprint(any(m.startswith('orbax') for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n", done.stderr


def test_a_name_that_is_not_covered_says_the_way_around():
    with pytest.raises(AttributeError, match="Run\\(near=\\)"):
        _ = ocp.experimental
    with pytest.raises(AttributeError, match="beside the door"):
        _ = ocp.nonsense
    assert ocp.checkpoint is ocp
    assert ocp.__version__ == ocp.version.__version__
