"""Nothing outside of a checkpoint is removed, moved or written, whatever links lead there."""

import json
import os
import shutil
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.digests import stamp_digest, xxh3_128
from eformer._engine.stores.directory import Directory, remove_opened
from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import EformerError, FormatError
from eformer.paths import LocalPath
from eformer.pytree._serialization import save_to_file
from support.links import DIRECTORIES, LAYOUTS, NEXT, SCRATCH, TREE, contents, save_as
from support.trees import assert_same

# ------------------------------------------------------------------------------- parts of a checkpoint


@pytest.mark.parametrize("place", ["theirs", "run"])
def test_a_mark_that_leads_out_is_made_into_no_name(tmp_path, place):
    """Whoever has written a file can have written any mark into it."""
    theirs, run, victim = tmp_path / "theirs", tmp_path / "mine" / "run", tmp_path / "mine" / "victim"
    victim.mkdir(parents=True)
    save(TREE, theirs)
    file = theirs / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header["__metadata__"]["eformer"] = "/../../../victim/planted model"
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    forged = len(text).to_bytes(8, "little") + text
    file.unlink()
    (theirs / ".safetensors").write_bytes(forged + raw[start:])
    manifest = json.loads((theirs / "manifest.json").read_bytes())
    manifest["trees"][""]["files"][0].update(
        name=".safetensors",
        nbytes=len(forged) + len(raw) - start,
        header_nbytes=len(forged),
        header=xxh3_128(forged),
    )
    manifest["digest"] = "0" * 32
    (theirs / "manifest.json").write_bytes(stamp_digest(msgspec.json.encode(manifest)))
    if place == "run":
        theirs.rename(run)
    save(TREE, run, options=SaveOptions(reuse=True if place == "run" else theirs))
    assert_same(load(run), TREE)
    assert not list(victim.iterdir())


@pytest.mark.parametrize("layout", ["arrays", "arrays, prefix"])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_directory_of_the_scratch_that_is_swapped_for_a_link(tmp_path, outside, layout, reuse):
    large = {"a": {"w": np.arange(2**20, dtype=np.float32)}, "b": np.ones(3)}
    how = {**LAYOUTS[layout], "options": SaveOptions(reuse=reuse)}
    save(large, tmp_path / "run", **how)
    (outside / "w").rename(outside / "x")
    (outside / "w").mkdir()
    (outside / "w" / "0").write_text("precious")
    before = contents(outside)

    def swap(done, total):
        for folder in (tmp_path / "run").glob(".eformer-*.tmp/data/a"):
            if not folder.is_symlink():
                folder.rename(folder.with_name("away"))
                folder.symlink_to(outside)

    large["a"]["w"] = large["a"]["w"] + 1
    with suppress(OSError, EformerError):
        save(large, tmp_path / "run", progress=swap, **how)
    assert contents(outside) == before


def entries(path):
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [str(file.relative_to(path.parent)) for file in files]


REUSABLE = ["safetensors", "safetensors, shards", "safetensors, prefix", "arrays", "arrays, prefix"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("layout", "reuse"), [(layout, False) for layout in LAYOUTS] + [(layout, True) for layout in REUSABLE]
)
def test_any_part_of_a_checkpoint_that_was_moved_and_linked(tmp_path, layout, reuse):
    """Also without an attacker: the disk was full."""
    first = save_as(layout, TREE, tmp_path / "first")
    for number, name in enumerate(entries(first)):
        folder, elsewhere = tmp_path / f"{number}", tmp_path / f"elsewhere-{number}"
        shutil.copytree(tmp_path / "first", folder)
        elsewhere.mkdir()
        (folder / name).rename(elsewhere / "moved")
        (folder / name).symlink_to(elsewhere / "moved")
        before = contents(elsewhere)
        options = {**LAYOUTS[layout]}
        path = folder / options.pop("name", "run")
        if reuse:
            options["options"] = SaveOptions(reuse=True)
        try:
            save(NEXT, path, **options)
        except (EformerError, FileExistsError) as error:
            assert "link" in str(error) or "outside" in str(error), error  # noqa: PT017
        else:
            assert_same(load(path), NEXT)
        assert contents(elsewhere) == before, name
        assert not list(folder.rglob(".eformer-*.tmp")), name


@pytest.mark.parametrize("kind", ["ocdbt", "files"])
def test_a_root_that_was_moved_to_another_disk_is_left_there(tmp_path, caplog, kind):
    options = SaveOptions(ocdbt=kind == "ocdbt")
    run = tmp_path / "run"
    save(TREE, run, format="tensorstore", prefix="m", options=options)
    root = checkpoint.inspect(run).trees["m"].root
    (run / root).rename(tmp_path / "moved")
    (run / root).symlink_to(tmp_path / "moved")
    before = contents(tmp_path / "moved")
    save(NEXT, run, format="tensorstore", prefix="m", options=options)
    assert contents(tmp_path / "moved") == before
    assert_same(load(run), NEXT)
    assert "is replaced, but not removed" in caplog.text
    assert not list(run.glob(".eformer-*"))


