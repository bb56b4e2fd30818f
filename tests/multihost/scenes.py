"""What the processes of a job do. Every function is called in all of them, with the same arguments."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.processes import coordination
from eformer._engine.processes import hosts as _hosts
from eformer._engine.saving import agreement as _commit
from eformer._engine.stores import local_files as files
from eformer.checkpoint import SaveOptions, inspect, load, save, save_async

_commit.VISIBLE_WITHIN = 1.0  # this machine has no network file system


# ------------------------------------------------------------------------------------------------ trees

SHAPES = {
    "rows": ((64, 8), "float32", P("x")),
    "columns": ((8, 64), "bfloat16", P(None, ("x", "y"))),
    "both": ((16, 12, 3), "int32", P("x", "y")),
    "inner": ((8, 4), "float8_e4m3fn", P("y")),
    "everywhere": ((5, 3), "float32", P()),
    "large": ((1024, 600), "float32", P(None, "y")),
    "odd": ((7,), "uint8", P()),
    "scalar": ((), "float32", P()),
    "empty": ((0, 4), "float32", P("x")),
    "bits": ((8, 8), "int4", P("x")),
}


def whole(name, version=0):
    """All of a leaf, in host memory: every bit pattern, among them nan and -0.0."""
    shape, dtype, _ = SHAPES[name]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    seed = version * 1000 + list(SHAPES).index(name)
    if kind.itemsize == 1 and dtype == "int4":
        return np.random.default_rng(seed).integers(-8, 8, shape).astype(kind)
    size = int(np.prod(shape)) * kind.itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(kind).reshape(shape)


def mesh():
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(-1, 2 if devices.size % 2 == 0 else 1), ("x", "y"))


def put(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def tree(version=0):
    """Arrays on all devices, and what every process has for itself, different in each."""
    me = jax.process_index()
    leaves = {
        name: put(whole(name, version), NamedSharding(mesh(), spec)) for name, (_, _, spec) in SHAPES.items()
    }
    return {
        "global": leaves,
        "numpy": np.arange(5, dtype=np.int32) + 100 * version + 1000 * me,
        "local": jnp.arange(3.0) + 100 * version + 1000 * me,
        "number": version,
        "text": "text",
        "none": None,
        "tuple": (np.float32(version), [np.ones(2, np.int16)]),
    }


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def check(loaded, version=0):
    """Every shard of this process, bit for bit; and what was the first process's."""
    for name, leaf in loaded["global"].items():
        expected = whole(name, version)
        assert leaf.dtype == expected.dtype, name
        for shard in leaf.addressable_shards:
            assert bits(np.asarray(shard.data)) == bits(expected[shard.index]), (name, shard.index)
    np.testing.assert_array_equal(loaded["numpy"], np.arange(5) + 100 * version)
    np.testing.assert_array_equal(np.asarray(loaded["local"]), np.arange(3.0) + 100 * version)
    assert loaded["number"] == version
    assert loaded["text"] == "text"
    assert loaded["none"] is None
    assert loaded["tuple"][0] == np.float32(version)
    assert type(loaded["tuple"]) is tuple


# ---------------------------------------------------------------------------------------- save and load


def save_tree(path, how, options, version=0):
    """Saves; returns the bytes that this process wrote."""
    options = SaveOptions(**options)
    before = written()
    if how == "async":
        save_async(tree(version), path, options=options, **format_of(path)).result(60)
    else:
        save(tree(version), path, options=options, **format_of(path))
    return written() - before


def format_of(path):
    return {"format": "tensorstore" if "tensorstore" in Path(path).name else "safetensors"}


