"""What the wheel and the sdist contain, and what their metadata say. `check.py` installs them."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from eformer import __version__

ROOT = Path(__file__).parents[2]
MODULES = Path(sys.modules["eformer"].__file__).parent
INFO = f"eformer_checkpoint-{__version__}.dist-info"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel and the sdist, built by the backend alone, which needs no network."""
    folder = tmp_path_factory.mktemp("dist")
    code = f"from hatchling.build import *; build_wheel({str(folder)!r}); build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return message_from_bytes(wheel.read(f"{INFO}/METADATA"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    source = {
        f"eformer/{path.relative_to(MODULES)}"
        for path in MODULES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {
        f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert set(wheel.namelist()) == source | about
    assert "eformer/py.typed" in source


def test_the_sdist_has_what_its_makefile_needs(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "Makefile",
        "constraints.txt",
        "LICENSE",
        "CITATION.cff",
        "tests/conftest.py",
        "faults/run.py",
    ):
        assert name in names
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        tracked = {name for name in listed.split("\0") if name and not name.startswith(".ci/")}
        assert {name for name in tracked if (ROOT / name).exists()} <= names


def test_the_metadata_names_python_the_licence_and_the_command(wheel, metadata):
    assert metadata["Name"] == "eformer-checkpoint"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# eformer")
    versions = [
        name.rpartition(" ")[2] for name in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", name)
    ]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    assert b"eformer = eformer.cli.commands:main" in wheel.read(f"{INFO}/entry_points.txt")


def test_nothing_is_required_twice(metadata):
    required = metadata.get_all("Requires-Dist")
    plain = {name_of(line) for line in required if "extra ==" not in line}
    extra = {name_of(line) for line in required if "extra ==" in line and not re.search("'(dev|docs)'", line)}
    needed = {"click", "jax", "ml-dtypes", "msgspec", "numpy", "obstore", "rich", "tensorstore"}
    assert plain == needed | {"xxhash", "zstandard"}
    assert extra == {"cryptography", "h5py", "huggingface-hub"}


def test_messages_and_pages_name_this_distribution_and_extras_that_it_has(metadata):
    places = [*MODULES.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    text = "\n".join(path.read_text("utf-8") for path in places)
    named = set(re.findall(r"pip install '(eformer[\w-]*|\.)\[([\w{}]+)\]'", text))
    assert {name for name, _ in named} == {metadata["Name"], "."}  # in a clone it is "."
    assert {extra for _, extra in named} <= {*metadata.get_all("Provides-Extra"), "{extra}"}


def name_of(line):
    return re.match(r"[\w-]+", line)[0]


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    found = dict(re.findall(r"^([\w-]+): +(.+)$", text, re.MULTILINE))
    assert found["version"] == __version__
    assert found["license"] == "Apache-2.0"
    assert found["cff-version"] == "1.2.0"
    assert re.search(r"^authors:\n  - name: ", text, re.MULTILINE)


def test_the_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
