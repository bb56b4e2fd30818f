"""A save takes nothing away that is not its own, whatever goes wrong, and leaves nothing behind."""

import errno
import hashlib
import os
import stat
import tempfile

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eformer import checkpoint
from eformer._engine.record.manifest import Manifest
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import start
from eformer._engine.stores.bucket import BucketUpload
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, load, save
from support import programs
from support.buckets import forget
from support.hosts import Crew
from support.links import foreign_array
from support.trees import assert_same

TREE, NEXT = {"w": np.arange(5.0)}, {"w": np.arange(7.0)}


# ------------------------------------------------------------------------------------------- replacing


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_link_stays_if_the_file_cannot_take_its_place(tmp_path, monkeypatch, error):
    save(TREE, tmp_path / "real" / "m.safetensors")
    (tmp_path / "m.safetensors").symlink_to("real/m.safetensors")

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "rename", fail)
        with pytest.raises(type(error)):
            save(NEXT, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").is_symlink()
    assert_same(load(tmp_path / "m.safetensors"), TREE)
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "real"]


def test_a_file_of_another_program_under_an_old_name_stays(tmp_path):
    save(TREE, tmp_path)
    save_file({"mine": np.ones(3)}, tmp_path / "model.safetensors")
    save(NEXT, tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), {"mine": np.ones(3)})
    assert_same(load(tmp_path), NEXT)


