"""A save under way, and several processes that save together."""

import asyncio
import dataclasses
import gc
import hashlib
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.formats import find
from eformer._engine.record.manifest import Manifest
from eformer._engine.saving import commit as _record
from eformer._engine.saving import several
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import start
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.journal import sweep_dead
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, load, save, save_async
from eformer.errors import CorruptionError, EformerError, FormatError, MismatchError
from support import programs
from support.hosts import Crew, save_together, sharded_tree
from support.trees import bits

# ------------------------------------------------------------------------------------------- pending


def test_a_pending_save_resolves_to_its_path(tmp_path):
    pending = save_async({"w": np.ones(3)}, tmp_path / "a")
    assert pending.result(timeout=60) == str(tmp_path / "a")
    assert pending.done()
    assert pending.exception() is None
    assert repr(pending).endswith("a: done>")


def hold(monkeypatch):
    """Lets no save go on until the event is set."""
    go = threading.Event()
    begin = LocalStore.begin
    monkeypatch.setattr(
        LocalStore, "begin", lambda store, *how, **more: go.wait(60) and begin(store, *how, **more)
    )
    return go


def test_a_save_under_way_can_be_waited_for(tmp_path, monkeypatch):
    go = hold(monkeypatch)
    pending = save_async({"w": np.ones(3)}, tmp_path / "a")
    assert not pending.done()
    assert "under way" in repr(pending)
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.01)
    called = []
    pending.add_done_callback(called.append)
    go.set()
    pending.result()
    pending.add_done_callback(called.append)
    while len(called) < 2:  # the first is called by the other thread, right after the result is there
        pass
    assert called == [pending, pending]


def test_a_pending_save_can_be_awaited_in_a_running_loop(tmp_path):
    async def main():
        assert save({"w": 1}, tmp_path / "sync") == str(tmp_path / "sync")
        return await save_async({"w": np.ones(3)}, tmp_path / "a")

    assert asyncio.run(main()) == str(tmp_path / "a")


def test_an_error_belongs_to_its_own_save(tmp_path):
    (tmp_path / "file").write_text("x")
    bad = save_async({"w": 1}, tmp_path / "file" / "below")
    good = save_async({"w": 1}, tmp_path / "good")
    assert good.result()
    with pytest.raises(NotADirectoryError):
        bad.result()
    assert isinstance(bad.exception(), NotADirectoryError)
    assert repr(bad).endswith("failed>")
    assert save({"w": 2}, tmp_path / "good")


def test_an_error_that_nobody_asks_for_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    pending = save_async({"w": 1}, tmp_path / "file" / "below")
    while not pending.done():
        pass
    with caplog.at_level(logging.ERROR, "eformer"):
        del pending
        gc.collect()
    assert "failed, and its error was never retrieved" in caplog.text


@pytest.mark.thorough
def test_an_error_that_nobody_asks_for_is_logged_at_exit_too(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from eformer.checkpoint import save_async\n"
        "pending = save_async({'n': np.ones(3)}, '/proc/nowhere/x')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "saving to /proc/nowhere/x failed, and its error was never retrieved" in run.stderr


def test_who_stops_waiting_does_not_stop_the_save(tmp_path, monkeypatch):
    go = hold(monkeypatch)
    pending = save_async({"w": np.ones(3)}, tmp_path / "a")

    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending, 0.01)

    asyncio.run(impatient())
    go.set()
    assert pending.result() == str(tmp_path / "a")
    assert load(tmp_path / "a")["w"].shape == (3,)


def test_a_kept_error_does_not_keep_the_arrays(tmp_path):
    (tmp_path / "file").write_text("x")
    array = np.ones(3).view(Watched)
    pending = save_async({"w": array}, tmp_path / "file" / "below")
    assert pending.exception()
    gc.collect()
    assert Watched.alive == 1  # ours; the copy is gone


class Watched(np.ndarray):
    alive = 0

    def __array_finalize__(self, _):
        Watched.alive += 1

    def __del__(self):
        Watched.alive -= 1


