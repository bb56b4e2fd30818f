"""Loads through a few slots of memory, as accelerators have them; here the slots are so placed that a CPU copies, too."""

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.loading import fetch, large_leaves, pinned_stream, placement, slot_split
from eformer._engine.record.boxes import Box
from eformer._engine.saving import commit as _record
from eformer._engine.stores.local_files import LocalFiles
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError
from support.damage import flip
from support.hosts import Crew, save_together
from support.trees import assert_same

pytestmark = pytest.mark.sample(3)


@pytest.fixture
def slots(monkeypatch):
    """All CPU devices count as accelerators. Yields the slots that are made, with what they are locked for."""
    made = []
    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", 2**18)
    monkeypatch.setattr(pinned_stream, "_WORTH_IT", 0)
    on_cpu = lambda target: None if target.as_numpy else _device_of(target.sharding)  # noqa: E731
    monkeypatch.setattr(pinned_stream, "accelerator_of", on_cpu)

    def unaligned(nbytes):
        memory = np.empty(nbytes + 128, np.uint8)
        start = 16 - memory.__array_interface__["data"][0] % 64
        made.append(memory[start % 64 :][:nbytes])
        return made[-1]

    # XLA would alias aligned memory, which no accelerator does; a part of unaligned memory may be aligned.
    monkeypatch.setattr(pinned_stream, "aligned", unaligned)
    monkeypatch.setattr(placement, "_WORTH_READING_PARTS", 0)
    return made


def _device_of(sharding):
    return jax.devices()[0] if sharding is None else next(iter(sharding.addressable_devices))


def normal(*shape):
    """Numbers of numpy's making: JAX would compile a program for every shape."""
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


@pytest.fixture
def tree():
    layers = [{"w": normal(250, 200 + i), "b": jnp.full(3, i)} for i in range(24)]
    return {"layers": layers, "host": np.arange(1000), "key": jax.random.key(3), "step": 7}


def test_a_tree_comes_back_through_a_few_slots(tmp_path, slots, tree):
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)
    assert [len(slot) for slot in slots] == [2**18] * 4


def test_numbers_and_arrays_without_axes_are_what_like_has(tmp_path, slots, tree):
    save(tree | {"count": jnp.int32(5)}, tmp_path)
    for numbers in ({"count": 5, "step": 7}, {"count": jnp.int32(5), "step": jnp.int32(7)}):
        expected = jax.tree.map(lambda leaf: leaf, tree | numbers)  # in JAX's order
        assert_same(load(tmp_path, like=expected, progress=lambda done, total: None), expected)


