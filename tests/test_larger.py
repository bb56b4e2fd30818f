"""The Job of the guide runs as pods would run it: a process for each index, on loopback.

Tests of the page: docs/guides/larger-than-a-machine.md.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

from eformer import checkpoint
from support.pages import blocks
from support.processes import _free_port

FILES = {block.file: block.text for block in blocks("docs/guides/larger-than-a-machine.md") if block.file}


def test_the_pods_of_the_indexed_job_verify_together(tmp_path):
    checkpoint.save({"w": np.arange(10**6)}, tmp_path / "run" / "step-9000")
    service, job = yaml.safe_load_all(FILES["verify.yaml"])
    pods, pod = job["spec"]["completions"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert job["spec"]["parallelism"] == pods
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = pod["containers"][0]["command"]
    assert f"{name}-0.{pod['subdomain']}:8476" in words[-1]
    words[-1] = words[-1].replace(f"{name}-0.{pod['subdomain']}:8476", f"127.0.0.1:{_free_port()}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(pods)
    ]
    said = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0] * pods
    assert said == ["run/step-9000: 1 leaf, 8 MB: every digest matches\n", "", "", ""]
