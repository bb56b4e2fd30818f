"""Another package called eformer in the same environment: importing ours says so, and how to repair it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eformer

SOURCE = Path(eformer.__file__).parent
REPAIR = "pip uninstall eformer eformer-checkpoint && pip install eformer-checkpoint"
OTHER = {
    "__init__.py": '__version__ = "0.1.0"\n',
    "paths.py": "",
    "py.typed": "",
    "jaximus/__init__.py": "",
    "serialization/__init__.py": "",
}


@pytest.fixture
def place(tmp_path):
    """A directory that is first on the path, where packages are installed."""
    (tmp_path / "site-packages").mkdir()
    return tmp_path / "site-packages"


def install(place):
    """Write the files of this package, over others, as pip does."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, place / "eformer", ignore=ignore, dirs_exist_ok=True)


def install_other(place):
    for name, text in OTHER.items():
        file = place / "eformer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (place / "eformer-0.0.101.dist-info").mkdir()


def warning_of(code, *places, options=()):
    """Run code with these places at the beginning of the path; return what it printed on standard error."""
    path = os.pathsep.join(map(str, places))
    ended = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


DOORS = "import eformer, eformer.checkpoint, eformer.cli, eformer.paths; from eformer.checkpoint import Every"


def test_ours_over_the_other_says_so_once(place):
    install_other(place)
    install(place)
    found = warning_of(DOORS, place)
    assert found.count("UserWarning") == 1
    assert f"{place}/eformer has files of the package eformer" in found
    assert REPAIR in found
    assert "<string>:1" in found  # where it was imported, not a line of ours


@pytest.mark.parametrize("door", ["eformer.checkpoint", "eformer.cli.commands"])
def test_the_other_over_ours_says_so_where_ours_is_left(place, door):
    install(place)
    install_other(place)
    assert f"{place}/eformer has files of the package eformer" in warning_of(f"import {door}", place)


def test_the_other_behind_ours_is_found(place, tmp_path):
    install(place)
    install_other(tmp_path / "other")
    found = warning_of("import eformer.checkpoint", place, tmp_path / "other")
    assert f"{tmp_path}/other/eformer has files of the package eformer" in found


def test_files_that_went_with_the_other_are_noticed(place):
    install_other(place)
    install(place)
    for name in OTHER:
        (place / "eformer" / name).unlink()
    found = warning_of("import eformer.checkpoint", place, options=["-S"])  # without the package of the tests
    assert f"{place}/eformer has lost files of eformer-checkpoint" in found
    assert REPAIR in found


def test_ours_alone_says_nothing(place):
    install(place)
    (place / "eformer-0.1.0.dist-info").mkdir()  # of an editable install under the former name of ours
    assert warning_of(DOORS, place) == ""