def written():
    """The bytes that this process has handed to the kernel."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


class Counted:
    """How many bytes of checkpoints this process has read."""

    nbytes = 0

    def __init__(self):
        self.call, files.read_into = files.read_into, self

    def __call__(self, descriptor, memory, offset):
        Counted.nbytes += len(memory)
        return self.call(descriptor, memory, offset)


Counted()


def load_tree(path, spec, version=0, broadcast=False):
    """Loads on the mesh of this job, cut another way than it was saved."""
    specs = {name: P(*spec[: len(shape)]) for name, (shape, _, _) in SHAPES.items()}
    on_mesh = mesh()
    for name, (shape, _, _) in SHAPES.items():
        try:
            NamedSharding(on_mesh, specs[name]).shard_shape(shape)
        except ValueError:
            specs[name] = P()
    shardings = {"global": {name: NamedSharding(on_mesh, s) for name, s in specs.items()}}
    before = Counted.nbytes
    loaded = load(path, shardings=shardings, broadcast=broadcast)
    nbytes = Counted.nbytes - before
    check(loaded, version)
    for name, leaf in loaded["global"].items():
        assert leaf.sharding.is_equivalent_to(shardings["global"][name], leaf.ndim), name
    return nbytes


def load_everywhere(path, broadcast):
    """One large leaf, in all processes whole; returns the bytes that this one has read."""
    before = Counted.nbytes
    leaf = load(path, shardings=NamedSharding(mesh(), P()), broadcast=broadcast)
    assert bits(np.asarray(leaf.addressable_data(1))) == bits(load(path))
    return Counted.nbytes - before - leaf.nbytes


def load_much_everywhere(path):
    """More collectives than there are cores, all of which would be begun at once."""
    for leaf in load(path, shardings=NamedSharding(mesh(), P()), broadcast=True).values():
        assert (np.asarray(leaf.addressable_data(1)) == 7).all()


def load_as_saved(path, version=0):
    loaded = load(path, mesh=mesh(), shardings={"local": P()})
    check({**loaded, "local": loaded["local"].addressable_data(0)}, version)
    for name, (_, _, spec) in SHAPES.items():
        assert loaded["global"][name].sharding.is_equivalent_to(
            NamedSharding(mesh(), spec), len(SHAPES[name][0])
        )


def load_alone(path, version=0):
    """Without a mesh every process loads for itself, if it wants to."""
    if jax.process_index() != 0:
        return None
    check(load(path), version)
    return len(inspect(path).trees)


def state_nbytes():
    return sum(whole(name).nbytes for name in SHAPES)


# ---------------------------------------------------------------------------------------------- mistakes


def save_and_load_watched(path, options, rank=None):
    """What the callbacks of a save and of a load were called with; in the process `rank` that of the save fails."""
    saved, loaded = [], []

    def watch(*how_far):
        saved.append(how_far)
        if jax.process_index() == rank:
            raise ZeroDivisionError("seen enough")

    options = SaveOptions(**options, timeout=20)
    save(tree(), path, options=options, progress=watch, **format_of(path))
    load(path, mesh=mesh(), shardings={"local": P()}, progress=lambda *how_far: loaded.append(how_far))
    return saved, loaded


def save_another_tree(path, rank, kind):
    """One process saves something else."""
    saved, options = tree(), {"options": SaveOptions(timeout=20)}
    if jax.process_index() == rank:
        if kind == "leaf more":
            saved["more"] = np.ones(3)
        elif kind == "other shape":
            saved["numpy"] = np.ones(6)
        elif kind == "other dtype":
            saved["global"]["odd"] = saved["global"]["odd"].astype(jnp.int8)
        elif kind == "other sharding":
            saved["global"]["rows"] = put(whole("rows"), NamedSharding(mesh(), P("y")))
        elif kind == "unstorable leaf":
            saved["text"] = object()
        elif kind == "other number":
            saved["number"] = 7
        elif kind == "other replica":
            saved["global"]["scalar"] = put(whole("scalar", 9), NamedSharding(mesh(), P()))
        elif kind == "other compression":
            options["options"] = SaveOptions(timeout=20, compression="zstd")
        elif kind == "other order":
            saved = dict(reversed(saved.items()))
        elif kind == "other prefix":
            options["prefix"] = "other"
        elif kind == "other path":
            path = f"{path}-of-its-own"
        elif kind == "file in the way":
            Path(f"{path}-file").touch()
            path = f"{path}-file"
    started = time.monotonic()
    try:
        save(saved, path, **format_of(path), **options)
    finally:
        took.append(time.monotonic() - started)


took = []


def last_took():
    return took[-1]


def save_apart(folder):
    """The same path in all processes, which leads each of them somewhere else, as a disk of its own would."""
    own = Path(folder) / str(jax.process_index())
    own.mkdir()
    before = os.getcwd()
    os.chdir(own)
    try:
        save(tree(), "/proc/self/cwd/checkpoint", options=SaveOptions(timeout=20))
    finally:
        os.chdir(before)


def miss_a_save(path, kind):
    """One process does not make the first of two calls: the second one of it meets the first of the other."""
    outcomes = []
    for step in (10, 20):
        if jax.process_index() == 1 and step == 10:
            continue
        everywhere = NamedSharding(mesh(), P())
        step_of = {"plain": step, "replicated": put(np.float32(step), everywhere), "numpy": np.array(step)}[
            kind
        ]
        state = {"step": step_of, "w": put(np.full(8, step, np.float32), NamedSharding(mesh(), P("x")))}
        try:
            save(state, path, options=SaveOptions(timeout=3))
            outcomes.append("saved")
        except Exception as error:  # noqa: BLE001
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def save_and_load_at_once(path, rank):
    if jax.process_index() == rank:
        load(path, mesh=mesh(), shardings={"local": P()}, timeout=20)
    else:
        save(tree(), path, options=SaveOptions(timeout=20), **format_of(path))


def gather_and_fail(path, rank):
    """A function of the caller's fails in one process, before anything is saved."""
    from eformer.serialization.async_manager import AsyncCheckpointManager

    def gather(x):
        if jax.process_index() == rank:
            raise ZeroDivisionError
        return x

    manager = AsyncCheckpointManager()
    manager.save_async(tree(), path, mesh=mesh(), gather_fns={"global.rows": gather}).result(60)