@pytest.mark.thorough
def test_every_sharding_and_dtype_comes_back(tmp_path, slots, tree):
    save(tree, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    loaded = load(tmp_path, mesh=mesh, rules=[("w", jax.sharding.PartitionSpec("x"))], dtype="bfloat16")
    expected = [np.asarray(layer["w"].astype(jnp.bfloat16)) for layer in tree["layers"]]
    for layer, values in zip(loaded["layers"], expected, strict=True):
        assert layer["w"].sharding.spec == jax.sharding.PartitionSpec("x")
        np.testing.assert_array_equal(np.asarray(layer["w"]), values)
    assert slots


SHAPES = [(2**20,), (3, 1001, 301), (2, 2**18), (1, 2, 3, 70_000), (5, 999, 13, 7), (70_001, 3)]
KINDS = ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn"]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("shape", "kind"), [*((shape, "float32") for shape in SHAPES), *zip(SHAPES[1:5], KINDS[1:], strict=True)]
)
def test_a_large_leaf_arrives_in_parts_bit_for_bit(tmp_path, slots, shape, kind):
    bits = np.random.default_rng(0).integers(0, 256, np.prod(shape) * jnp.dtype(kind).itemsize, np.uint8)
    array = (bits % 2 if kind == "bool" else bits).view(jnp.dtype(kind)).reshape(shape)
    save({"large": array, "small": np.arange(10, dtype=np.int32)}, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    whole = jax.NamedSharding(mesh, jax.P())
    places = [jax.sharding.SingleDeviceSharding(jax.devices()[1]), whole]
    if shape[0] % 2 == 0:
        places.append(jax.NamedSharding(mesh, jax.P("x")))
    for place in places:
        loaded = load(tmp_path, shardings=place)["large"]
        assert (loaded.sharding, loaded.committed) == (place, True)
        assert np.asarray(loaded).tobytes() == array.tobytes()
    assert all(len(slot) <= 2**18 for slot in slots)


@pytest.mark.parametrize("is_early", [True, False])  # the error is there before the program is asked for
def test_a_program_that_cannot_be_compiled_fails_one_load_only(tmp_path, slots, monkeypatch, is_early):
    tree = {"large": jnp.arange(2**20 + 128 + is_early)}
    save(tree, tmp_path)

    def fail(*_):
        raise MemoryError("no room to compile")

    with monkeypatch.context() as broken:
        broken.setattr(large_leaves._lax, "dynamic_update_slice", fail)
        if is_early:
            broken.setattr(threading.Thread, "start", start_and_wait_for_compilers)
        with pytest.raises(MemoryError, match="no room to compile"):
            load(tmp_path)
        for thread in threading.enumerate():
            if thread.name == "eformer-compile":
                thread.join()
    assert_same(load(tmp_path), tree)


def start_and_wait_for_compilers(thread, start=threading.Thread.start):
    start(thread)
    if thread.name == "eformer-compile":
        thread.join()


def test_a_large_leaf_of_the_default_device_may_be_moved(tmp_path, slots):
    tree = {"large": jnp.arange(2**20)}
    save(tree, tmp_path)
    loaded = load(tmp_path)
    assert_same(loaded, tree)
    assert not loaded["large"].committed


@pytest.mark.thorough
def test_a_large_leaf_that_was_saved_in_shards_arrives_in_parts(tmp_path, slots):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    numbers = np.random.default_rng(1).standard_normal((800, 1200), np.float32)
    for spec in (jax.P("x", "y"), jax.P(None, ("y", "x"))):
        save({"w": jax.device_put(numbers, jax.NamedSharding(mesh, spec))}, tmp_path, overwrite=True)
        for wanted in (jax.P(), jax.P("y")):
            loaded = load(tmp_path, shardings=jax.NamedSharding(mesh, wanted))["w"]
            np.testing.assert_array_equal(np.asarray(loaded), numbers)


def test_boxes_that_several_processes_wrote_in_another_order_come_to_their_places(
    tmp_path, slots, monkeypatch
):
    """The first file has the second half of `b` behind `a`."""
    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", 2**24)
    tree = {name: np.arange(2**19, dtype=np.int32) for name in ("a", "a2")}
    tree["b"] = np.arange(2**20, dtype=np.int32).reshape(1024, 1024)
    rolled = jax.sharding.Mesh(np.roll(np.array(jax.devices()), 4), ("x",))
    save_together(Crew(2), lambda host: on_mesh(tree, rolled), tmp_path, ("safetensors", {}))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    expected = on_mesh(tree, mesh)
    assert_same(load(tmp_path, like=expected), expected)


def on_mesh(tree, mesh):
    """Replicate arrays of one axis, and cut the others by rows."""
    spec = {1: jax.P(), 2: jax.P("x")}
    return {name: jax.device_put(a, jax.NamedSharding(mesh, spec[a.ndim])) for name, a in tree.items()}


def test_boxes_of_odd_sizes_are_counted_with_the_memory_between_them(tmp_path, slots, monkeypatch):
    """Leaves that are read together into a slot must all be in it."""
    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", 2**23)
    odd = np.arange(8 * (2**16 + 2), dtype=np.int32).reshape(8, -1)
    rest = 2**23 - odd.nbytes - 2**22
    tree = {"0": odd, "1": np.arange(2**20, dtype=np.int32), "2": np.arange(rest // 4, dtype=np.int32)}
    save(tree, tmp_path)
    expected = on_mesh(tree, jax.sharding.Mesh(np.array(jax.devices()), ("x",)))
    assert_same(load(tmp_path, like=expected), expected)


@pytest.mark.sample(6)
@pytest.mark.parametrize("spec", [jax.P(), jax.P("x"), jax.P(None, "x")])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_large_leaf_is_read_once_however_it_is_cut(tmp_path, slots, monkeypatch, spec, compression):
    """Columns lie in the same pieces, and an encoded chunk is read as a whole."""
    monkeypatch.setattr(_record, "PIECE_BYTES", 2**12)
    numbers = np.random.default_rng(0).integers(0, 256, (4096, 512), np.uint8)
    options = SaveOptions(compression=compression)
    save({"w": jnp.asarray(numbers)}, tmp_path, format="tensorstore", options=options)
    nbytes, read_into = [], LocalFiles.read_into

    def counted(files, number, memory, offset):
        nbytes.append(len(memory))
        return read_into(files, number, memory, offset)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    loaded = load(tmp_path, shardings=jax.NamedSharding(mesh, spec))["w"]
    np.testing.assert_array_equal(np.asarray(loaded), numbers)
    assert sum(nbytes) < 1.1 * numbers.nbytes


@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 4000),
    st.integers(1, 900),
)
def test_parts_are_disjoint_cover_their_box_and_fit(shape, itemsize, most, block):
    start = tuple(range(len(shape)))
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    parts = large_leaves._cut(box, itemsize, max(most, itemsize), block)
    assert all(part.size * itemsize <= max(most, itemsize) for part in parts)
    seen = np.zeros(shape, int)
    for part in parts:
        seen[part.inside(box).slices] += 1
    assert (seen == 1).all()


@pytest.mark.sample(6)
@pytest.mark.parametrize("large", [[100_000], [100_000, 80_000, 70_000], [250_000], [2**20, 2**19], [2**20]])
@pytest.mark.parametrize("small", [0, 1, 24])
def test_large_leaves_and_small_ones_share_a_little_memory(tmp_path, slots, large, small):
    """What large leaves went through, small ones go through afterwards."""
    tree = {f"large{i}": jnp.arange(size) for i, size in enumerate(large)}
    tree |= {f"small{i}": normal(200, 200 + i) for i in range(small)}
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)
    assert sum(len(slot) for slot in slots) <= 2**21