@DIRECTORIES
def test_a_directory_that_is_swapped_during_a_save(tmp_path, outside, layout):
    """TensorStore writes a database by its path, and may put new files where that leads to. It is the one exception."""
    run, before = save_as(layout, TREE, tmp_path), contents(outside)
    how = dict(LAYOUTS[layout])

    def swap(done, total):
        if not run.is_symlink():
            run.rename(tmp_path / "away")
            run.symlink_to(outside / "ours")

    with pytest.raises(FileNotFoundError):
        save(NEXT, run, progress=swap, **how)
    assert_same(load(tmp_path / "away"), TREE)
    assert not list((tmp_path / "away").glob(".eformer-*"))
    after = contents(outside)
    assert before.items() <= after.items()
    assert "database" in layout or after == before


# ---------------------------------------------------------------------------------------------- mounts


@pytest.mark.parametrize("layout", ["safetensors", "arrays", "database"])
@pytest.mark.parametrize("has_openat2", [True, False])
def test_what_is_mounted_there_is_not_swept(tmp_path, unchanged, mounted, layout, has_openat2, monkeypatch):
    if not has_openat2:
        monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    run = save_as(layout, TREE, tmp_path)
    mounted(unchanged, run / SCRATCH / "x")
    assert_same(load(save_as(layout, NEXT, tmp_path)), NEXT)


def test_a_root_that_is_mounted_there_is_left_alone(tmp_path, mounted, caplog):
    run = save_as("arrays, prefix", TREE, tmp_path)
    (run / "m").rename(tmp_path / "elsewhere")
    mounted(tmp_path / "elsewhere", run / "m")
    before = contents(tmp_path / "elsewhere")
    save_as("arrays, prefix", NEXT, tmp_path)
    assert contents(tmp_path / "elsewhere") == before
    assert "is replaced, but not removed" in caplog.text
    assert not list(run.glob(".eformer-*"))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_file_that_is_mounted_there_is_not_written(tmp_path, unchanged, mounted, name):
    run = save_as("safetensors", TREE, tmp_path)
    mounted(unchanged / "0", run / name)
    with suppress(OSError, EformerError):
        save_as("safetensors", NEXT, tmp_path)
    assert contents(unchanged)["0"][2] == b""


