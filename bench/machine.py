"""On what was measured: processor, memory, kernel, file system, versions. No names of hosts or of directories."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = {
    "own": ("eformer-checkpoint", "jax", "jaxlib", "numpy", "tensorstore"),
    "peers": ("orbax-checkpoint", "safetensors", "flax", "equinox", "jax", "numpy", "tensorstore"),
    "original": ("eformer", "jax", "numpy", "tensorstore"),
}


def describe(directory: Path, pythons: Mapping[str, str]) -> dict[str, Any]:
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": {
            "cpu": field("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory GB": round(int(field("/proc/meminfo", "MemTotal").split()[0]) / 1e6, 1),
            "kernel": platform.release(),
            "huge pages": content("/sys/kernel/mm/transparent_hugepage/enabled"),
            "load before": round(os.getloadavg()[0], 2),
            **file_system(directory),
        },
        "versions": {name: versions(python, *PACKAGES[name]) for name, python in pythons.items()},
    }


def field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in content(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "unknown")


def content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def file_system(directory: Path) -> dict[str, str]:
    """The type and the options of the mount that the directory is on."""
    best = ("", "unknown", "unknown")
    for line in content("/proc/self/mounts").splitlines():
        _, point, kind, options, *_ = line.split()
        if directory.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, options)
    return {"file system": best[1], "mount options": best[2]}


def versions(python: str, *packages: str) -> dict[str, str]:
    code = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = "missing"
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