def outlive_many(path, count):
    """One save takes longer than very many others together."""
    from eformer._engine.saving import safetensors_writer as safetensors

    write, go = safetensors.write_data, threading.Event()
    if jax.process_index() == 0:
        safetensors.write_data = lambda *a: (go.wait(60), write(*a))
    slow = save_async({"w": tree()["global"]["rows"]}, path, options=SaveOptions(timeout=50))
    time.sleep(0.5)
    safetensors.write_data = write
    for number in range(count):
        save({"n": number}, f"{path}-others", options=SaveOptions(timeout=50))
    go.set()
    slow.result(60)


def load_on_some(path, processes):
    """All call, but only some have devices there: the others need not wait for anybody."""
    devices = np.array([d for d in jax.devices() if d.process_index in processes])
    loaded = load(path, keys="numpy", shardings=NamedSharding(Mesh(devices, ("x",)), P()), timeout=20)
    return [np.asarray(shard.data).tolist() for shard in loaded["numpy"].addressable_shards]


def interrupted(path, rank, version):
    """Ctrl-C in one process, right after it has said what it is about to do."""
    wait, hosts = coordination.Together._wait_for, coordination.Together

    def interrupt(self, key, deadline, absent):
        if key.endswith("/1/answer"):
            raise KeyboardInterrupt
        return wait(self, key, deadline, absent)

    if jax.process_index() == rank:
        hosts._wait_for = interrupt
    started = time.monotonic()
    try:
        save(tree(version), path, options=SaveOptions(timeout=20), **format_of(path))
    except KeyboardInterrupt:
        raise RuntimeError("interrupted") from None
    finally:
        hosts._wait_for = wait
        took.append(time.monotonic() - started)


