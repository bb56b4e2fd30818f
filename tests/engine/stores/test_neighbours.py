"""Somebody who may rename directories beside a checkpoint, but not remove what is in them, cannot have that done."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores import checkpoints
from eformer._engine.stores import journal as journals
from eformer._engine.stores.base import publish
from eformer._engine.stores.directory import Directory, set_mode
from eformer._engine.stores.journal import Journal
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.removal import Described, Moved
from eformer.checkpoint import Keep, Run, SaveOptions, convert, load, prune, save
from eformer.errors import EformerError
from eformer.pytree._serialization import save_to_file
from support.commits import One
from support.links import (
    DIRECTORIES,
    LAYOUTS,
    NEXT,
    SCRATCH,
    TREE,
    contents,
    foreign_array,
    inode,
    save_as,
    scratch_in,
)
from support.opens import Opens
from support.trees import assert_same

NOBODY = 65534
REUSABLE = [
    (layout, True) for layout in LAYOUTS if layout.startswith(("safe", "arrays")) and "comp" not in layout
]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def precious(tmp_path):
    """A directory beside the checkpoint, which its neighbour may rename."""
    path = tmp_path / "precious"
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "chapter").write_text("years")
    return path


def scratch_of(place):
    return [path for path in place.glob(".eformer-*.tmp") if not path.is_symlink()]


def once(action):
    """Return a function that calls `action` the first time."""
    done = []

    def act(*_, **__):
        if not done:
            done.append(action())

    return act


def swap(path, other, away):
    """Give a directory the name of another."""
    path.rename(away)
    other.rename(path)


def whole(path):
    return (path / "thesis" / "chapter").read_text() == "years"


# -------------------------------------------------------------------------------------------- scratch


@DIRECTORIES
def test_a_directory_that_takes_the_name_of_the_scratch_is_not_removed_with_it(tmp_path, precious, layout):
    run = save_as(layout, TREE, tmp_path)
    inside = run / "precious"
    precious.rename(inside)
    found = []

    def act():
        found.extend(scratch_of(run))
        swap(found[0], inside, run / "away")

    try:
        save(NEXT, run, progress=once(act), **LAYOUTS[layout])
    except (OSError, EformerError):
        assert_same(load(run), TREE)
    assert whole(found[0])


@pytest.mark.parametrize("where", ["in", "beside"])
def test_a_directory_that_was_named_like_scratch_is_not_swept(tmp_path, precious, caplog, where):
    run = tmp_path / "runs" / "run"
    save(TREE, run)
    named = (run if where == "in" else run.parent) / SCRATCH
    precious.rename(named)
    save(NEXT, run)
    prune_beside(run)
    assert whole(named)
    assert "was not removed: it is named like the scratch" in caplog.text


def prune_beside(run):
    for step in (1, 2):
        save(TREE, run.parent / f"step-{step}")
    prune(run.parent, keep=1)


def test_a_directory_that_takes_the_name_of_scratch_while_that_is_swept(tmp_path, precious, monkeypatch):
    save(TREE, tmp_path / "run")
    scratch, inside = tmp_path / "run" / SCRATCH, tmp_path / "run" / "precious"
    (scratch / "data").mkdir(parents=True)
    precious.rename(inside)
    read = journals.read_journal
    act = once(lambda: swap(scratch, inside, tmp_path / "run" / "away"))

    def read_late(folder):
        act()
        return read(folder)

    monkeypatch.setattr(journals, "read_journal", read_late)
    save(NEXT, tmp_path / "run")
    assert whole(scratch)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_a_name_for_scratch_that_was_guessed_is_not_used(tmp_path, precious, monkeypatch, kind):
    taken = tmp_path / "run" / SCRATCH
    taken.parent.mkdir()
    if kind == "directory":
        precious.rename(taken)
    elif kind == "link":
        taken.symlink_to(precious)
    else:
        os.mkfifo(taken)
    monkeypatch.setattr("eformer._engine.stores.scratch.scratch_name", lambda: SCRATCH)
    monkeypatch.setattr("eformer._engine.stores.durable.scratch_name", lambda: SCRATCH)
    with pytest.raises(FileExistsError):
        save(TREE, tmp_path / "run")
    with pytest.raises(FileExistsError):
        save_to_file(TREE, tmp_path / "run" / "x.msgpack")
    assert os.listdir(tmp_path / "run") == [SCRATCH]
    assert kind == "pipe" or whole(taken)


def test_a_pipe_in_the_scratch_is_not_waited_for(tmp_path):
    def act():
        (scratch,) = scratch_of(tmp_path)
        os.mkfifo(scratch / "data" / "pipe")

    save(TREE, tmp_path / "x", format="tensorstore")
    try:
        save(TREE, tmp_path / "run", progress=once(act), **LAYOUTS["database"])
    except OSError:
        return
    assert_same(load(tmp_path / "run"), TREE)


# ------------------------------------------------------------------------------------------------ steps


@pytest.fixture
def full(monkeypatch):
    """A disk on which no directory can be made."""
    make = Directory.make

    def fail(place, name, *, usable=False):
        if usable:
            raise OSError(errno.ENOSPC, "No space left on device")
        make(place, name)

    return lambda: monkeypatch.setattr(Directory, "make", fail)


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        save(TREE, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize("disk", ["roomy", "full"])
def test_a_directory_that_takes_the_name_of_a_step_in_the_last_moment_goes_back(
    run, precious, monkeypatch, full, disk
):
    if disk == "full":
        full()
    inside, look = run / "precious", checkpoints.require_removable
    precious.rename(inside)
    act = once(lambda: swap(run / "step-1", inside, run / "away"))

    def look_late(place, name):
        look(place, name)
        act()

    monkeypatch.setattr(checkpoints, "require_removable", look_late)
    with pytest.raises(ValueError, match="has changed since its removal was planned"):
        prune(run, keep=1)
    assert whole(run / "step-1")
    assert not scratch_of(run)


def test_steps_are_removed_from_a_full_disk(run, full):
    full()
    assert prune(run, keep=1).removed == ("step-1", "step-2")
    assert os.listdir(run) == ["step-3"]


def test_a_file_that_takes_the_name_of_a_step_in_the_last_moment_goes_back(run, monkeypatch):
    rename = Directory.rename

    def rename_late(place, name, target, final):
        if name == "step-1":
            (run / "step-1").rename(run / "away")
            (run / "step-1").write_text("mine")
        rename(place, name, target, final)

    monkeypatch.setattr(Directory, "rename", rename_late)
    with pytest.raises(ValueError, match="has changed since its removal was planned"):
        prune(run, keep=1)
    assert (run / "step-1").read_text() == "mine"


def test_the_retention_of_a_run_removes_only_what_it_has_looked_at(tmp_path, precious, monkeypatch, caplog):
    from eformer._engine.runs import retention

    inside, linked = tmp_path / "run" / "precious", retention.linked_in
    act = once(lambda: swap(tmp_path / "run" / "step-1", inside, tmp_path / "run" / "away"))

    def look_late(where):
        act()
        return linked(where)

    with Run(tmp_path / "run", keep=[Keep(last=1)]) as run:
        run.save(1, TREE)
        run.wait()
        precious.rename(inside)
        monkeypatch.setattr(retention, "linked_in", look_late)
        run.save(2, TREE)
    assert whole(tmp_path / "run" / "step-1")
    assert "has changed since its removal was planned" in caplog.text


# ------------------------------------------------------------------------------------- other users' journals


def give_away(path):
    for file in (path, *path.rglob("*")):
        os.chown(file, NOBODY, NOBODY, follow_symlinks=False)


def journal_about(folder, save_id="f" * 16):
    """Return a journal that has all arrays in a directory removed, with or without a mark."""
    described = tuple(
        Described(str(file.relative_to(folder.parent)), inode(file), file.stat().st_mtime_ns)
        for file in folder.rglob(".zarray")
    )
    marks = {"", *(tree.save_id for tree in checkpoint.inspect(folder.parent.parent / "run").trees.values())}
    moved = tuple(Moved(folder.name, inode(folder), mark, described) for mark in sorted(marks))
    return Journal(save_id, moved, ())


@needs_root
@pytest.mark.parametrize("kind", ["marked", "unmarked", "database"])
@pytest.mark.parametrize("whose", ["mine", "theirs"])
def test_a_journal_of_another_user_has_only_that_users_files_removed(tmp_path, kind, whose):
    source, run = tmp_path / "run", tmp_path / "other"
    how = LAYOUTS["database, prefix" if kind == "database" else "arrays, prefix"]
    save(TREE, source, **how)
    save(TREE, run, format="tensorstore", prefix="n")
    if kind == "unmarked":
        foreign_array(run / "x" / "w")
    else:
        shutil.copytree(source / checkpoint.inspect(source).trees["m"].root, run / "x")
    if whose == "theirs":
        give_away(run / "x")
    before = contents(run / "x")
    give_away(scratch_in(run, journal_about(run / "x")))
    save(NEXT, run, format="tensorstore", prefix="n")
    if whose == "mine":
        assert contents(run / "x") == before
    else:
        assert not list(run.glob("x/*"))


# ------------------------------------------------------------------------------------------ permissions


@pytest.mark.parametrize(
    ("layout", "reuse"), [(layout, False) for layout in LAYOUTS if layout != "file"] + REUSABLE
)
def test_files_that_are_hard_links_are_never_written(tmp_path, layout, reuse):
    run, outside = save_as(layout, TREE, tmp_path), tmp_path / "outside"
    outside.mkdir()
    for number, file in enumerate(path for path in sorted(run.rglob("*")) if path.is_file()):
        os.chmod(file, 0o640)
        os.link(file, outside / f"{number}")
    before = contents(outside)
    how = dict(LAYOUTS[layout])
    how["options"] = SaveOptions(**{**_fields(how.get("options")), "reuse": reuse})
    for tree in (NEXT, TREE):
        save(tree, run, **how)
    assert contents(outside) == before


def _fields(options):
    return (
        {name: getattr(options, name) for name in ("max_shard_bytes", "ocdbt", "compression")}
        if options
        else {}
    )


def test_a_file_that_is_used_again_keeps_its_permissions_which_another_checkpoint_has_too(tmp_path):
    for name, mode in (("first", 0o600), ("second", 0o666)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        (tmp_path / name / "file").chmod(mode)
    first = LocalStore(tmp_path / "first")
    upload = LocalUpload(tmp_path / "second")
    try:
        assert upload.link("file", first, first.read("file")[1])
        publish(upload, ["file"])
    finally:
        upload.close()
    assert (tmp_path / "second" / "file").read_text() == "first"
    assert stat.S_IMODE((tmp_path / "first" / "file").stat().st_mode) == 0o600


def test_permissions_are_not_set_through_a_link(tmp_path):
    (tmp_path / "file").touch(0o600)
    (tmp_path / "link").symlink_to("file")
    with Directory.open(tmp_path) as place:
        with pytest.raises(OSError, match=r"."):
            set_mode(place, "link", 0o666)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
        set_mode(place, "file", 0o640)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_new_file_that_is_swapped_for_a_link_does_not_pass_permissions_on(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch(0o666)
    (tmp_path / "run" / "file").chmod(0o666)
    (tmp_path / "secret").touch(0o600)
    upload = LocalUpload(tmp_path / "run")
    try:
        upload.put([("new", b"")])
        new = upload.data.path / "new"
        new.unlink()
        new.symlink_to(tmp_path / "secret")
        with pytest.raises(OSError, match=r"."):
            upload.commit(One({"new": "file"}))
    finally:
        upload.close()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


# ------------------------------------------------------------------------------- what is written by path


def evil(tmp_path, target):
    """Return a directory whose `data` leads to another one."""
    path = tmp_path / "evil"
    path.mkdir()
    (path / "data").symlink_to(target)
    return path


def test_a_database_is_not_written_into_another_that_takes_its_place(tmp_path):
    save(TREE, tmp_path / "theirs", **LAYOUTS["database"])
    root = tmp_path / "theirs" / checkpoint.inspect(tmp_path / "theirs").trees[""].root
    before = contents(tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    link = evil(tmp_path, root)

    def act():
        (scratch,) = scratch_of(tmp_path / "run")
        scratch.rename(tmp_path / "away")
        scratch.symlink_to(link)

    large = {f"{number}": np.full(2**20, number, np.float32) for number in range(8)}
    with suppress(OSError, EformerError):
        save(large, tmp_path / "run", progress=once(act), **LAYOUTS["database"])
    assert contents(tmp_path / "theirs") == before


@pytest.mark.parametrize(
    ("to", "name"),
    [("npz", "new.npz"), ("msgpack", "new.msgpack"), ("safetensors", "new"), ("tensorstore", "new"), ("orbax", "new"),
     ("safetensors", "new.safetensors")],
)  # fmt: skip
def test_a_conversion_whose_scratch_is_swapped_for_a_link_changes_nothing_outside(
    tmp_path, monkeypatch, to, name
):
    save(TREE, tmp_path / "source")
    theirs, place = tmp_path / "theirs", tmp_path / "place"
    theirs.mkdir()
    place.mkdir()
    if name == "new":
        convert(tmp_path / "source", theirs / name, to=to)
    else:
        (theirs / name).write_text("precious")
    before, link = contents(theirs), evil(tmp_path, theirs)
    from eformer._engine.tools import convert as conversion

    read = conversion._with_small_leaves_read

    def act():
        (scratch,) = scratch_of(place)
        scratch.rename(place / "away")
        scratch.symlink_to(link)

    late = once(act)

    def read_late(*args):
        late()
        return read(*args)

    monkeypatch.setattr(conversion, "_with_small_leaves_read", read_late)
    with suppress(OSError, EformerError):
        convert(tmp_path / "source", place / name, to=to)
    assert contents(theirs) == before


# ------------------------------------------------------------------------------------- a real neighbour


RACER = """
import os, sys
a, b = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in os.listdir(a) if os.path.isdir(a) else ():
        path, target = os.path.join(a, name), os.path.join(b, name)
        try:
            os.rename(path, path + ".away")
            os.symlink(target if os.path.exists(target) else b, path)
            os.unlink(path)
            os.rename(path + ".away", path)
        except OSError:
            try: os.unlink(path)
            except OSError: pass
            try: os.rename(path + ".away", path)
            except OSError: pass
