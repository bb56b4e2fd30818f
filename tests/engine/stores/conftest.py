"""What must not change, at the other end of links and mounts."""

import subprocess

import pytest

from eformer.checkpoint import SaveOptions, save
from support.hub import Hub
from support.links import HEX, TREE, contents, foreign_array


@pytest.fixture
def outside(tmp_path):
    """What must not change: arrays of others, checkpoints of ours, and files that are called like parts of them."""
    path = tmp_path / "outside"
    foreign_array(path / "w")
    foreign_array(path / "unlisted")
    save(TREE, path / "ours", format="tensorstore", prefix="m")
    save(TREE, path / "database", format="tensorstore", options=SaveOptions(ocdbt=True))
    save(TREE, path / "plain")
    (path / "d").mkdir()
    for name in (
        "0",
        "17",
        "1.2",
        ".zarray",
        ".eformer",
        "manifest.ocdbt",
        HEX,
        f"d/{HEX}",
        f"ours/{HEX}",
        "ours/0",
    ):
        (path / name).write_bytes(b"")
    return path


@pytest.fixture
def unchanged(outside):
    """Fails if something outside has changed by the end of the test."""
    before = contents(outside)
    yield outside
    assert contents(outside) == before


def can_mount(folder):
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    done = subprocess.run(["mount", "--bind", folder / "a", folder / "b"], capture_output=True)
    return done.returncode == 0 and not subprocess.run(["umount", folder / "b"]).returncode


@pytest.fixture
def mounted(tmp_path_factory):
    """Mounts the outside at a path; a bind mount has the device of what it is a part of."""
    if not can_mount(tmp_path_factory.mktemp("try")):
        pytest.skip("only root may mount")
    places = []

    def mount(what, where):
        if what.is_dir():
            where.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", what, where], check=True)
        places.append(where)

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A double of the Hugging Face Hub, to which huggingface_hub talks."""
    library = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = Hub()
    hub.start()
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield hub
    hub.stop()
    library.close_session()
