"""Processes that save and load: all of them, some of them, again and again."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.formats import process_records
from eformer._engine.processes import hosts as _hosts
from eformer._engine.saving import several
from eformer._engine.stores import local_files as files
from eformer.checkpoint import SaveOptions, inspect, load, save, save_async
from eformer.errors import ProcessError
from multihost.scenes.state import SHAPES, bits, check, format_of, mesh, put, tree, whole
from support.cancelling import Cancelling
from support.faults import hooked

several.VISIBLE_WITHIN = 1.0  # this machine has no network file system


# --------------------------------------------------------------------------------------- save and load


def save_tree(path, how, options, version=0):
    """Saves; returns the bytes that this process wrote."""
    options = SaveOptions(**options)
    before = written()
    if how == "async":
        save_async(tree(version), path, options=options, **format_of(path)).result(60)
    else:
        save(tree(version), path, options=options, **format_of(path))
    return written() - before


def save_dotted(path):
    """Saves a dict whose keys have dots: leaves that the first process writes, and leaves that all write."""
    leaf = put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh(), P("x")))
    save({"a.b": np.ones(2), "c.d": leaf, "x.y.w": leaf, "c": {"d": np.ones(3)}}, path)


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
    loaded = load(path, shardings=shardings, options={"broadcast": broadcast})
    nbytes = Counted.nbytes - before
    check(loaded, version)
    for name, leaf in loaded["global"].items():
        assert leaf.sharding.is_equivalent_to(shardings["global"][name], leaf.ndim), name
    return nbytes


def load_everywhere(path, broadcast):
    """One large leaf, in all processes whole; returns the bytes that this one has read."""
    before = Counted.nbytes
    leaf = load(path, shardings=NamedSharding(mesh(), P()), options={"broadcast": broadcast})
    assert bits(np.asarray(leaf.addressable_data(1))) == bits(load(path))
    return Counted.nbytes - before - leaf.nbytes


def load_much_everywhere(path):
    """More collectives than there are cores, all of which would be begun at once."""
    for leaf in load(path, shardings=NamedSharding(mesh(), P()), options={"broadcast": True}).values():
        assert (np.asarray(leaf.addressable_data(1)) == 7).all()


def load_as_saved(path, version=0):
    loaded = load(path, mesh=mesh(), shardings={"local": P()})
    check({**loaded, "local": loaded["local"].addressable_data(0)}, version)
    for name, (_, _, spec) in SHAPES.items():
        assert loaded["global"][name].sharding.is_equivalent_to(
            NamedSharding(mesh(), spec), len(SHAPES[name][0])
        )


def save_and_load_rows(path):
    """Saves rows, loads them as they were; returns how many records this process has read."""
    numbers, read = [], process_records._read

    def watched(tree, number, *how):
        numbers.append(number)
        return read(tree, number, *how)

    rows = {f"w{i}": put(whole("rows", i), NamedSharding(mesh(), P("x"))) for i in range(5)}
    save(rows, path, **format_of(path))
    process_records._read = watched
    try:
        loaded = load(path, like=rows)
    finally:
        process_records._read = read
    for i in range(5):
        for shard in loaded[f"w{i}"].addressable_shards:
            assert bits(np.asarray(shard.data)) == bits(whole("rows", i)[shard.index])
    return len(numbers)


def load_alone(path, version=0):
    """Without a mesh every process loads for itself, if it wants to."""
    if jax.process_index() != 0:
        return None
    check(load(path), version)
    return len(inspect(path).trees)


def load_inside_of_set_mesh(path):
    """The mesh counts where an argument needs one; a load that says nothing is still one process's own."""
    with jax.set_mesh(mesh()):
        rows = load(path, rules=[("global/rows", P("x"))], options={"broadcast": True})["global"]["rows"]
        assert rows.sharding == NamedSharding(mesh(), P("x"))
        if jax.process_index() == 0:
            check(load(path))


def save_and_load_weak(path):
    rate = jax.jit(lambda: jnp.full(8, 0.5), out_shardings=NamedSharding(mesh(), P("x")))()
    save({"rate": rate}, path, **format_of(path))
    loaded = load(path, mesh=mesh())["rate"]
    assert loaded.weak_type
    assert (loaded.aval, loaded.sharding) == (rate.aval, rate.sharding)


# -------------------------------------------------------------------------- numbers that become arrays


def load_steps(path, broadcast):
    """A number becomes an array on the devices of all processes, and such an array a number."""
    everywhere = NamedSharding(mesh(), P())
    array = put(np.array(7, np.int32), everywhere)
    save({"a": 7, "b": array}, path, **format_of(path))
    like = {"a": jax.ShapeDtypeStruct((), np.int32, sharding=everywhere), "b": 0}
    loaded = load(path, like=like, options={"broadcast": broadcast})
    assert loaded["a"].sharding == everywhere
    assert all(int(shard.data) == 7 for shard in loaded["a"].addressable_shards)
    assert (type(loaded["b"]), loaded["b"]) == (int, 7)


# ---------------------------------------------------------------------------------------- some of them


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


# ------------------------------------------------------------------------------------------- under way


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
        mine = bytes([hosts.number]) * nbytes
        answer = hosts.meet(mine, lambda messages, n=number: bytes([n % 256]) * nbytes + b"".join(messages))
        assert answer == bytes([number % 256]) * nbytes + b"".join(
            bytes([i]) * nbytes for i in range(hosts.count)
        )


def count_entries():
    return len(_hosts.service_client().key_value_dir_get_bytes("eformer"))


def load_renamed(path, weights):
    """Loads layers of another program stacked and transposed; returns the bytes that this process read."""
    rules = {r"layers\.(\d+)": r"kernel | transpose | stack \1", "embed": "embed"}
    like = {
        "kernel": jax.ShapeDtypeStruct((4, 64, 96), jnp.float32, sharding=NamedSharding(mesh(), P("x"))),
        "embed": jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=NamedSharding(mesh(), P("y", "x"))),
        "head": jnp.full(3, 7.0),
    }
    before = Counted.nbytes
    resize = {"embed": lambda array, leaf: np.resize(array, leaf.shape)}
    found = load(path, like=like, rename=rules, partial=True, resize=resize)
    nbytes = Counted.nbytes - before
    expected = {
        "kernel": np.stack([weights[f"layers.{n}"].T for n in range(4)]),
        "embed": np.resize(weights["embed"], (128, 64)),
    }
    for name, array in expected.items():
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])
    return nbytes, found["head"] is like["head"]


def load_dense(path, expected):
    """Loads a quantised weight as numbers onto the devices of all processes; returns the bytes that this one read."""
    before = Counted.nbytes
    found = load(path, dequant="bf16", mesh=mesh(), rules=[("a", P("x"))])
    for shard in found["a"]["weight"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return Counted.nbytes - before


# ------------------------------------------------------------------------------------------- cancel


def save_cancelled(path, rank, at):
    """Save in the background; one rank cancels before its call number `at`. Return the answer of `cancel`, and the name
    and text of the error of every rank."""
    cancelling = Cancelling(at if jax.process_index() == rank else 0)
    try:
        with hooked(before=cancelling):
            cancelling.save(tree(1), path, options=SaveOptions(timeout=30), **format_of(path))
    except (CancelledError, ProcessError) as error:
        return cancelling.was_stopped, type(error).__name__, str(error)
    return cancelling.was_stopped, "", ""