def test_a_manifest_that_names_other_files_does_not_have_them_removed(tmp_path):
    save(TREE, tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    manifest = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "")
    (file,) = manifest.trees[""].files
    forged = tuple(msgspec.structs.replace(file, name=name) for name in ("precious.txt", "manifest.json"))
    tree = msgspec.structs.replace(manifest.trees[""], files=(file, *forged))
    (tmp_path / "manifest.json").write_bytes(manifest.with_tree("", tree).to_json())
    save(NEXT, tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert_same(load(tmp_path), NEXT)


def test_an_index_for_other_readers_takes_the_place_of_a_link(tmp_path):
    save(TREE, tmp_path)
    (tmp_path / "other.json").write_text('{"weight_map": {}}')
    (tmp_path / "model.safetensors.index.json").symlink_to("other.json")
    save(NEXT, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").is_symlink()
    assert (tmp_path / "other.json").read_text() == '{"weight_map": {}}'


def test_an_array_that_cannot_be_read_is_not_forgotten(tmp_path, monkeypatch):
    foreign_array(tmp_path / "v")
    foreign_array(tmp_path / "w")
    kept = LocalStore.read

    def fail(store, name, *how):
        if name == "v/.zarray":
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return kept(store, name, *how)

    monkeypatch.setattr(LocalStore, "read", fail)
    with pytest.raises(PermissionError):
        save(TREE, tmp_path, prefix="p", format="tensorstore")
    assert sorted(os.listdir(tmp_path)) == ["v", "w"]


# ----------------------------------------------------------------------------------------- permissions


def test_a_private_file_is_replaced_by_one_that_was_private_from_the_beginning(tmp_path, monkeypatch):
    path, seen = tmp_path / "m.safetensors", []
    save(TREE, path)
    path.chmod(0o600)
    write = os.pwrite

    def look(descriptor, *how):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return write(descriptor, *how)

    monkeypatch.setattr(os, "pwrite", look)
    save(NEXT, path)
    assert seen
    assert set(seen) == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


AS_USER = """
import os, sys
import numpy as np
from eformer.checkpoint import load, save
save({"w": np.ones(3)}, sys.argv[1] + "/warm/m.safetensors"), load(sys.argv[1] + "/warm/m.safetensors")  # all imports
os.mkdir(sys.argv[1] + "/d")
os.umask(int(sys.argv[4], 8))
if os.geteuid() == 0:
    os.chown(sys.argv[1] + "/d", 65534, 65534), os.setgid(65534), os.setuid(65534)
os.chmod(sys.argv[1] + "/d", int(sys.argv[3], 8))
for number in range(2):
    save({"w": np.full(3, number)}, sys.argv[1] + "/" + sys.argv[2])
os.chmod(sys.argv[1] + "/d", 0o700)
assert load(sys.argv[1] + "/" + sys.argv[2])["w"][0] == 1
"""


@pytest.mark.parametrize(
    ("name", "mode", "umask"),
    [("d", "755", "0177"), ("d/m.safetensors", "755", "0177"), ("d/m.safetensors", "300", "0022")],
    ids=["directory", "file", "file where nothing can be listed"],
)
def test_an_ordinary_user_may_save_wherever_files_may_be_created(name, mode, umask):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        done = programs.run(AS_USER, folder, name, mode, umask)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ litter


def test_a_database_that_cannot_be_opened_leaves_nothing(tmp_path):
    before = len(os.listdir("/dev/fd"))
    where = os.fsencode(tmp_path) + b"/\xff"
    for _ in range(3):
        with pytest.raises(ValueError, match="UTF-8"):
            save(TREE, os.fsdecode(where), format="tensorstore", options=SaveOptions(ocdbt=True))
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/dev/fd")) == before


def test_small_arrays_are_written_a_little_at_a_time(tmp_path, monkeypatch):
    sizes, put = [], LocalUpload.put

    def watched(upload, files):
        sizes.append(sum(len(data) for _, data in files))
        put(upload, files)

    monkeypatch.setattr(LocalUpload, "put", watched)
    tree = {str(i): np.full(2**16, i) for i in range(32)}  # half a mebibyte each
    save(tree, tmp_path, format="tensorstore")
    assert len(sizes) >= 16
    assert max(sizes) <= 2**20 + 2**12
    assert_same(load(tmp_path), tree)


def test_a_directory_may_be_called_like_a_suffix(tmp_path):
    save(TREE, tmp_path / ".safetensors")
    assert (tmp_path / ".safetensors" / "manifest.json").exists()
    assert_same(load(tmp_path / ".safetensors"), TREE)


# ------------------------------------------------------------------------------------- used again, in memory

BASE = {"base": {"w": np.arange(5000.0)}, "head": {"v": np.zeros(3)}}
CHANGED = {**BASE, "head": {"v": np.ones(3)}}


def test_a_failed_save_does_not_take_away_what_it_would_have_used_again(monkeypatch):
    url = "memory://held-promises/failed"
    save(BASE, url, options=SaveOptions(reuse=True))

    def fail(*_):
        raise OSError(errno.EIO, "the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(BucketUpload, "swap", fail)
        with pytest.raises(OSError, match="network"):
            save(CHANGED, url, options=SaveOptions(reuse=True))
    assert_same(load(url), BASE)
    assert checkpoint.verify(url).ok


def test_a_dead_save_does_not_take_away_what_it_would_have_used_again(monkeypatch):
    url = "memory://held-promises/dead"
    save(BASE, url, options=SaveOptions(reuse=True))
    with monkeypatch.context() as patch:
        patch.setattr(BucketUpload, "swap", lambda *_: 1 / 0)
        patch.setattr(BucketUpload, "_withdraw", lambda upload: None)
        patch.setattr(BucketUpload, "close", BucketUpload.abandon)
        with pytest.raises(ZeroDivisionError):
            save(CHANGED, url, options=SaveOptions(reuse=True))
    save(TREE, url, prefix="other")
    assert_same(load(url, prefix=""), BASE)


def test_a_save_is_not_harmed_by_a_checkpoint_that_vanishes_while_it_is_used_again(monkeypatch):
    old, new = "memory://held-promises/old", "memory://held-promises/new"
    save(BASE, old, options=SaveOptions(reuse=True))
    link = BucketUpload.link

    def vanish(upload, *how):
        forget(f"{old}/x")
        return link(upload, *how)

    monkeypatch.setattr(BucketUpload, "link", vanish)
    save(CHANGED, new, options=SaveOptions(reuse=old))
    assert_same(load(new), CHANGED)


# ----------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_an_array_without_elements_has_its_checksum_too(tmp_path, kind):
    tree, options = {"empty": np.zeros((0, 4)), "w": np.ones(3)}, SaveOptions(checksums=True)
    outcomes = Crew(2).run(
        lambda host: complete(start(tree, tmp_path, format=kind, options=options, hosts=host))
    )
    assert outcomes == [None, None]
    assert checkpoint.open(tmp_path).tree.leaves["empty"].sha256 == hashlib.sha256().hexdigest()