@pytest.mark.parametrize("size", [10, 2**18])
def test_leaves_of_another_shape_are_resized(tmp_path, slots, size):
    save({"b": jnp.arange(size), "w": jnp.arange(2 * size)}, tmp_path)
    like = {"b": jnp.zeros(size, jnp.int32), "w": jnp.zeros(size, jnp.int32)}
    loaded = load(tmp_path, like=like, resize={"w": lambda stored, leaf: stored[: leaf.size] + 1})
    assert_same(loaded, {"b": jnp.arange(size), "w": jnp.arange(size) + 1})


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [10, 2**16, 2**18])
@pytest.mark.parametrize("place", [None, jax.P(), jax.P("x")])
def test_64_bits_that_only_the_calling_thread_has_stay_64_bits(tmp_path, slots, size, place):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    wide = {"f": np.arange(size) + 1e-12, "i": np.arange(size) + 2**40, "z": np.full(size, 1e300 + 1j)}
    with jax.enable_x64(True):
        tree = jax.device_put(wide, None if place is None else jax.NamedSharding(mesh, place))
        save(tree, tmp_path)
        assert_same(load(tmp_path, like=tree), tree)


@pytest.mark.parametrize("size", [10, 2**18])
@pytest.mark.parametrize("default", [0, 2])
def test_leaves_without_a_sharding_go_to_the_default_device(tmp_path, slots, size, default):
    """Wherever the first leaf goes."""
    save({"a": jnp.arange(size), "b": jnp.arange(size)}, tmp_path)
    first, second = jax.devices()[3], jax.devices()[default]
    with jax.default_device(second):
        loaded = load(tmp_path, shardings={"a": jax.sharding.SingleDeviceSharding(first)})
    assert [leaf.devices() for leaf in loaded.values()] == [{first}, {second}]
    assert not loaded["b"].committed


@pytest.mark.parametrize("size", [0, 1, 250_000])
def test_empty_leaves_need_a_turn_but_no_memory(tmp_path, slots, size):
    tree = {"large": jnp.arange(size), "empty": jnp.zeros((0, 3)), "void": jnp.zeros((2, 0))}
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)


def test_damage_is_an_error_and_ends_every_lane(tmp_path, slots, tree):
    save(tree, tmp_path)
    flip(tmp_path / "model.safetensors", -200_000)
    with pytest.raises(CorruptionError, match="leaf 'layers"):
        load(tmp_path)


@pytest.mark.parametrize("moment", ["read", "arrive"])
def test_an_interrupt_ends_every_thread(tmp_path, slots, tree, monkeypatch, moment):
    """Wherever it comes: a thread that waits for a slot would wait for ever."""
    save(tree, tmp_path)
    calls = itertools.count()

    def interrupted(function):
        def call(*args):
            if next(calls) == 5:
                raise KeyboardInterrupt
            time.sleep(0.01)
            return function(*args)

        return call

    where = (fetch.Fetching, "carry_out") if moment == "read" else (pinned_stream, "assemble")
    monkeypatch.setattr(*where, interrupted(getattr(*where)))
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name == "eformer-io"]


def test_memory_is_locked_once_a_slot_and_unlocked_at_the_end(tmp_path, slots, tree, monkeypatch):
    calls = []

    class Client:
        def dma_map(self, address, nbytes):
            calls.append(("map", address))

        def dma_unmap(self, address):
            calls.append(("unmap", address))

    class Device:
        client = Client()

    locked = pinned_stream.page_locked
    monkeypatch.setattr(pinned_stream, "page_locked", lambda memory, device: locked(memory, Device()))
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)
    mapped = sorted(address for call, address in calls if call == "map")
    assert 0 < len(mapped) == len(set(mapped))
    assert set(mapped) <= {slot.__array_interface__["data"][0] for slot in slots}
    assert sorted(address for call, address in calls if call == "unmap") == mapped