def save_and_fail_after_the_seal(path):
    """The new manifest is in place; then the first process's disk fails."""
    from eformer._engine.saving import commit as _sealing

    kept = _sealing._finish
    if jax.process_index() == 0:
        _sealing._finish = lambda *_: 1 / 0
    try:
        save(tree(3), path, options=SaveOptions(timeout=20))
    finally:
        _sealing._finish = kept


def save_what_cannot_be(path):
    started = time.monotonic()
    try:
        save({"w": object()}, path, options=SaveOptions(timeout=20))
    finally:
        took.append(time.monotonic() - started)


def save_but_one(path, rank):
    """One process does not come."""
    if jax.process_index() == rank:
        return
    started = time.monotonic()
    try:
        save(tree(), path, options=SaveOptions(timeout=1.5), **format_of(path))
    finally:
        took.append(time.monotonic() - started)


def save_and_fail_at(path, rank, step):
    """A disk fails in one process."""
    from eformer._engine.saving import commit as _sealing
    from eformer._engine.saving import run as _job
    from eformer._engine.saving import safetensors_writer as safetensors
    from eformer._engine.saving import zarr_writer as tensorstore

    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    module, name = {
        "write": (safetensors, "write_data"),
        "write arrays": (tensorstore, "_file_tasks"),
        "seal": (_sealing, "_publish"),
        "seal arrays": (tensorstore.ArraysWriter, "_write_index"),
        "place": (_job, "make_directories"),
    }[step]
    kept = getattr(module, name)
    if jax.process_index() == rank:
        setattr(module, name, broken)
    try:
        save(tree(1), path, options=SaveOptions(timeout=20), **format_of(path))
    finally:
        setattr(module, name, kept)


def load_what_only_one_sees(path, rank):
    load(path if jax.process_index() == rank else f"{path}-nowhere", mesh=mesh(), shardings={"local": P()})


def load_with_a_bad_callback(path, rank):
    """An error of the caller's own, when all have read: nobody else has to hear of it."""

    def callback(array, name):
        if jax.process_index() == rank and name == "global.rows":
            raise ZeroDivisionError
        return array

    load(path, mesh=mesh(), shardings={"local": P()}, callback=callback)


# ----------------------------------------------------------------------------- numbers that become arrays


def load_steps(path, broadcast):
    """A number becomes an array on the devices of all processes, and such an array a number."""
    everywhere = NamedSharding(mesh(), P())
    array = put(np.array(7, np.int32), everywhere)
    save({"a": 7, "b": array}, path, **format_of(path))
    like = {"a": jax.ShapeDtypeStruct((), np.int32, sharding=everywhere), "b": 0}
    loaded = load(path, like=like, broadcast=broadcast)
    assert loaded["a"].sharding == everywhere
    assert all(int(shard.data) == 7 for shard in loaded["a"].addressable_shards)
    assert (type(loaded["b"]), loaded["b"]) == (int, 7)


# ------------------------------------------------------------------------------------------ some of them


