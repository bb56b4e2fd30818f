"""Without calls of Linux: the promises hold, in a process that starts without them. `make faults` runs the contracts so."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eformer._engine.stores import directory
from eformer._engine.stores.directory import Directory, read_into, set_mode, sync_opened
from eformer._engine.stores.local import LocalStore
from eformer.checkpoint import SaveOptions, load, save, verify

DATABASE = SaveOptions(ocdbt=True)
MASKED = Path(__file__).parents[2] / "support" / "masked"

PROGRAM = """
import os, pathlib, shutil, signal, sys
import require_mask
import numpy as np
from eformer.checkpoint import Run, load, save, verify
from eformer.errors import FormatError

place = pathlib.Path(sys.argv[1])
kinds = ({}, {"format": "zarr"}, {"format": "zarr", "prefix": "ema"})
tree = lambda value: {"a": {"w": np.full(9, value)}, "b": np.arange(4.0)}

for number, how in enumerate(kinds):  # over each other
    path = place / f"kind-{number}"
    for value in (1, 2):
        save(tree(value), path, **how)
    assert load(path, prefix=how.get("prefix"))["a"]["w"][0] == 2
    assert verify(path).ok
print("saved, replaced, loaded and verified")

run = Run(place / "run", keep=2, signals=())
for step in range(4):
    run.save(step, tree(step))
run.close()
assert sorted(os.listdir(place / "run")) == ["run.json", "step-2", "step-3"]
print("kept two steps")

outside = place / "outside"
outside.mkdir()
for number, name in enumerate(("model.safetensors", "a")):
    path = place / f"linked-{number}"
    save(tree(1), path, **kinds[number])
    shutil.move(path / name, outside / name)
    os.symlink(outside / name, path / name)
PRECIOUS = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
for number in (0, 1):
    try:
        load(place / f"linked-{number}")
    except FormatError as error:
        assert "link" in str(error), error
    else:
        raise AssertionError("a link out was followed")
    save(tree(3), place / f"linked-{number}", **kinds[number])
    assert load(place / f"linked-{number}")["a"]["w"][0] == 3
assert {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()} == PRECIOUS
print("refused links, and left their targets")

for number, how in enumerate(kinds[:2]):
    path, at = place / f"killed-{number}", 0
    save(tree(1), path, **how)
    outcomes = set()
    while True:  # at each rename and unlink of the save
        at += 1
        child = os.fork()
        if not child:
            calls = iter(range(1, 10**6))
            def struck(call):
                def strike(*args, **kwargs):
                    if next(calls) == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)
                return strike
            os.rename, os.unlink = struck(os.rename), struck(os.unlink)
            save(tree(2), path, **how)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        outcomes.add(load(path, prefix=how.get("prefix"))["a"]["w"][0])
        save(tree(1), path, **how)
        assert verify(path).ok
        assert not [name for name in os.listdir(path) if name.startswith(".eformer-")]
        if not status:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert outcomes == {1, 2} and at > 3, (outcomes, at)
print("killed, and whole")
"""


def test_the_promises_hold_without_calls_of_linux(tmp_path):
    path = [str(MASKED), *(entry for entry in sys.path if entry)]
    environment = {"EFORMER_MASK": "macos", "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, tmp_path],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "saved, replaced, loaded and verified",
        "kept two steps",
        "refused links, and left their targets",
        "killed, and whole",
    ]


@pytest.fixture
def drive(monkeypatch):
    """Let macOS's command reach a drive, which `answer` stands for; returns what was flushed, by which call."""
    flushed = []

    def full_sync(descriptor, command):
        assert command == 51
        flushed.append("drive")
        if drive.answer:
            raise OSError(drive.answer, os.strerror(drive.answer))

    def fsync(descriptor):
        flushed.append("system")

    def drive():
        return flushed

    drive.answer = 0
    monkeypatch.setattr(directory, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fsync)
    return drive


def test_on_macos_a_save_empties_the_cache_of_the_drive(tmp_path, drive):
    save({"w": np.ones(3)}, tmp_path / "run")
    assert set(drive()) == {"drive"}
    assert len(drive()) > 3


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_empty_the_drive_is_synced(drive, code):
    drive.answer = code
    sync_opened(0)
    assert drive() == ["drive", "system"]


def test_an_error_of_the_drive_is_an_error(drive):
    drive.answer = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        sync_opened(0, data_only=True)
    assert drive() == ["drive"]


@pytest.mark.parametrize("most", [2**30, 7])
def test_without_preadv_reads_are_the_same(tmp_path, monkeypatch, most):
    data = os.urandom(100)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(directory, "MOST_AT_ONCE", most)
    memory = bytearray(120)
    with open(tmp_path / "file", "rb") as file:
        assert read_into(file.fileno(), memoryview(memory), 10) == 90
    assert memory == data[10:] + bytes(30)


@pytest.mark.parametrize("has_chmod", [True, False], ids=["by name", "by /proc"])
def test_a_mode_is_set_where_nothing_can_be_read_and_never_through_a_link(tmp_path, monkeypatch, has_chmod):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    chmod, opened = os.chmod, os.open

    def refuse(name, flags, *mode, **how):
        if flags == directory.FILE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(name, flags, *mode, **how)

    def old_chmod(path, mode, **how):
        if how and not has_chmod:
            raise ValueError("chmod: cannot use dir_fd and follow_symlinks together")
        return chmod(path, mode, **how)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "chmod", old_chmod)
    with Directory.open(tmp_path) as place:
        set_mode(place, "file", 0o640)
        with pytest.raises(OSError, match="not supported"):
            set_mode(place, "link", 0o777)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.fixture
def caseless(monkeypatch):
    """Let a look at a name find a name that differs in case, as APFS does."""
    kind = LocalStore.kind

    def find(store, name):
        there = {entry.casefold(): entry for entry in (os.listdir(store.path) if store.path.is_dir() else ())}
        return kind(store, there.get(name.casefold(), name))

    monkeypatch.setattr(LocalStore, "kind", find)


@pytest.mark.parametrize("how", [{}, {"format": "zarr"}, {"format": "zarr", "options": DATABASE}], ids=str)
def test_where_case_does_not_count_prefixes_that_differ_in_case_get_other_files(tmp_path, caseless, how):
    for value, prefix in enumerate(("ema", "EMA")):
        save({"w": np.full(3, value)}, tmp_path / "run", prefix=prefix, **how)
    assert [load(tmp_path / "run", prefix=prefix)["w"][0] for prefix in ("ema", "EMA")] == [0, 1]
    assert verify(tmp_path / "run").ok
    names = [name.casefold() for name in os.listdir(tmp_path / "run")]
    assert len(set(names)) == len(names)


def test_where_case_does_not_count_leaves_that_differ_in_case_are_refused_as_arrays(tmp_path, monkeypatch):
    create, make = Directory.create, Directory.make
    monkeypatch.setattr(Directory, "create", lambda place, name, *flags: create(place, name.lower(), *flags))
    monkeypatch.setattr(Directory, "make", lambda place, name, **how: make(place, name.lower(), **how))
    enter = Directory.enter
    monkeypatch.setattr(Directory, "enter", lambda place, path, *depth: enter(place, path.lower(), *depth))
    with pytest.raises(
        FileExistsError, match=r"'a/\.zarray' is written twice: .* may differ only in case; rename"
    ):
        save({"A": np.ones(3), "a": np.ones(3)}, tmp_path / "run", format="zarr")
    assert os.listdir(tmp_path) == []