def test_memory_is_not_unlocked_while_a_device_copies_from_it(tmp_path, slots, tree, monkeypatch):
    """Not even if the load fails."""
    moved, waited, missed = [], [], []

    class Client:
        def dma_map(self, address, nbytes):
            pass

        def dma_unmap(self, address):
            missed[:] = [name for name, array in moved if not any(array is other for other in waited)]

    class Device:
        client = Client()

    def assembled(targets, put):
        if len(moved) > 10:
            raise MemoryError("no room on the device")
        arrays = assemble(targets, put)
        moved.extend(arrays.items())
        return arrays

    assemble, locked = pinned_stream.assemble, pinned_stream.page_locked
    monkeypatch.setattr(pinned_stream, "assemble", assembled)
    monkeypatch.setattr(pinned_stream, "page_locked", lambda memory, device: locked(memory, Device()))
    monkeypatch.setattr(pinned_stream, "wait_for", waited.extend)
    save(tree, tmp_path)
    with pytest.raises(MemoryError, match="no room on the device"):
        load(tmp_path)
    assert moved
    assert missed == []


def test_memory_stays_locked_if_an_error_comes_after_a_transfer_from_it_began(tmp_path, slots, monkeypatch):
    begun, unlocked = [], []

    class Client:
        def dma_map(self, address, nbytes):
            pass

        def dma_unmap(self, address):
            unlocked.append(address)

    class Device:
        client = Client()

    def assembled(targets, put):
        begun.extend(address_of(array) for target in targets for array in target.arrays)
        assemble(targets, put)
        raise MemoryError("no room on the device")

    assemble, locked = pinned_stream.assemble, pinned_stream.page_locked
    monkeypatch.setattr(pinned_stream, "assemble", assembled)
    monkeypatch.setattr(pinned_stream, "page_locked", lambda memory, device: locked(memory, Device()))
    monkeypatch.setattr(pinned_stream, "_kept", kept := [])
    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", 2**22)
    save({f"w{n}": normal(n + 1000, 500) for n in range(9)}, tmp_path)  # larger than pieces: read into slots
    with pytest.raises(MemoryError, match="no room on the device"):
        load(tmp_path)
    used = {address_of(slot) for slot in slots if any(0 <= a - address_of(slot) < len(slot) for a in begun)}
    assert used == {address_of(memory) for memory, _ in kept}
    assert used
    assert used.isdisjoint(unlocked)


def address_of(array):
    return array.__array_interface__["data"][0]


def test_progress_is_told_and_what_it_raises_stops_the_load(tmp_path, slots, tree):
    save(tree, tmp_path)
    told = []
    load(tmp_path, progress=lambda *how_far: told.append(how_far))
    total = checkpoint.inspect(tmp_path).trees[""].nbytes
    assert told[-1] == (total, total)
    assert told == sorted(told)
    with pytest.raises(FileNotFoundError, match=r"^mine$"):
        load(tmp_path, progress=_raise)
    assert slots


def _raise(done, total):
    raise FileNotFoundError("mine")


# ------------------------------------------------------------------------------------- slots that are split


@pytest.fixture
def split(monkeypatch, slots):
    """Slots of 8 MiB, each of which holds five leaves of 1.5 MiB. Yields the names of the leaves that are moved one by
    one; programs are waited for."""
    one_by_one, assembled, program = [], pinned_stream.assemble, slot_split._program

    def assemble(targets, put):
        one_by_one.extend(target.name for target in targets)
        return assembled(targets, put)

    def compiled(*key):
        future = program(*key)
        future.exception()
        return future

    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", 2**23)
    monkeypatch.setattr(pinned_stream, "assemble", assemble)
    monkeypatch.setattr(slot_split, "_program", compiled)
    return one_by_one