# ---------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture
def cache(tmp_path):
    """Turns a checkpoint into a snapshot of a cache, with a second snapshot of the same files."""

    def make(layout):
        run = save_as(layout, TREE, tmp_path)
        blobs = tmp_path / "models--x" / "blobs"
        snapshots = [tmp_path / "models--x" / "snapshots" / name for name in ("one", "two")]
        blobs.mkdir(parents=True)
        for number, file in enumerate(sorted(run.iterdir())):
            file.rename(blobs / f"{number}")
            for snapshot in snapshots:
                snapshot.mkdir(parents=True, exist_ok=True)
                (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        return blobs, *snapshots

    return make


@pytest.mark.parametrize("layout", ["safetensors", "safetensors, shards", "safetensors, prefix"])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_save_into_a_snapshot_harms_no_other(cache, layout, reuse):
    blobs, one, two = cache(layout)
    before = contents(blobs)
    how = {**LAYOUTS[layout], "options": SaveOptions(reuse=reuse)}
    save(NEXT, one, **how)
    assert contents(blobs) == before
    assert_same(load(one), NEXT)
    assert_same(load(two), TREE)
    assert not any(file.is_symlink() for file in one.iterdir())


def test_an_index_of_arrays_in_a_snapshot_is_not_written_through(cache, tmp_path):
    run = tmp_path / "run"
    save(TREE, run, format="tensorstore", prefix="m")
    blobs = tmp_path / "models--x" / "blobs"
    snapshot = tmp_path / "models--x" / "snapshots" / "one"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    run.rename(snapshot)
    (snapshot / "tensorstore_index.json").rename(blobs / "0")
    (snapshot / "tensorstore_index.json").symlink_to("../../blobs/0")
    before = contents(blobs)
    save(NEXT, snapshot, format="tensorstore", prefix="m")
    assert contents(blobs) == before
    assert_same(load(snapshot), NEXT)


def test_a_file_of_a_snapshot_that_a_manifest_names_is_not_replaced(cache):
    blobs, one, _ = cache("safetensors")
    before = contents(blobs)
    with pytest.raises(ValueError, match="belongs to the checkpoint"):
        save(NEXT, one / "model.safetensors")
    assert_same(load(one), TREE)
    assert contents(blobs) == before


# ---------------------------------------------------------------------------------------- single files


def write_path(path):
    LocalPath(path).write_bytes(b"new")


@pytest.mark.parametrize(
    "write",
    [lambda path: save_to_file(TREE, path), lambda path: save(TREE, path), write_path],
    ids=["save_to_file", "save", "write_bytes"],
)
@pytest.mark.parametrize("target", ["0", "plain/model.safetensors", "new", "absent/file"])
def test_a_link_is_replaced_by_a_file_and_not_written_through(tmp_path, unchanged, write, target):
    path = tmp_path / "x.safetensors"
    path.symlink_to(unchanged / target)
    write(path)
    assert path.is_file()
    assert not path.is_symlink()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("target", ["/dev/null", "outside"])
def test_a_link_to_no_file_is_not_replaced(tmp_path, outside, target):
    """As root, /dev/stdout would be gone."""
    path = tmp_path / "x.msgpack"
    path.symlink_to(target)
    with pytest.raises(OSError, match="Not a regular file"):
        save_to_file(TREE, path)
    assert path.is_symlink()


def test_a_path_of_the_callers_may_lead_through_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for path in ("link/run", "link/arrays", "link/x.safetensors"):
        save(TREE, tmp_path / path, format="tensorstore" if "arrays" in path else "safetensors")
        save(NEXT, tmp_path / path, format="tensorstore" if "arrays" in path else "safetensors")
        assert_same(load(tmp_path / path), NEXT)
    save_to_file(TREE, tmp_path / "link" / "x.msgpack")
    (tmp_path / "latest").symlink_to("disk/run")
    save(TREE, tmp_path / "latest")
    assert_same(load(tmp_path / "disk" / "run"), TREE)
    assert (tmp_path / "latest").is_symlink()


# ----------------------------------------------------------------------------------------- a directory


def test_without_openat2_directories_are_entered_step_by_step(tmp_path, unchanged, monkeypatch):
    monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    (tmp_path / "link").symlink_to(unchanged)
    with Directory.open(tmp_path) as place:
        before = len(os.listdir("/dev/fd"))
        for name in ("link", "link/w", "outside/0", "outside/w/0"):
            with pytest.raises(NotADirectoryError):
                place.enter(name)
        with pytest.raises(FileNotFoundError):
            place.enter("outside/absent/w")
        with place.enter("outside/ours/m") as inner:
            assert sorted(inner.kinds()) == ["a", "b"]
        assert len(os.listdir("/dev/fd")) == before
    assert_same(load(save_as("arrays", TREE, tmp_path)), TREE)


def test_a_directory_is_entered_through_no_link(tmp_path, outside):
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "link").symlink_to(outside / "w")
    with Directory.open(tmp_path) as place:
        for name in ("link", "link/w", "real/link", "outside/0"):
            with pytest.raises(NotADirectoryError):
                place.enter(name)
        for name in ("", "..", "real/..", "/", "real//link"):
            with pytest.raises(EformerError, match="not the name of a directory"):
                place.enter(name)
        with place.enter("outside/w") as inner:
            assert sorted(inner.kinds()) == [".zarray", "0", "1"]


def test_a_tree_is_removed_with_its_links_and_without_what_they_lead_to(tmp_path, unchanged):
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "link").symlink_to(unchanged)
    (tmp_path / "tree" / "inner" / "link").symlink_to(unchanged / "0")
    os.mkfifo(tmp_path / "tree" / "pipe")
    with Directory.open(tmp_path) as place, place.enter("tree") as tree:
        remove_opened(place, "tree", tree)
    assert not (tmp_path / "tree").exists()


def test_a_place_that_is_a_link_cannot_be_joined(tmp_path, unchanged):
    (tmp_path / SCRATCH).symlink_to(unchanged)
    with pytest.raises(NotADirectoryError):
        LocalUpload(tmp_path, SCRATCH)


def test_descriptors_are_closed(tmp_path):
    for layout in LAYOUTS:
        save_as(layout, TREE, tmp_path / layout)
    before = sorted(os.listdir("/dev/fd"))
    for layout in LAYOUTS:
        save_as(layout, NEXT, tmp_path / layout)
    assert sorted(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("has_openat2", [True, False])
def test_chunks_are_read_through_links_inside_and_not_through_others(
    tmp_path, outside, has_openat2, monkeypatch
):
    if not has_openat2:
        monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    run = tmp_path / "run"
    save({"a": {"w": np.arange(4)}}, run, format="tensorstore")
    chunk = run / "a" / "w" / "0"
    chunk.rename(run / "moved")
    for target in ("../../moved", run / "moved"):
        chunk.symlink_to(target)
        np.testing.assert_array_equal(load(run)["a"]["w"], np.arange(4))
        chunk.unlink()
    (run / "moved").rename(outside / "moved")
    for target in (outside / "moved", os.path.relpath(outside / "moved", chunk.parent)):
        chunk.symlink_to(target)
        with pytest.raises(FormatError, match="outside of the checkpoint"):
            load(run)
        chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(FormatError, match="not a regular file"):
        load(run)
