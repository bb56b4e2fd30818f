"""Build the wheel and the sdist, and use them with every Python that is found. Installs from the package index.

    python tests/package/check.py [--python PATH ...] [--suite PYTHON] [--keep DIRECTORY]

For each interpreter: the wheel alone in a new environment, `smoke.py` in it, then the wheel with all extras, and
`smoke.py` again. For one of them (3.11 if there is one, or --suite): the sdist is unpacked, a wheel is built from it, and
the fast part of the suite runs from there. Exit code 1 if anything failed; a table comes last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = ("hf", "h5", "sign")
FAST = (
    "tests/engine/record",
    "tests/engine/trees",
    "tests/pytree",
    "tests/package",
    "tests/test_public_api.py",
)
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Result:
    """What was tried with which Python, and how it ended."""

    python: str
    what: str
    problem: str
    seconds: float
    note: str = ""


class FailedError(Exception):
    """A command failed; the text is the end of what it printed."""


def main() -> int:
    arguments = _arguments()
    pythons = arguments.python or found_pythons()
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="eformer-package-"))
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    try:
        wheel, sdist = build(folder / "dist")
        for python in pythons:
            results += check_wheel(python, wheel, folder)
        suite = arguments.suite or next(iter(pythons), None)
        if suite:
            results.append(
                attempt(suite, "sdist, suite", lambda: check_sdist(suite, sdist, folder / "suite"))
            )
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    show(results)
    return int(not results or any(result.problem for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", help="an interpreter; all that are found if not given")
    parser.add_argument("--suite", help="the interpreter for the suite")
    parser.add_argument("--keep", help="work in this directory, and leave the environments there")
    return parser.parse_args()


def found_pythons() -> list[str]:
    """Find one interpreter for each version: on the PATH, in pyenv, or in the directories of EFORMER_PYTHONS."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    more = os.environ.get("EFORMER_PYTHONS", "").split(os.pathsep)
    found = []
    for version in VERSIONS:
        places = [*more, *map(str, sorted(pyenv.glob(f"{version}.*/bin"), reverse=True)), os.environ["PATH"]]
        candidates = [shutil.which(f"python{version}", path=place) for place in places]
        if python := next(filter(_works, candidates), None):
            found.append(python)
        else:
            print(f"Python {version}: not found; give its directory in EFORMER_PYTHONS")
    return found


def _works(python: str | None) -> bool:
    command = [str(python), "-c", "import venv, ssl"]
    return python is not None and subprocess.run(command, capture_output=True).returncode == 0


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, in environments of their own."""
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def check_wheel(python: str, wheel: Path, folder: Path) -> list[Result]:
    own = folder / Path(python).name
    results = [attempt(python, "wheel alone", lambda: smoke(environment(python, own, str(wheel))))]
    if not results[0].problem:
        everything = f"{wheel}[{','.join(EXTRAS)}]"
        results.append(attempt(python, "all extras", lambda: smoke(installed(own, everything), *EXTRAS)))
    return results


def check_sdist(python: str, sdist: Path, folder: Path) -> str:
    """Install from the unpacked sdist, and run the fast part of its suite there, as a packager would."""
    folder.mkdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.iterdir())
    own = environment(python, folder / "env", "-c", str(source / "constraints.txt"), f"{source}[dev]")
    printed = run(str(own), "-m", "pytest", "-q", "-n", "2", *FAST, cwd=source)
    return printed.strip().splitlines()[-1].strip("= ")


def environment(python: str, folder: Path, *what: str) -> Path:
    run(python, "-m", "venv", str(folder))
    return installed(folder, *what)


def installed(folder: Path, *what: str) -> Path:
    python = folder / "bin" / "python"
    run(str(python), *PIP, "install", *what)
    run(str(python), *PIP, "check")
    return python


def smoke(python: Path, *extras: str) -> str:
    return run(str(python), "-I", str(SMOKE), *extras).strip().splitlines()[-1]


def attempt(python: str, what: str, work: Callable[[], str]) -> Result:
    began = time.monotonic()
    print(f"{_version(python)}: {what} ...", flush=True)
    note = problem = ""
    try:
        note = work()
    except FailedError as error:
        problem = str(error)
        print(problem)
    return Result(_version(python), what, problem, time.monotonic() - began, note)


def _version(python: str) -> str:
    return run(python, "-c", "import platform; print(platform.python_version())").strip()


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command outside of the checkout, without the settings of the caller's Python."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd or "/", env=own)
    if ended.returncode:
        raise FailedError(
            f"{' '.join(command)}: exit code {ended.returncode}\n{(ended.stdout + ended.stderr)[-4000:]}"
        )
    return ended.stdout


def show(results: list[Result]) -> None:
    print(f"\n{'python':8} {'what':14} {'seconds':>7}  result")
    for result in results:
        outcome = "FAILED" if result.problem else result.note
        print(f"{result.python:8} {result.what:14} {result.seconds:7.0f}  {outcome}")


if __name__ == "__main__":
    sys.exit(main())