"""


@pytest.fixture
def neighbour():
    """Starts a process that swaps everything in a directory for links to another one, without end."""
    started = []

    def start(place, outside):
        arguments = [sys.executable, "-c", RACER, str(place), str(outside)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["safetensors", "arrays, prefix", "database, prefix"])
def test_saves_beside_a_neighbour_who_swaps_everything_for_links(tmp_path, outside, neighbour, layout):
    run = save_as(layout, TREE, tmp_path / "place")
    before = contents(outside)
    neighbour(run, outside / "ours")
    for number in range(20):
        try:
            save_as(layout, TREE if number % 2 else NEXT, tmp_path / "place")
            load(run)
        except (OSError, EformerError, ValueError):
            continue
    after = contents(outside)
    changed = {name for name in before if after.get(name) != before[name]}
    assert not changed


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("layout", "inner"),
    [("safetensors", ""), ("safetensors, shards", ""), ("arrays, prefix", ""), ("arrays, prefix", "m")],
)
def test_loads_beside_a_neighbour_who_swaps_everything_for_links_open_nothing_outside(
    tmp_path, neighbour, layout, inner
):
    run = save_as(layout, TREE, tmp_path)
    shutil.copytree(run, tmp_path / "outside")
    opens = Opens(tmp_path / "outside")
    neighbour(run / inner, tmp_path / "outside" / inner)
    for _ in range(50):
        with suppress(OSError, EformerError, ValueError):
            load(run)
        with suppress(OSError, EformerError, ValueError):
            checkpoint.verify(run)
    assert opens.seen() == []
    opens.close()


def test_prunes_beside_a_neighbour_who_swaps_everything_for_links(tmp_path, outside, neighbour):
    before, place = contents(outside), tmp_path / "place"
    place.mkdir()
    neighbour(place, outside)
    for number in range(20):
        try:
            save(TREE, place / f"step-{number}")
            prune(place, keep=1)
        except (OSError, EformerError, ValueError):
            continue
    assert contents(outside) == before