@pytest.fixture
def unwaited(monkeypatch, split):
    """Yields the inputs of programs that were not waited for before, in the thread that started the program."""
    waited, missed = [], []
    wait = pinned_stream.wait_for

    def waiting(arrays):
        wait(arrays)
        waited.extend((threading.get_ident(), array) for array in arrays)  # alive, so that ids stay theirs

    def checked(future):
        program, noted = future.result(), Future()

        def run(*arrays):
            known = {(thread, id(array)) for thread, array in waited}
            missed.extend(
                array
                for array in arrays
                if isinstance(array, np.ndarray)  # which the program transfers itself
                or (id(array) in sent and (threading.get_ident(), id(array)) not in known)
            )
            runs.append(program)
            return program(*arrays)

        noted.set_result(run)
        return noted

    def sending(put):
        def call(*args):
            arrays = put(*args)
            sent.update((id(array), array) for array in arrays)
            return arrays

        return call

    runs, sent = [], {}
    monkeypatch.setattr(pinned_stream, "wait_for", waiting)
    for module in (slot_split, large_leaves):
        program = module._program
        monkeypatch.setattr(
            module, "_program", lambda *key, program=program, **more: checked(program(*key, **more))
        )
        for put in ("put_on", "put_on_default"):
            monkeypatch.setattr(module, put, sending(getattr(module, put)))
    yield missed
    assert runs, "no program ran"


@pytest.mark.sample(6)
@pytest.mark.parametrize("place", [None, jax.P(), jax.P("x")])
@pytest.mark.parametrize("shape", [(768, 1024), (4096, 4096)])
def test_no_program_reads_an_array_before_its_thread_has_waited_for_it(tmp_path, unwaited, shape, place):
    """An accelerator that other threads use may start it before the bytes have arrived."""
    tree = {f"leaf{n:02}": bits(np.int16, n, shape) for n in range(6 if shape[0] > 1024 else 40)}
    save(jax.tree.map(jnp.asarray, tree), tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1] if shape[0] < 1024 else jax.devices()[:2]), ("x",))
    loaded = load(tmp_path, shardings=None if place is None else jax.NamedSharding(mesh, place))
    assert_same(jax.tree.map(np.asarray, loaded), tree)
    assert unwaited == []


def bits(kind, number, shape=(768, 1024)):
    found = np.random.default_rng(number).integers(0, 256, (*shape, jnp.dtype(kind).itemsize), np.uint8)
    return found.view(kind)[..., 0]


@pytest.mark.parametrize("place", ["default", "device", "mesh"])
def test_leaves_of_one_slot_are_moved_together_bit_for_bit(tmp_path, split, place):
    kinds = [jnp.bfloat16, np.int16, np.float16, jnp.bfloat16, np.uint16]
    tree = {f"leaf{n:02}": bits(kinds[n % 5], n) for n in range(20)} | {"small": np.arange(4, dtype=np.int32)}
    save(jax.tree.map(jnp.asarray, tree), tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1:2]), ("x",))
    places = {
        "default": None,
        "device": jax.sharding.SingleDeviceSharding(jax.devices()[1]),
        "mesh": jax.NamedSharding(mesh, jax.P()),
    }
    loaded = load(tmp_path, shardings=places[place])
    assert split == ["small"]
    for name, array in tree.items():
        assert np.asarray(loaded[name]).tobytes() == array.tobytes(), name
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].committed == (place != "default")
        assert place == "default" or loaded[name].sharding == places[place]


def test_leaves_that_no_program_can_make_are_moved_one_by_one(tmp_path, split, monkeypatch):
    tree = {f"leaf{n:02}": jnp.asarray(bits(np.uint8, n, (1536, 1024)) % 2 == 0) for n in range(20)}
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)
    assert len(split) == 20


def test_leaves_are_moved_one_by_one_while_there_is_no_program(tmp_path, split, monkeypatch):
    def fail(*_):
        raise ValueError("no")

    tree = {f"leaf{n:02}": jnp.asarray(bits(np.uint16, n, (769, 1024))) for n in range(20)}
    save(tree, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(slot_split, "_array", fail)
        assert_same(load(tmp_path), tree)
    assert len(split) == 20


def test_leaves_of_one_slot_may_be_on_different_devices(tmp_path, split):
    tree = {f"leaf{n:02}": jnp.asarray(bits(np.uint16, n)) for n in range(20)}
    save(tree, tmp_path)
    places = {
        name: jax.sharding.SingleDeviceSharding(jax.devices()[number % 2]) for number, name in enumerate(tree)
    }
    loaded = load(tmp_path, shardings=places)
    assert_same(loaded, jax.device_put(tree, places))
    assert len(split) == 20


@pytest.mark.thorough
def test_a_program_that_ends_waits_for_what_is_compiled():
    """XLA would abort it."""
    code = """if True:
        import jax, numpy as np
        from eformer._engine.loading.slot_split import Slice, _program
        slices = tuple(Slice(16 * n, (4,), np.dtype(np.float32), None) for n in range(64))
        _program(slices, jax.devices()[0], False, False).add_done_callback(lambda made: print(made.exception()))
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr
