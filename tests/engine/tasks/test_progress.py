"""Report the progress of saves and loads to a callback or a bar."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.loading import load as _load
from eformer._engine.tasks import progress as _progress
from eformer._engine.tasks.progress import SILENT, Meter, metered
from eformer.checkpoint import SaveOptions, load, save, verify
from support import programs
from support.trees import assert_same

SIZES = {"large": 3 * 2**20, "rows": 4 * 1001 * 7, "small": 4 * 10, "half": 2 * 6}
TOTAL = sum(SIZES.values())

HOW = {
    "directory": {},
    "shards": {"options": SaveOptions(max_shard_bytes=2**20)},
    "file": {},
    "tensorstore": {"format": "tensorstore"},
    "chunks": {"format": "tensorstore", "options": SaveOptions(max_chunk_bytes=10_000)},  # some are padded
    "ocdbt": {"format": "tensorstore", "options": SaveOptions(ocdbt=True)},
    "zstd": {"format": "tensorstore", "options": SaveOptions(compression="zstd")},
}


def tree():
    return {
        "large": np.arange(SIZES["large"], dtype=np.uint8),
        "rows": np.arange(1001 * 7, dtype=np.float32).reshape(1001, 7),
        "inner": {"small": jnp.arange(10.0), "half": jnp.ones((2, 3), jnp.bfloat16)},
        "step": 3,
    }


class Calls(list):
    """Record the calls of a callback, which may raise at one of them."""

    def __init__(self, error=None):
        self.error = error

    def __call__(self, done, total):
        self.append((done, total))
        if self.error:
            raise self.error

    def assert_complete(self, total):
        assert self[-1] == (total, total)
        assert self == sorted(self)
        assert {all_there_is for _, all_there_is in self} == {total}
        assert self.count((total, total)) == 1


@pytest.fixture(autouse=True)
def every_time(monkeypatch):
    """Report every call, without a minimal interval."""
    monkeypatch.setattr(_progress, "_INTERVAL", 0)


@pytest.fixture(params=HOW)
def kind(request, tmp_path):
    return tmp_path / ("x.safetensors" if request.param == "file" else "x"), HOW[request.param]


def mesh():
    return jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])


# ---------------------------------------------------------------------------------------------- save


def test_a_save_reports_the_bytes_written(kind):
    path, how = kind
    calls = Calls()
    save(tree(), path, progress=calls, **how)
    calls.assert_complete(TOTAL)
    assert len(calls) > 1
    assert_same(load(path), tree())


def test_cast_leaves_count_with_their_stored_size(tmp_path):
    calls = Calls()
    save({"a": np.ones(100)}, tmp_path, options=SaveOptions(dtype="float16"), progress=calls)
    calls.assert_complete(200)


def test_four_bit_floats_count_as_they_are_stored(tmp_path):
    calls = Calls()
    save({"a": np.ones(100, ml_dtypes.float4_e2m1fn), "b": np.ones(50)}, tmp_path, progress=calls)
    calls.assert_complete(450)


def test_arrays_on_several_devices_are_counted_once(tmp_path):
    leaf = jax.device_put(np.ones((8, 100), np.float32), NamedSharding(mesh(), P("x")))
    copies = jax.device_put(np.ones(100, np.float32), NamedSharding(mesh(), P()))
    calls = Calls()
    save({"a": leaf, "b": copies}, tmp_path, progress=calls)
    calls.assert_complete(3600)


@pytest.mark.parametrize("how", [HOW["directory"], HOW["tensorstore"]], ids=["directory", "tensorstore"])
def test_reused_leaves_count_as_done(tmp_path, how):
    save(tree(), tmp_path, **how)
    calls = Calls()
    save(tree(), tmp_path, **how, options=SaveOptions(reuse=True), progress=calls)
    calls.assert_complete(TOTAL)


def test_nothing_is_all_there_is(tmp_path):
    calls = Calls()
    save({"n": 1, "empty": np.ones((0, 3))}, tmp_path, progress=calls)
    assert calls == [(0, 0)]


def test_a_callback_that_raises_fails_the_save(kind):
    path, how = kind
    save(tree(), path, **how)
    with pytest.raises(ZeroDivisionError, match="enough"):
        save({"other": np.ones(2**20)}, path, progress=Calls(ZeroDivisionError("enough")), **how)
    assert_same(load(path), tree())
    save({"next": np.ones(3)}, path, **how)  # nobody waits for the one that failed
    assert list(load(path)) == ["next"]


def test_a_callback_that_raises_at_the_end_fails_the_save(tmp_path):
    def raise_at_the_end(done, total):
        if done == total:
            raise ZeroDivisionError

    save(tree(), tmp_path)
    with pytest.raises(ZeroDivisionError):
        save({"other": np.ones(2**20)}, tmp_path, progress=raise_at_the_end)
    assert_same(load(tmp_path), tree())


# ---------------------------------------------------------------------------------------------- load


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "more", [{}, {"options": {"batch": 1}}, {"mmap": True}, {"mmap": True, "verify": True}], ids=str
)
def test_a_load_reports_the_bytes_read(kind, more):
    path, how = kind
    save(tree(), path, **how)
    calls = Calls()
    assert_same(load(path, progress=calls, **more), tree())
    calls.assert_complete(checkpoint.inspect(path).trees[""].nbytes)


def test_only_selected_leaves_count(tmp_path):
    save(tree(), tmp_path, prefix="a")
    save({"other": np.ones(5)}, tmp_path, prefix="b")
    for arguments, total in (
        ({"prefix": "b"}, 40),
        ({"prefix": "a", "keys": "inner"}, SIZES["small"] + SIZES["half"]),
        ({"prefix": "a", "keys": ["step"]}, 0),
    ):
        calls = Calls()
        load(tmp_path, progress=calls, **arguments)
        calls.assert_complete(total)


def test_leaves_on_a_mesh_count_once(tmp_path):
    save({"a": np.ones((8, 1000)), "b": jnp.ones(10)}, tmp_path)
    calls = Calls()
    load(tmp_path, mesh=mesh(), shardings={"a": P("x"), "b": P()}, dtype="float32", progress=calls)
    calls.assert_complete(64_040)


def test_of_a_part_of_a_leaf_only_that_part_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 1000)
    save({"a": np.ones((8, 250), np.float32)}, tmp_path)
    place = _load.place_targets

    def only_one_device(items, *more):
        place(items, *more)
        for item in items:
            item.boxes = item.boxes[:1]

    monkeypatch.setattr("eformer._engine.loading.placement._WORTH_READING_PARTS", 0)
    monkeypatch.setattr(_load, "place_targets", only_one_device)
    monkeypatch.setattr(_load, "assemble", lambda items: {item.name: item.arrays for item in items})
    calls = Calls()
    ((part,),) = load(tmp_path, mesh=mesh(), shardings=P("x"), progress=calls).values()
    assert part.shape == (2, 250)
    calls.assert_complete(2000)


def test_a_load_that_starts_again_counts_again(tmp_path, monkeypatch):
    save({"old": np.ones(1000)}, tmp_path)
    read, calls = _load.read_targets, Calls()

    def replace_first(*arguments, **more):
        if not calls:
            read(*arguments, **more)
            save({"new": np.ones(10)}, tmp_path)
            raise FileNotFoundError
        read(*arguments, **more)

    monkeypatch.setattr(_load, "read_targets", replace_first)
    load(tmp_path, progress=calls)
    assert calls == [(8000, 8000), (80, 80)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("error", [ZeroDivisionError, FileNotFoundError, KeyboardInterrupt])
def test_errors_of_a_callback_reach_the_caller(kind, error):
    """A FileNotFoundError of the callback is not taken for a missing file of the checkpoint."""
    path, how = kind
    save(tree(), path, **how)
    calls = Calls(error("mine"))
    with pytest.raises(error, match=r"^mine$"):
        load(path, progress=calls)
    with pytest.raises(error, match=r"^mine$"):
        verify(path, progress=calls)
    assert not [thread for thread in threading.enumerate() if thread.name == "eformer-io"]


def test_verify_tells_the_same(tmp_path):
    save(tree(), tmp_path)
    calls = Calls()
    assert verify(tmp_path, progress=calls).ok
    calls.assert_complete(TOTAL)


# --------------------------------------------------------------------------------------------- meter


def test_many_threads_are_added_up():
    calls = Calls()
    with metered(calls, 8000, "x") as meter:
        threads = [threading.Thread(target=lambda: [meter.add(1) for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls.assert_complete(8000)
    assert len(calls) == 8000


def test_a_meter_never_says_more_than_all():
    calls = Calls()
    with metered(calls, 10, "x") as meter:
        for _ in range(4):
            meter.add(6)
    assert calls == [(6, 10), (10, 10)]


@pytest.mark.parametrize("uptime", [0, 10**7])
def test_callbacks_are_rate_limited(monkeypatch, uptime):
    monkeypatch.setattr(_progress, "_INTERVAL", 3600)
    monkeypatch.setattr(_progress.time, "monotonic", lambda: uptime)
    calls = Calls()
    meter = Meter(100, calls)
    for _ in range(100):
        meter.add(1)
    assert calls == [(1, 100), (100, 100)]


def test_the_cause_of_a_callbacks_error_is_kept():
    def callback(done, total):
        raise ValueError("outer") from KeyError("inner")

    with pytest.raises(ValueError, match="outer") as caught, metered(callback, 1, "x") as meter:
        meter.add(1)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("progress", [None, False])
def test_without_progress_nothing_is_reported(progress):
    with metered(progress, 5, "x") as meter:
        meter.add(5)
    SILENT.add(5)
    SILENT.end()


# ----------------------------------------------------------------------------------------------- bar


def test_true_draws_a_bar_on_standard_error(tmp_path):
    shown, code = programs.with_errors_on_terminal(
        "import numpy as np; from eformer import checkpoint as c\n"
        f"path = {str(tmp_path / 'x')!r}\n"
        "c.save({'a': np.ones(100_000)}, path, progress=True)\n"
        "assert c.load(path, progress=True)['a'][0] == 1",
        out=tmp_path / "out",
    )
    assert (code, (tmp_path / "out").read_text()) == (0, ""), shown
    for part in ("saving", "loading", "800 kB of 800 kB, "):
        assert part in shown


def test_true_writes_no_escapes_without_a_terminal(tmp_path):
    code = (
        "import numpy as np; from eformer import checkpoint as c\n"
        f"c.save({{'a': np.ones(9)}}, {str(tmp_path / 'x')!r}, progress=True)"
    )
    done = programs.run(code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "\x1b" not in done.stderr
