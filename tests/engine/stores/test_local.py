"""Files appear whole and durable, or not at all: with real processes, real limits and real kills."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest

from contracts.store import SweptContract
from eformer._engine.stores import durable, new_files
from eformer._engine.stores.base import publish
from eformer._engine.stores.durable import replacing
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload


def write(path, data):
    with replacing(path) as file:
        file.write(data)


def is_directory(fd):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def let_directory_sync_fail(monkeypatch, code):
    fsync = os.fsync

    def fail(fd):
        if is_directory(fd):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(durable.os, "fsync", fail)


def test_a_file_appears_with_its_parents(tmp_path):
    path = tmp_path / "a" / "b" / "state"
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["state"]


def test_nothing_is_visible_before_the_end_and_everything_after(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_no_trace(tmp_path, error):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_new_file_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    swept, lock = [], durable.lock

    def lock_late(descriptor):
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        lock(descriptor)

    monkeypatch.setattr(durable, "lock", lock_late)
    with replacing(tmp_path / "state") as file:
        file.write(b"new")
    assert (tmp_path / "state").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


def test_data_is_synced_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    events, sizes = [], []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd):
        kind = "directory" if is_directory(fd) else "data"
        events.append(f"sync {kind}")
        sizes.extend([os.fstat(fd).st_size] if kind == "data" else [])
        fsync(fd)

    def spy_rename(source, target, **kwargs):
        events.append("rename")
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    write(tmp_path / "state", b"x")
    assert events == ["sync data", "rename", "sync directory"]
    assert sizes == [1]  # all of it had left Python's buffers
    events.clear()
    write(tmp_path / "new" / "state", b"x")
    assert events == ["sync directory", "sync data", "rename", "sync directory"]


def test_permissions_stay(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o7777 == 0o640


@pytest.mark.parametrize("mode", [0o4777, 0o2777, 0o1777])
def test_what_makes_programs_run_as_their_owner_is_not_kept(tmp_path, mode):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(mode)
    write(path, b"new")
    assert path.stat().st_mode & 0o7777 == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_permissions_of_somebody_elses_file_are_not_kept(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(0o666)
    os.chown(path, 65534, 65534)
    write(path, b"new")
    assert path.stat().st_uid == 0
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write(link, b"new")
    assert target.read_bytes() == b"old"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_a_private_file_is_private_while_it_is_written(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing(path) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["x" * 255, "模" * 85, "🙂" * 60])
def test_names_as_long_as_the_file_system_allows(tmp_path, name):
    write(tmp_path / name, b"new")
    assert (tmp_path / name).read_bytes() == b"new"


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(OSError, match="Not a regular file"):
            write(tmp_path / name, b"x")


def test_a_directory_that_cannot_be_synced_for_real_is_a_failure(tmp_path, monkeypatch):
    let_directory_sync_fail(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "state", b"x")


def test_no_descriptor_stays_open(tmp_path):
    before = len(os.listdir("/dev/fd"))
    for i in range(5):
        write(tmp_path / str(i) / "state", b"x")
    assert len(os.listdir("/dev/fd")) == before


def test_a_new_file_gets_the_usual_permissions(tmp_path):
    write(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_system_that_cannot_sync_directories_is_no_failure(tmp_path, monkeypatch):
    let_directory_sync_fail(monkeypatch, errno.EINVAL)
    write(tmp_path / "state", b"x")
    assert (tmp_path / "state").read_bytes() == b"x"


def test_writers_in_many_threads_each_leave_a_whole_file(tmp_path):
    path = tmp_path / "state"
    contents = [bytes([i]) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=write, args=(path, c)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["state"]


SAVE_AGAIN = """
import resource, signal, sys
import numpy as np
from eformer.pytree._serialization import save_to_file
if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
print("go", flush=True)
while True:
    save_to_file({"generation": 2, "w": np.full(2**20, 2.0)}, sys.argv[1])
"""


def start_saving(path, how):
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_AGAIN, str(path), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "go\n"
    return process


def test_a_full_disk_keeps_the_old_file_and_leaves_no_trace(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    _, errors = start_saving(path, "full").communicate(timeout=60)
    assert "File too large" in errors
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("wait", [0.0, 0.004, 0.011, 0.023, 0.047])
@pytest.mark.sample(2)
def test_a_killed_writer_leaves_a_whole_file(tmp_path, wait):
    from eformer.pytree._serialization import load_from_file, save_to_file

    path = tmp_path / "state"
    save_to_file({"generation": 1, "w": [1.0] * 9}, path)
    process = start_saving(path, "kill")
    threading.Event().wait(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    state = load_from_file(None, path)
    assert state["generation"] in (1, 2)
    assert state["generation"] == 1 or (state["w"] == 2.0).all()


def test_small_files_of_directories_in_any_order(tmp_path):
    names = [
        "a/b/1",
        "a/b/2",
        "ab/3",
        "a/4",
        "a/b/c/5",
        "6",
        "x/y/z/7",
        "x/8",
        "a/b/9",
        f"{'d/' * 30}10",
        "d/d/11",
    ]
    with closing(LocalUpload(tmp_path)) as upload:
        upload.put([(name, name.encode()) for name in names[:5]])
        upload.put([(name, name.encode()) for name in names[5:]])
        upload.sync()
        publish(upload, upload.names())
    assert {name: (tmp_path / name).read_bytes() for name in names} == {n: n.encode() for n in names}


# --------------------------------------------------------------------------------- past the page cache


@pytest.fixture
def passing(tmp_path, monkeypatch):
    monkeypatch.setattr(new_files, "_WARM_PART", 0)
    upload = LocalUpload(tmp_path)
    upload.nbytes = 2**30
    yield upload.create("file", 0)
    upload.close()


def written(tmp_path):
    (scratch,) = tmp_path.iterdir()
    return (scratch / "data" / "file").read_bytes()


def test_what_passes_the_page_cache_by_is_all_there(passing, tmp_path):
    data = np.random.default_rng(0).bytes(2**20 + 7)
    passing.write(data, 5)
    passing.write(b"small", 0)
    assert written(tmp_path) == b"small" + data


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_do_without_the_page_cache_uses_it(
    passing, tmp_path, monkeypatch, caplog, code
):
    calls = []

    def refuse(*arguments):
        calls.append(arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    with caplog.at_level("DEBUG", "eformer"):
        passing.write(bytes(2**20), 0)
        passing.write(bytes(2**20), 2**20)
    assert written(tmp_path) == bytes(2**21)
    assert len(calls) == 1
    assert "cannot write past the page cache" in caplog.text


def test_a_full_disk_is_an_error_all_the_same(passing, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(OSError, match="No space left"):
        passing.write(bytes(2**20), 0)


def test_a_write_that_ends_early_goes_on(passing, tmp_path, monkeypatch):
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda d, b, o, f: whole(d, [memoryview(b[0])[:1000]], o, 0))
    data = np.random.default_rng(0).bytes(2**20)
    passing.write(data, 0)
    assert written(tmp_path) == data


# ----------------------------------------------------------------------------------------------- store


class TestStore(SweptContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path)


def test_files_that_are_held_stay_open_when_another_is_gone(tmp_path):
    """Other threads may be reading them: their descriptors must not be closed, nor become those of other files."""
    (tmp_path / "a").write_bytes(b"held")
    with closing(LocalStore(tmp_path).open(["a", "b"])) as files:
        files.hold([0])
        with pytest.raises(FileNotFoundError):
            files.hold([0, 1])
        (tmp_path / "a").unlink()
        memory = bytearray(4)
        files.read_into(0, memoryview(memory), 0)
    assert memory == b"held"