FORKS = """
import os, signal, sys, threading
from eformer.checkpoint import load, save, save_async, wait
from eformer._engine.processes import hosts as _hosts
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload

_hosts.current = lambda *_: _hosts.Hosts()  # else a backend of JAX would start, and those do not survive a fork
path, go, begin = sys.argv[1], threading.Event(), LocalStore.begin
LocalStore.begin = lambda store, *how, **more: go.wait(60) and begin(store, *how, **more)
pending = save_async({"w": 1}, path)
child = os.fork()
if child == 0:  # the parent's save is under way, and ends in the parent alone
    go.set()
    save({"w": 2}, path)
    wait()
    os._exit(0 if load(path) == {"w": 2} else 1)
assert os.waitpid(child, 0)[1] == 0
go.set()
pending.result()

finish, children = LocalUpload._finish, []
def fork_inside(*args):  # while the directory is locked
    children.append(os.fork())
    if children[-1] == 0:
        signal.pause()
    return finish(*args)

LocalUpload._finish = fork_inside
save({"w": 3}, path)
LocalUpload._finish = finish
save({"w": 4}, path)
assert load(path) == {"w": 4}
os.kill(children[0], signal.SIGKILL)
"""


def test_a_forked_child_neither_keeps_locks_nor_waits_for_its_parent(tmp_path):
    done = programs.run(FORKS, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_save_that_cannot_start_holds_nobody_up(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_async({"w": 1}, tmp_path / "a")
    save({"w": 2}, tmp_path / "a")
    assert load(tmp_path / "a") == {"w": 2}


def test_a_failed_save_does_not_hold_up_the_next(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LocalUpload, "sync", lambda upload: 1 / 0)
        pending = save_async({"w": np.ones(3)}, tmp_path / "a")
        pending.exception()
    save({"w": 2}, tmp_path / "a")
    assert load(tmp_path / "a") == {"w": 2}


def test_pending_saves_finish_when_the_interpreter_exits(tmp_path):
    code = (
        "import sys, numpy as np, jax.numpy as jnp\n"
        "from eformer.checkpoint import save_async\n"
        "for i in range(3): save_async({'n': np.ones(3_000_000), 'j': jnp.ones(10)}, f'{sys.argv[1]}/{i}')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    for i in range(3):
        assert checkpoint.verify(tmp_path / str(i)).ok


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown format 'zip'; expected safetensors or zarr$"):
        save({}, tmp_path, format="zip")


def test_zarr_and_tensorstore_are_one_format(tmp_path):
    for name in ("zarr", "tensorstore"):
        save({"w": np.arange(3)}, tmp_path / name, format=name)
        assert checkpoint.inspect(tmp_path / name).format == "tensorstore"  # the word on disk
    save({"w": np.arange(4)}, tmp_path / "tensorstore", format="zarr", options={"reuse": tmp_path / "zarr"})
    save({"w": np.arange(3)}, tmp_path / "tensorstore", format="zarr", options={"reuse": True})
    assert (checkpoint.load(tmp_path / "tensorstore")["w"] == np.arange(3)).all()
    with pytest.raises(
        ValueError, match=r"'x.safetensors' is the name of a safetensors file, but the format is 'zarr'"
    ):
        save({}, tmp_path / "x.safetensors", format="tensorstore")


@pytest.mark.parametrize(
    "options", [{"max_shard_bytes": 0}, {"staging_bytes": -1}, {"threads": 0}, {"snapshot": "moon"}]
)
def test_options_that_make_no_sense_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"SaveOptions.{name}"):
        SaveOptions(**options)


# ------------------------------------------------------------------------------------------ snapshot


@pytest.fixture
def on_an_accelerator(monkeypatch):
    """CPU arrays are treated as those of an accelerator: copied on the device, and staged through pinned memory."""
    from eformer._engine.saving import snapshot as _arrays

    monkeypatch.setattr(_arrays, "is_host_memory", lambda array: False)
    monkeypatch.setattr(_arrays._Reader, "look_at", lambda self, sharding, where: (False, 0, None))


@pytest.mark.sample(9)
@pytest.mark.parametrize("snapshot", ["auto", "device", "host"])
@pytest.mark.parametrize("budget", [1, 1000, 2**30])
@pytest.mark.sample(3)
def test_arrays_of_an_accelerator_are_staged_within_the_budget(
    tmp_path, monkeypatch, on_an_accelerator, snapshot, budget
):
    from eformer._engine.saving.staging import Staging

    monkeypatch.setattr(_record, "PIECE_BYTES", 256)
    most, fetch = [0], Staging.fetch

    def watched(self, parts, region):
        result = fetch(self, parts, region)
        most[0] = max(most[0], self.used)
        return result

    monkeypatch.setattr(Staging, "fetch", watched)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {"a": jnp.arange(3000.0).reshape(30, 100), "s": jnp.ones(3), "k": jax.random.key(0), "f4": jnp.ones(6, jnp.float4_e2m1fn),
            "columns": jax.device_put(jnp.arange(640.0).reshape(8, 80), NamedSharding(mesh, P(None, "x")))}  # fmt: skip
    expected = jax.tree.map(lambda x: x + 0 if x.dtype == jnp.float32 else x, tree)
    pending = save_async(tree, tmp_path, options=SaveOptions(snapshot=snapshot, staging_bytes=budget))
    for name in ("a", "columns"):
        tree[name].delete()
    pending.result()
    for name, leaf in load(tmp_path).items():
        assert bits(leaf) == bits(expected[name])
    assert 0 < most[0] <= max(budget, 400 * 3)


def test_a_device_without_room_is_not_asked_for_a_copy(monkeypatch):
    from eformer._engine.saving.snapshot import _have_room
    from eformer._engine.trees.copies import Kinds

    class Device:
        def __init__(self, limit):
            self.limit = limit

        def memory_stats(self):
            return {"bytes_limit": self.limit, "bytes_in_use": 1000} if self.limit else None

    class Sharding:
        def __init__(self, limit):
            self.device_set = {Device(limit)}

    class Array:
        shape, dtype = (250,), np.dtype("float32")

        def __init__(self, limit):
            self.sharding = Sharding(limit)

    assert _have_room(Kinds([Array(3000), Array(0)]).nbytes())
    assert not _have_room(Kinds([Array(3000), Array(2050)]).nbytes())


# --------------------------------------------------------------------------------------------- hosts


@pytest.fixture(params=["safetensors", "tensorstore", "tensorstore, ocdbt", "tensorstore, zstd"])
def layout(request):
    """A format, and options of it."""
    name, _, option = request.param.partition(", ")
    return name, {"ocdbt": {"ocdbt": True}, "zstd": {"compression": "zstd"}}.get(option, {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_processes_write_one_checkpoint_and_meet_twice(tmp_path, monkeypatch, count, layout):
    monkeypatch.setattr(_record, "PIECE_BYTES", 256)
    tree, crew = sharded_tree(), Crew(count)
    assert save_together(crew, lambda host: tree, tmp_path, layout) == [None] * count
    assert len(crew.meetings) == (2 if count > 1 else 0)
    assert checkpoint.verify(tmp_path).ok
    loaded = load(tmp_path)
    for name, leaf in tree.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(leaf))
    columns = NamedSharding(Mesh(np.array(jax.devices()), ("z",)), P(None, "z"))
    shardings = dict.fromkeys(["rows", "both", "everywhere"], columns)
    for name, leaf in load(tmp_path, shardings=shardings).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(tree[name]))


def test_every_byte_is_written_once_and_replicas_are_spread(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {f"r{i}": jax.device_put(jnp.ones(1000), NamedSharding(mesh, P())) for i in range(4)}
    save_together(Crew(4), lambda host: tree, tmp_path)
    entry = checkpoint.inspect(tmp_path).trees[""]
    assert [file.nbytes - file.header_nbytes for file in entry.files] == [4000] * 4
    assert entry.nbytes == 16_000


def test_an_error_of_one_is_an_error_of_all(tmp_path):
    save({"w": 1}, tmp_path)
    tree = sharded_tree()

    def work(host):
        prepared = start(tree, tmp_path, hosts=host)
        if host.number == 1:  # no more to go by
            few = SimpleNamespace(max_chunk_bytes=None, max_shard_bytes=2**30, compression=None, ocdbt=False)
            prepared = dataclasses.replace(prepared, options=few)
        complete(prepared)

    outcomes = Crew(3).run(work)
    assert isinstance(outcomes[1], AttributeError)
    for index in (0, 2):
        assert isinstance(outcomes[index], EformerError)
        assert "process 1: AttributeError" in str(outcomes[index])
    assert load(tmp_path) == {"w": 1}
    assert not list(tmp_path.glob(".*"))


def test_a_seal_that_fails_is_an_error_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalUpload, "swap", lambda *_: 1 / 0)
    outcomes = save_together(Crew(2), lambda host: sharded_tree(), tmp_path)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert "process 0: ZeroDivisionError" in str(outcomes[1])
    assert not list(tmp_path.iterdir())


def test_several_processes_do_not_write_one_file(tmp_path):
    outcomes = save_together(Crew(2), lambda host: {"w": np.ones(3)}, tmp_path / "x.safetensors")
    assert all("to a directory, not to one file" in str(outcome) for outcome in outcomes)


def test_files_of_several_processes_are_legal_safetensors(tmp_path):
    import safetensors

    tree = sharded_tree()
    assert save_together(Crew(4), lambda host: tree, tmp_path) == [None] * 4
    names = set()
    for name in tmp_path.glob("model-*-of-00004.safetensors"):
        with safetensors.safe_open(name, "np") as file:
            names.update(file.keys())
    assert {"numpy", "one", "everywhere", "rows%[0:16,0:8]"} <= names
    assert not list(tmp_path.glob("*.index.json"))  # which would list parts of tensors, of no use to anybody


def test_whole_leaves_of_several_processes_are_there_for_other_readers(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {f"r{i}": jax.device_put(jnp.ones(10) * i, NamedSharding(mesh, P())) for i in range(4)}
    assert save_together(Crew(2), lambda host: tree | {"n": np.ones(3)}, tmp_path) == [None] * 2
    index = msgspec.json.decode((tmp_path / "model.safetensors.index.json").read_bytes())
    assert sorted(index["weight_map"]) == ["n", "r0", "r1", "r2", "r3"]
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}


def test_what_each_process_has_for_itself_does_not_differ_without_a_word(tmp_path, caplog):
    shared = {"large": np.zeros(10**5), "v": 1}
    assert save_together(Crew(3), lambda host: shared | {"n": np.arange(3)}, tmp_path) == [None] * 3
    assert not caplog.text
    outcomes = save_together(Crew(3), lambda host: shared | {"n": np.arange(3) + host.number}, tmp_path)
    assert outcomes == [None] * 3
    assert "process 1 and 1 more differ from process 0" in caplog.text
    np.testing.assert_array_equal(load(tmp_path)["n"], np.arange(3))


def test_what_is_not_all_there_is_not_sealed(tmp_path, monkeypatch, layout):
    save({"old": 1}, tmp_path, format=layout[0])
    coverage = several.coverage

    def less(files):  # as if a process had not written one of its boxes
        return coverage([f for f in files if all(extent.source.name != "both" for extent in f.extents)])

    monkeypatch.setattr(several, "coverage", less)
    for outcome in save_together(Crew(2), lambda host: sharded_tree(), tmp_path, layout):
        assert "have not written every element of every leaf once" in str(outcome)
    assert load(tmp_path) == {"old": 1}


def test_bytes_are_spread_by_what_each_has_to_write_anyway(tmp_path):
    devices = np.array(jax.devices())
    halves = NamedSharding(Mesh(devices[:4], ("x",)), P("x"))  # on processes 0 and 1 of 4
    everywhere = NamedSharding(Mesh(devices, ("x",)), P())
    tree = {"a": jax.device_put(jnp.ones(4000), halves)}
    tree |= {f"r{i}": jax.device_put(jnp.ones(1000), everywhere) for i in range(4)}
    assert save_together(Crew(4), lambda host: tree, tmp_path) == [None] * 4
    files = checkpoint.inspect(tmp_path).trees[""].files
    assert [file.nbytes - file.header_nbytes for file in files] == [8000] * 4


def test_several_processes_record_the_checksums_of_what_one_has_whole(tmp_path, layout):
    tree = sharded_tree()
    assert save_together(Crew(2), lambda host: tree, tmp_path, layout, checksums=True) == [None] * 2
    leaves = checkpoint.inspect(tmp_path).trees[""].leaves
    for name in ("numpy", "one", "everywhere", "columns", "empty"):
        expected = hashlib.sha256(np.asarray(tree[name]).tobytes()).hexdigest()
        assert leaves[name].sha256 in (expected, None), name
    assert leaves["numpy"].sha256
    assert leaves["everywhere"].sha256
    assert leaves["rows"].sha256 is None


@pytest.mark.sample(4)
def test_what_several_processes_saved_is_replaced_without_a_rest(tmp_path, layout):
    def count(path):
        """How many files there are; those of a database, whose number varies, are one."""
        files = [file for file in path.rglob("*") if file.is_file()]
        return len({file.parent if file.parent.name == "d" else file for file in files})

    for _ in range(2):
        assert save_together(Crew(4), lambda host: sharded_tree(), tmp_path, layout) == [None] * 4
    save({"w": np.ones(3)}, tmp_path, format=layout[0], options=SaveOptions(**layout[1]))
    left = count(tmp_path)
    for _ in range(2):  # the second has names of its own, too
        save({"w": np.ones(3)}, tmp_path / "fresh", format=layout[0], options=SaveOptions(**layout[1]))
    assert left == count(tmp_path / "fresh")


def part_files(path):
    return [p for p in path.rglob("*") if p.suffix == ".safetensors" or p.name.startswith(".eformer-")]


@pytest.mark.parametrize("name", ["safetensors", "tensorstore"])
def test_damage_to_what_a_process_recorded_is_an_error_that_names_the_file(tmp_path, name):
    assert save_together(Crew(2), lambda host: sharded_tree(), tmp_path, (name, {})) == [None] * 2
    for file in part_files(tmp_path):
        data = file.read_bytes()
        start = data.index(b"extents")
        for damaged in (
            data[:start] + data[start:].replace(b"[0,", b"[9,", 1),  # still JSON
            data[: start + 20],
            None,
        ):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            for look in (load, checkpoint.inspect, checkpoint.open):
                with pytest.raises(CorruptionError, match=re.escape(file.name)):
                    look(tmp_path)
            report = checkpoint.verify(tmp_path)
            assert [Path(damage.file).name for damage in report.damages] == [file.name]
            file.write_bytes(data)
    assert checkpoint.verify(tmp_path).ok


def test_a_record_of_absurd_length_is_refused(tmp_path):
    assert save_together(Crew(2), lambda host: sharded_tree(), tmp_path) == [None] * 2
    manifest = checkpoint.inspect(tmp_path)
    raw = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "")
    (tree,) = raw.trees.values()
    with open(tmp_path / tree.files[0].name, "r+b") as file:
        file.truncate(2**40)
    files = (msgspec.structs.replace(tree.files[0], nbytes=2**40, header_nbytes=2**39), *tree.files[1:])
    hostile = raw.with_tree("", msgspec.structs.replace(tree, files=files))
    (tmp_path / "manifest.json").write_bytes(hostile.to_json())
    with pytest.raises(FormatError, match=r"a record of \d+ bytes is too long"):
        load(tmp_path)
    assert not checkpoint.verify(tmp_path).ok
    assert manifest.trees


@pytest.mark.parametrize("has_table", [True, False])
def test_a_record_without_files_is_refused(tmp_path, has_table):
    assert save_together(Crew(2), lambda host: sharded_tree(), tmp_path) == [None] * 2
    raw = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "")
    (tree,) = raw.trees.values()
    tree = msgspec.structs.replace(tree, files=(), owners=tree.owners if has_table else msgspec.UNSET)
    (tmp_path / "manifest.json").write_bytes(raw.with_tree("", tree).to_json())
    says = "has the boxes of 2 files, but names 0" if has_table else "do not cover the shape"
    with pytest.raises(FormatError, match=says):
        load(tmp_path)
    assert not checkpoint.verify(tmp_path).ok