def save_some(path, processes, version=0):
    """Only some processes take part; the others do not even call."""
    if jax.process_index() not in processes:
        return None
    devices = np.array([d for d in jax.devices() if d.process_index in processes])
    sharding = NamedSharding(Mesh(devices, ("x",)), P("x"))
    state = {"w": put(np.arange(16.0, dtype=np.float32) + version, sharding), "n": np.arange(3)}
    save(state, path, options=SaveOptions(processes=tuple(processes), timeout=20), **format_of(path))
    loaded = load(path, like={"w": sharding, "n": np.zeros(3, int)})
    for shard in loaded["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (np.arange(16.0) + version)[shard.index])
    return len(loaded["w"].addressable_shards)


def save_alone_what_all_have(path):
    options = SaveOptions(processes=(jax.process_index(),))
    save(tree(), f"{path}-{jax.process_index()}", options=options, **format_of(path))


def save_own(path):
    """Each process for itself, at a place of its own."""
    mine = f"{path}-{jax.process_index()}"
    state = {"me": jax.process_index(), "x": jnp.ones(3) * jax.process_index(), "n": np.arange(3)}
    save(state, mine, options=SaveOptions(processes=(jax.process_index(),)), **format_of(path))
    loaded = load(mine)
    return loaded["me"], float(loaded["x"][0])


def save_stages(path):
    """Each leaf lies on the devices of one process alone, as the stages of a pipeline do."""
    state = {}
    for process in range(jax.process_count()):
        devices = np.array([d for d in jax.devices() if d.process_index == process])
        host = np.arange(8.0, dtype=np.float32) + 10 * process
        sharding = NamedSharding(Mesh(devices, ("x",)), P("x"))
        state[f"stage-{process}"] = put(host, sharding)
        state[f"replica-{process}"] = put(host, NamedSharding(Mesh(devices, ("x",)), P()))
    some = np.array([d for d in jax.devices() if d.process_index in (1, 2)])
    state["few"] = put(np.arange(3, dtype=np.float32), NamedSharding(Mesh(some, ("x",)), P()))
    save(state, path, options=SaveOptions(timeout=20), **format_of(path))


# ------------------------------------------------------------------------------------------- front doors


def use_manager(path, arguments):
    from eformer.serialization.async_manager import AsyncCheckpointManager

    called = []
    with AsyncCheckpointManager(**arguments) as manager:
        manager.save(tree(), path, mesh=mesh(), prefix="m", callback=called.append, metadata={"a": 1})
        manager.save_async(tree(1), path, mesh=mesh(), prefix="m", callback=called.append)
        manager.wait_until_finished()
        rules = [("local", P()), ("rows", P("y", "x")), (".*", P())]
        loaded, metadata = manager.load(path, mesh(), partition_rules=rules, prefix="m")
    assert called == [str(path), str(path)]
    assert metadata["version"]
    loaded["number"] = int(loaded["number"])
    check(
        {
            **loaded,
            "local": loaded["local"].addressable_data(0),
            "numpy": np.asarray(loaded["numpy"].addressable_data(0)),
            "tuple": (loaded["tuple"][0], loaded["tuple"][1]),
        },
        1,
    )


def save_gathered(path, arguments):
    from eformer.serialization.async_manager import AsyncCheckpointManager

    AsyncCheckpointManager(**arguments).save(tree(), path, mesh=mesh(), do_all_gather=True)


def serialize_leaves(path, with_manager, write_index):
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves

    called = []
    manager = GlobalAsyncCheckpointManager(30) if with_manager else None
    for version in (0, 1) if write_index else (1,):
        saved = tree(version)
        tree_serialize_leaves(
            path,
            saved,
            manager,
            prefix="m",
            commit_callback=lambda: called.append(1),
            write_index=write_index,
        )
        for leaf in jax.tree.leaves(saved["global"]):
            leaf.delete()
    if manager:
        manager.wait_until_finished()
        deadline = time.monotonic() + 20
        while len(called) < (2 if write_index else 1) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(called) == (2 if write_index else 1)
    rules = [("local", P()), ("rows", P("x", "y")), (".*", P())]
    loaded = tree_deserialize_leaves(path, mesh(), manager, prefix="m", partition_rules=rules)
    for name in SHAPES:
        if write_index or name != "bits":  # without an index nobody knows that they are four-bit numbers
            for shard in loaded["global"][name].addressable_shards:
                assert bits(np.asarray(shard.data)) == bits(whole(name, 1)[shard.index]), name
    np.testing.assert_array_equal(loaded["local"].addressable_data(0), np.arange(3.0) + 100)


def broadcast(limit):
    from eformer.serialization.utils import broadcast_tensor

    me = jax.process_index()
    for name in SHAPES:
        host = whole(name) if me == 0 else np.zeros_like(whole(name))
        received = broadcast_tensor(host, limit)
        assert bits(np.asarray(received)) == bits(whole(name)), name
    key = broadcast_tensor(jax.random.key(7 + me), limit)
    assert bits(np.asarray(jax.random.key_data(key))) == bits(
        np.asarray(jax.random.key_data(jax.random.key(7)))
    )
    sharding = NamedSharding(mesh(), P("x"))
    spread = broadcast_tensor(np.arange(16.0, dtype=np.float32) + me, limit, sharding)
    assert spread.sharding.is_equivalent_to(sharding, 1)
    for shard in spread.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(16.0)[shard.index])
    again = broadcast_tensor(spread, limit)
    assert again is spread


