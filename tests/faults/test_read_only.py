"""A user without permission to write reads everything, and hears from all other calls which calls only read."""

import os
import tempfile
from contextlib import nullcontext

import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import Run, save
from support import programs
from support.object_server import credentials, serving

AS_USER = """
import os, sys
import numpy as np
from eformer import checkpoint
from eformer.checkpoint import Run, save
from faults.test_read_only import READING, WRITING, make
make(sys.argv[2]), os.chmod(sys.argv[2], 0o755)
for calls in (READING, WRITING):
    for call in calls.values():
        call(sys.argv[2])  # all imports
make(sys.argv[1])
for folder, _, names in os.walk(sys.argv[1]):
    [os.chmod(os.path.join(folder, name), 0o444) for name in names]
    os.chmod(folder, 0o555)
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
for name, call in READING.items():
    call(sys.argv[1])
for name, call in WRITING.items():
    try:
        call(sys.argv[1])
    except PermissionError as error:
        assert "load, open, inspect, verify, diff, steps" in str(error), (name, error)
        assert sys.argv[1] in str(error), (name, error)
    else:
        raise AssertionError(name)
"""


def make(place):
    for step in (1, 2):
        save({"w": np.full(3, step)}, f"{place}/step-{step}")


def resume(place):
    with Run(place, every=1) as run:
        run.resume()
        run.after(run.step + 1, {"w": np.ones(3)})


def read_all(place):
    with checkpoint.open(f"{place}/step-1") as view:
        assert view["w"][0] == 1


READING = {
    "load": lambda place: checkpoint.load(place),
    "load a step": lambda place: checkpoint.load(f"{place}/step-1"),
    "open": read_all,
    "inspect": lambda place: checkpoint.inspect(f"{place}/step-1"),
    "abstract": lambda place: checkpoint.abstract(place),
    "verify": lambda place: checkpoint.verify(f"{place}/step-1"),
    "diff": lambda place: checkpoint.diff(f"{place}/step-1", f"{place}/step-2"),
    "steps": lambda place: checkpoint.steps(place),
    "latest": lambda place: checkpoint.latest(place),
    "report": lambda place: checkpoint.report(place),
    "a plan of prune": lambda place: checkpoint.prune(place, keep=1, dry_run=True),
}
WRITING = {
    "save": lambda place: save({"w": np.ones(3)}, f"{place}/step-2"),
    "save arrays": lambda place: save({"w": np.ones(3)}, f"{place}/arrays", format="zarr"),
    "save a file": lambda place: save({"w": np.ones(3)}, f"{place}/model.safetensors"),
    "save_async": lambda place: checkpoint.save_async({"w": np.ones(3)}, f"{place}/step-2").result(),
    "score": lambda place: checkpoint.score(place, 2, {"loss": 1.0}),
    "prune": lambda place: checkpoint.prune(place, keep=1),
    "run": resume,
}


def test_another_user_reads_a_run_and_hears_which_calls_only_read():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        done = programs.run(AS_USER, f"{folder}/run", f"{folder}/warm")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def bucket():
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in credentials().items():
            patch.setenv(f"AWS_{name.upper()}", value)
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        make("s3://bucket/run")
        server.is_read_only = True
        yield "s3://bucket/run"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_a_bucket_that_may_only_be_read_says_so_to_calls_that_write(bucket, name):
    text = "permission denied: .*; load, open, inspect, verify, diff, steps"
    with pytest.raises(PermissionError, match=text) if name in WRITING else nullcontext():
        {**READING, **WRITING}[name](bucket)