def test_a_place_that_a_process_has_joined_is_not_swept(tmp_path):
    made = LocalUpload(tmp_path)
    joined = LocalUpload(tmp_path, made.token)
    made.abandon()
    with Directory.open(tmp_path) as place:
        sweep_dead(place, ())
        assert (tmp_path / made.token).exists()
        joined.close()
        sweep_dead(place, ())
    assert not (tmp_path / made.token).exists()


def test_a_difference_in_a_large_tree_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(several, "_MOST_DESCRIBED", 1000)
    names = [f"leaf{number:05d}" for number in range(100)]

    def tree(host, odd):
        return {name: np.zeros(3 if name == odd and host.number else 2) for name in names}

    for odd, said in (
        ("leaf00003", ["leaf00003: float64[3]", "leaf00003: float64[2]"]),
        ("leaf00099", ["the leaves that were compared are the same"]),
    ):
        outcomes = save_together(Crew(2), lambda host, odd=odd: tree(host, odd), tmp_path)
        assert isinstance(outcomes[1], MismatchError)
        assert len(outcomes[1].problems) == len(said)
        for problem, text in zip(outcomes[1].problems, said, strict=True):
            assert text in problem


@pytest.mark.sample(4)
@pytest.mark.parametrize("look", ["inspect", "open", "load"])
def test_a_tree_in_parts_that_is_replaced_while_it_is_looked_at_is_the_newer_one(
    tmp_path, monkeypatch, layout, look
):
    first, second = sharded_tree(), {"new": np.arange(3.0)}
    assert save_together(Crew(2), lambda host: first, tmp_path, layout) == [None] * 2
    stale = [find.find(tmp_path)]
    assert save_together(Crew(2), lambda host: second, tmp_path, layout) == [None] * 2
    real = find.find
    monkeypatch.setattr(find, "find", lambda *given: stale.pop() if stale else real(*given))
    if look == "inspect":
        assert list(checkpoint.inspect(tmp_path).trees[""].leaves) == ["new"]
    elif look == "open":
        assert list(checkpoint.open(tmp_path)) == ["new"]
    else:
        assert list(load(tmp_path)) == ["new"]
    assert not stale