def gather_all():
    from eformer.serialization.utils import apply_gather_functions

    gathered = apply_gather_functions(tree()["global"], True, False, False)
    for name, leaf in gathered.items():
        if name != "bits":
            assert bits(leaf) == bits(whole(name)), name


# -------------------------------------------------------------------------------------------- under way


def save_many_at_once(path, count):
    """Saves under way to one place and to others; the last one of each stays."""
    pending = []
    for version in range(count):
        saved = tree(version)
        pending.append(save_async(saved, path, **format_of(path)))
        pending.append(save_async({"v": version}, path, prefix="other", **format_of(path)))
        pending.append(save_async(saved["global"], f"{path}-{version}", **format_of(path)))
        for leaf in jax.tree.leaves(saved["global"]):
            leaf.delete()
    for one in pending:
        one.result(60)
    assert load(path, prefix="other") == {"v": count - 1}
    return load_as_saved_of(path, count - 1)


def load_as_saved_of(path, version):
    loaded = load(path, prefix="", mesh=mesh(), shardings={"local": P()})
    check({**loaded, "local": loaded["local"].addressable_data(0)}, version)


def save_while_others_load(path, rounds):
    """Process 0 replaces the checkpoint again and again, alone, while all load it together: never a mixture."""
    sharding = NamedSharding(mesh(), P("x"))
    seen = set()
    for version in range(1, rounds + 1):
        pending = None
        if jax.process_index() == 0:
            state = {f"w{i}": np.full(64, version, np.float32) for i in range(20)}
            pending = save_async(state, path, options=SaveOptions(processes=(0,)), **format_of(path))
        loaded = load(path, shardings=sharding)
        mine = {
            float(x) for leaf in loaded.values() for s in leaf.addressable_shards for x in np.asarray(s.data)
        }
        assert len(mine) == 1, mine
        seen.add(mine.pop())
        seen_by_all.append(max(seen))
        if pending:
            pending.result(60)
    return seen_by_all[-rounds:]


seen_by_all = []


def prepare_for_loads(path):
    if jax.process_index() == 0:
        save(
            {f"w{i}": np.full(64, 0, np.float32) for i in range(20)},
            path,
            options=SaveOptions(processes=(0,)),
            **format_of(path),
        )


def save_for_ever(path, how):
    """Until somebody kills it. What is committed is noted."""
    version = 0
    with open(f"{path}-progress-{jax.process_index()}", "w") as progress:
        while True:
            version += 1
            if how == "sync":
                save(tree(version), path, **format_of(path))
            else:
                save_async(tree(version), path, **format_of(path)).result()
            progress.write(f"{version}\n")
            progress.flush()


def meet_often(times, nbytes):
    """Everyone's message reaches the first, whose answer reaches everyone."""
    for number in range(times):
        hosts = _hosts.current("tests")
        mine = bytes([hosts.index]) * nbytes
        answer = hosts.meet(mine, lambda messages, n=number: bytes([n % 256]) * nbytes + b"".join(messages))
        assert answer == bytes([number % 256]) * nbytes + b"".join(
            bytes([i]) * nbytes for i in range(hosts.count)
        )


def count_entries():
    return len(coordination.service_client().key_value_dir_get_bytes("eformer"))
