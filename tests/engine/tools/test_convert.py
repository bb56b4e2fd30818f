"""Convert checkpoints to other formats and names, in bounded memory."""

import collections
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings

from eformer import checkpoint
from eformer._engine.loading import fetch as _transfer
from eformer._engine.record.boxes import Box, contiguous
from eformer.checkpoint import SaveOptions, convert, diff, inspect, load, save, verify
from eformer.errors import CorruptionError, MismatchError
from support import programs, trees
from support.faults import STRIDE
from support.trees import Moments, assert_same

pytestmark = pytest.mark.usefixtures("trusted")

COMPAT = Path(__file__).parents[2] / "compat"

TARGETS = {"safetensors": "new", "one file": "new.safetensors", "tensorstore": "new"}


def tree():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {
        "layers": [{"w": jnp.full((4, 6), i, jnp.bfloat16), "b": np.arange(i)} for i in range(3)],
        "moments": Moments(jnp.ones(3), (jnp.zeros((2, 2)),)),
        "rng": jax.random.key(7),
        "sharded": jax.device_put(jnp.arange(8.0), sharding),
        "packed": jnp.array([1, -2, 3], jnp.int4),
        "empty": {"none": None, "no": np.zeros((0, 3))},
        "step": 7,
        "name": "a",
        "a/b.c": np.float64(1.5),
    }


@pytest.fixture
def source(tmp_path):
    save(tree(), tmp_path / "old", metadata={"run": 1})
    return tmp_path / "old"


@pytest.mark.parametrize("target", TARGETS)
def test_formats_of_eformer_keep_everything(source, tmp_path, target):
    new = tmp_path / TARGETS[target]
    convert(source, new, to="tensorstore" if target == "tensorstore" else "safetensors")
    assert_same(load(new), load(source))
    before, after = inspect(source).trees[""], inspect(new).trees[""]
    assert after.metadata == before.metadata
    assert {n: (e.home, e.sharding) for n, e in after.leaves.items()} == {
        n: (e.home, e.sharding) for n, e in before.leaves.items()
    }
    assert verify(new).has_digests
    assert verify(new).ok
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
@pytest.mark.parametrize(
    "options",
    [SaveOptions(max_chunk_bytes=64), SaveOptions(compression="zstd"), SaveOptions(ocdbt=True)],
    ids=["chunks", "zstd", "ocdbt"],
)
def test_from_arrays_of_every_kind(tmp_path, form, options):
    save(tree(), tmp_path / "old", format="tensorstore", options=options)
    convert(tmp_path / "old", tmp_path / "new", to=form)
    assert_same(load(tmp_path / "new"), load(tmp_path / "old"))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "path",
    [
        *sorted((COMPAT / "orbax").glob("*/")),
        *sorted((COMPAT / "data").glob("ts_*")),
        COMPAT / "data" / "single.safetensors",
        *sorted((COMPAT / "files").glob("*.msgpack")),
        COMPAT / "files" / "equinox.eqx",
    ],
    ids=lambda path: path.name,
)
def test_checkpoints_of_other_programs_can_be_converted(tmp_path, path):
    if path.is_dir() and not any(path.iterdir()):
        pytest.fail("an empty sample")
    convert(path, tmp_path / "new", to="safetensors")
    assert diff(path, tmp_path / "new").same
    assert verify(tmp_path / "new").has_digests


@settings(deadline=None, max_examples=40)
@given(some=trees.flax_trees)
def test_any_tree_goes_from_format_to_format_and_stays_the_same(tmp_path_factory, some):
    folder = tmp_path_factory.mktemp("any")
    save(some, folder / "a")
    convert(folder / "a", folder / "b", to="tensorstore")
    convert(folder / "b", folder / "c.safetensors")
    assert_same(load(folder / "c.safetensors"), load(folder / "a"))


def test_flax_restores_the_msgpack(tmp_path):
    state = {"params": [{"w": jnp.ones((2, 3), jnp.bfloat16)}], "count": 3, "m": Moments(jnp.zeros(2), None)}
    save(state, tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.msgpack")
    restored = flax.serialization.from_bytes(state, (tmp_path / "new.msgpack").read_bytes())
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, state))
    assert (tmp_path / "new.msgpack").read_bytes() == flax.serialization.to_bytes(state)


def test_large_arrays_in_msgpack_are_in_chunks_as_flax_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.tools.sequential_writers._MAX_CHUNK", 1000)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
    state = {"w": np.arange(900, dtype=np.float32).reshape(30, 30)}
    save(state, tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.msgpack")
    assert (tmp_path / "new.msgpack").read_bytes() == flax.serialization.to_bytes(state)


def test_numpy_loads_the_npz(tmp_path):
    state = {
        "a": {"w": np.arange(6.0).reshape(2, 3)},
        "b": np.ones(2, ml_dtypes.bfloat16),
        "step": 3,
        "name": "x",
    }
    save(state, tmp_path / "old")
    done = convert(tmp_path / "old", tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as found:
        assert set(found) == {"a.w", "b", "step", "name"}
        np.testing.assert_array_equal(found["a.w"], state["a"]["w"])
        np.testing.assert_array_equal(found["b"].view(ml_dtypes.bfloat16), state["b"])
        assert (found["step"], found["name"]) == (3, "x")
    assert any("V2" in note for note in done.notes)
    np.testing.assert_array_equal(load(tmp_path / "new.npz")["b"], state["b"])


@pytest.mark.parametrize(
    ("tree", "is_said"),
    [
        ({"list": np.ones(2), "tuple": {"list": np.ones(2)}}, False),
        ({"a": {"b": [np.ones(2)]}}, True),
        ((np.ones(2),), True),
        (np.ones(2), False),
    ],
)
def test_a_note_says_that_lists_become_dicts(tmp_path, tree, is_said):
    save(tree, tmp_path / "old")
    notes = convert(tmp_path / "old", tmp_path / "new.npz").notes
    assert ("npz stores names only: lists and tuples come back as dicts" in notes) == is_said


def test_dtypes_that_npz_lacks_are_refused_in_one_error(tmp_path):
    save({"a": jnp.ones(2, jnp.float8_e5m2), "b": jnp.ones(2, jnp.int4), "c": b"x"}, tmp_path / "old")
    with pytest.raises(
        MismatchError, match="npz cannot store these types; cast floats with dtype="
    ) as caught:
        convert(tmp_path / "old", tmp_path / "new.npz")
    assert len(caught.value.problems) == 3
    assert not (tmp_path / "new.npz").exists()


def test_shards_as_hugging_face_has_them(tmp_path):
    state = {f"l{i}": np.full((50, 50), i, np.float32) for i in range(4)}
    save(state, tmp_path / "old", format="tensorstore")
    convert(tmp_path / "old", tmp_path / "new", to="safetensors", max_shard_bytes=20_000)
    shards = sorted((tmp_path / "new").glob("model-0000?-of-00002.safetensors"))
    assert len(shards) == 2
    found = {k: v for shard in shards for k, v in safetensors.numpy.load_file(shard).items()}
    assert_same(found, state)


def test_cast_on_the_way(tmp_path):
    values = np.array([1.0, 1 / 3, 1e30, np.nan], np.float32)
    save({"w": values, "i": np.arange(3), "step": 1.5}, tmp_path / "old")
    done = convert(tmp_path / "old", tmp_path / "new", to="safetensors", dtype="bf16")
    found = load(tmp_path / "new")
    assert found["w"].tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    assert found["i"].dtype == np.int64
    assert found["step"] == 1.5
    assert [str(leaf) for leaf in done.leaves[""]] == [
        "i: int64[3]",
        "w: bfloat16[4] (from float32)",
        "step = 1.5",
    ]


def test_renamed_there_and_back(tmp_path):
    rng = np.random.default_rng(0)
    hf = {f"model.layers.{i}.q_proj.weight": rng.standard_normal((40, 30)) for i in range(12)}
    hf["model.embed_tokens.weight"] = rng.standard_normal((7, 5))
    safetensors.numpy.save_file(hf, tmp_path / "hf.safetensors")
    there = [
        r"model\.layers\.(\d+)\.(\w+)_proj\.weight -> layers.\2.kernel | transpose | stack \1",
        r"model\.embed_tokens\.weight -> embed.table",
    ]
    back = [
        r"layers\.(\w+)\.kernel -> model.layers.{}.\1_proj.weight | unstack | transpose",
        r"embed\.table -> model.embed_tokens.weight",
    ]
    convert(tmp_path / "hf.safetensors", tmp_path / "mine", to="tensorstore", rename=there)
    mine = load(tmp_path / "mine")
    expected = np.stack([hf[f"model.layers.{i}.q_proj.weight"].T for i in range(12)])
    np.testing.assert_array_equal(mine["layers"]["q"]["kernel"], expected)
    convert(tmp_path / "mine", tmp_path / "back.safetensors", rename=back)
    assert_same(safetensors.numpy.load_file(tmp_path / "back.safetensors"), hf)


def test_large_leaves_are_transposed_box_by_box(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.tools.convert._SMALL", 0)
    monkeypatch.setattr("eformer._engine.saving.staging._IN_ORDER_BYTES", 512)
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 128)
    state = {f"h.{i}": np.random.default_rng(i).standard_normal((33, 17)) for i in range(5)}
    save(state, tmp_path / "old")
    rules = [r"h%2E(\d) -> h | transpose | stack \1 2"]
    for form, new in (("safetensors", "new"), ("npz", "new.npz"), ("msgpack", "new.msgpack")):
        convert(tmp_path / "old", tmp_path / new, to=form, rename=rules)
        found = np.asarray(load(tmp_path / new)["h"])
        np.testing.assert_array_equal(found, np.stack([leaf.T for leaf in state.values()], 2))


def test_prng_keys_cannot_be_transposed(source, tmp_path):
    with pytest.raises(MismatchError, match="leaf 'rng' holds PRNG keys"):
        convert(source, tmp_path / "new", to="safetensors", rename=["rng -> rng | transpose"])


def test_a_dry_run_prints_the_plan_and_writes_nothing(source, tmp_path):
    rules = [r"layers\.(\d+)\.w -> w | stack \1", r"layer\.(\d+)\.b -> b.\1", ".*step.* ->"]
    plan = convert(source, tmp_path / "new", to="npz", rename=[*rules, "packed ->"], dry_run=True)
    text = str(plan)
    assert "layers.0.w ... layers.2.w -> w: bfloat16[3, 4, 6] (stack of 3)" in text
    assert r"! matches no leaf: line 2, layer\.(\d+)\.b (nearest is 'layers.0.b')" in text
    assert "! no rule matches, name kept: layers.1.b\n" in text
    assert r"! no rule matches, name kept: layers.0.b (nearest is line 2, layer\.(\d+)\.b)" in text
    assert "! left out: step" in text
    assert os.listdir(tmp_path) == ["old"]


def test_every_tree_keeps_its_prefix_and_one_alone_needs_none(tmp_path):
    save({"w": 1}, tmp_path / "old", prefix="model")
    save({"w": 2}, tmp_path / "old", prefix="ema")
    convert(tmp_path / "old", tmp_path / "all", to="tensorstore")
    assert [load(tmp_path / "all", prefix=p) for p in ("model", "ema")] == [{"w": 1}, {"w": 2}]
    convert(tmp_path / "old", tmp_path / "ema.npz", prefix="ema")
    assert load(tmp_path / "ema.npz")["w"] == 2
    with pytest.raises(ValueError, match=r"one file holds one tree, and the source has \['ema', 'model'\]"):
        convert(tmp_path / "old", tmp_path / "both.npz")


@pytest.mark.parametrize("there", ["file", "directory", "link"])
def test_an_existing_destination_is_left_alone(source, tmp_path, there):
    new = tmp_path / "new.safetensors"
    if there == "directory":
        new.mkdir()
        (new / "mine").touch()
    else:
        new.symlink_to("nowhere") if there == "link" else new.write_text("mine")
    with pytest.raises(FileExistsError, match="choose another path"):
        convert(source, new)
    assert os.path.lexists(new)


@pytest.mark.parametrize("to", ["zarr", "tensorstore"])
def test_zarr_has_two_names(source, tmp_path, to):
    assert convert(source, tmp_path / "new", to=to).to == "zarr"
    assert inspect(tmp_path / "new").format == "tensorstore"  # the word on disk


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        (
            "new",
            {},
            "no format given, and 'new' does not name one; to= is one of safetensors, zarr, msgpack, npz, ",
        ),
        (
            "new",
            {"to": "hdf5"},
            "unknown format 'hdf5'; expected safetensors, zarr, msgpack, npz, peft, orbax or hf",
        ),
        ("new.npz", {"to": "safetensors"}, "has the suffix of npz"),
        ("new", {"to": "safetensors", "dtype": "int8"}, "not a floating dtype"),
        ("new", {"to": "safetensors", "memory": 10**6}, "allow at least"),
        ("new", {"to": "safetensors", "prefix": "ema"}, "has no prefix 'ema'"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(source, tmp_path, name, options, problem):
    with pytest.raises(ValueError, match=problem):
        convert(source, tmp_path / name, **options)
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("name", ["new", "new.safetensors", "new.npz", "new.msgpack"])
def test_damage_is_noticed_on_the_way_and_leaves_nothing(tmp_path, name):
    save({"w": np.arange(10_000), "b": np.ones(3)}, tmp_path / "old")
    with (tmp_path / "old" / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match="leaf 'w': bytes"):
        convert(tmp_path / "old", tmp_path / name, to=None if "." in name else "tensorstore")
    assert os.listdir(tmp_path) == ["old"]


def test_a_checkpoint_without_room_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="has 10 B left"):
        convert(source, tmp_path / "new", to="safetensors")
    assert os.listdir(tmp_path) == ["old"]


# ---------------------------------------------------------------------------------------------- memory

_UNDER_A_LIMIT = """
import os, resource, sys, threading
from eformer._engine.tools.convert import convert
source, destination, to, memory, *rules = sys.argv[1:]
dequant = os.environ.get("DEQUANT")
threading.stack_size(2**18)  # what threads may use as stacks counts, whether they do or not
resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
convert(source, destination, to=to, memory=int(memory), rename=rules or None, dequant=dequant)
assert "jax" not in sys.modules
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(1024 * int(peak))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint with a leaf of 200 MB, and 200 MB in others."""
    path = tmp_path_factory.mktemp("large") / "old"
    rng = np.random.default_rng(0)
    block = rng.integers(0, 2**32, (7000, 7000), np.uint32)
    save({"w": block, "layers": [block[i * 1000 : i * 1000 + 1875] for i in range(4)]}, path)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all memory on Linux alone")
@pytest.mark.parametrize(
    ("form", "rules"),
    [
        ("safetensors", ["w -> w | transpose"]),
        ("msgpack", []),
        ("npz", [r"layers\.(\d) -> layers | stack \1 1", "w ->"]),
        ("safetensors", []),
        ("tensorstore", []),
        ("npz", []),
    ][: 6 if STRIDE == 1 else 3],  # all of them by `make faults`
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
@pytest.mark.sample(3)
def test_a_conversion_stays_within_its_memory(large, tmp_path, form, rules):
    memory = 300_000_000
    command = [sys.executable, "-c", _UNDER_A_LIMIT, large, tmp_path / f"new.{form}", form, memory, *rules]
    if form in ("tensorstore", "safetensors"):
        command[4] = tmp_path / "new"
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory
    if not rules:
        assert diff(large, command[4]).changed == ()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all memory on Linux alone")
@pytest.mark.thorough
def test_quantised_weights_become_numbers_within_the_memory(tmp_path):
    """160 MB of FP8 and 80 MB of experts of MXFP4 become 320 MB each; the experts are transposed."""
    leaves = {
        "a.weight": np.ones((20_000, 8_000), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_inv": np.full((157, 63), 2, np.float32),
        "e_blocks": np.full((4, 4096, 300, 16), 0x22, np.uint8),
        "e_scales": np.full((4, 4096, 300), 128, np.uint8),
    }
    safetensors.numpy.save_file(leaves, tmp_path / "model.safetensors")
    memory, new = 400_000_000, tmp_path / "new"
    command = [
        sys.executable,
        "-c",
        _UNDER_A_LIMIT,
        tmp_path / "model.safetensors",
        new,
        "safetensors",
        memory,
    ]
    environment = os.environ | {"DEQUANT": "bf16"}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory
    with checkpoint.open(new) as view:
        assert (view["a.weight"].shape, view["e"].shape) == ((20_000, 8_000), (4, 9600, 4096))
        assert view["a.weight"][-1, -3:].tolist() == view["e"][3, -3:, 7].tolist() == [2, 2, 2]


@pytest.mark.thorough
def test_a_chunk_that_does_not_fit_is_refused_with_the_memory_it_needs(tmp_path):
    np.savez_compressed(tmp_path / "old.npz", w=np.zeros((300, 10**6), np.uint8))
    with pytest.raises(ValueError, match=r"a chunk of 300 MB has to be decoded whole; allow at least \d"):
        convert(tmp_path / "old.npz", tmp_path / "new", to="safetensors", memory=800_000_000)


# ---------------------------------------------------------------------------------------------- interrupts

_INTERRUPTED = """
import signal, sys, time
from eformer._engine.tools.convert import convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.2)
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=slowly)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("form", ["safetensors", "tensorstore", "npz"])
@pytest.mark.sample(3)
def test_an_interrupted_conversion_leaves_nothing(large, tmp_path, form, kill):
    new = tmp_path / ("new.npz" if form == "npz" else "new")
    command = [sys.executable, "-c", _INTERRUPTED, large, new, form]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(kill)
    process.communicate(timeout=60)
    assert process.returncode
    assert not new.exists()
    if kill == signal.SIGKILL:  # the next one clears up what is left
        save({"w": 1}, tmp_path / "small")
        convert(tmp_path / "small", tmp_path / "next", to="safetensors")
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_progress_is_reported_to_the_end(source, tmp_path):
    told = []
    done = convert(source, tmp_path / "new", to="safetensors", progress=lambda *said: told.append(said))
    assert told[-1] == (done.nbytes, done.nbytes)
    assert told == sorted(told)


def test_committed_remains_of_dead_saves_stay(tmp_path):
    """A save of arrays that died after its commit has a scratch directory that only the next save may remove."""
    save({"w": np.ones(4)}, tmp_path / "p", format="tensorstore")
    code = (
        "import os, sys, numpy as np, eformer._engine.stores.local_upload as many\n"
        "from eformer.checkpoint import save\n"
        "many.LocalUpload._finish = lambda *_, **__: os._exit(9)\n"
        "save({'w': np.full(4, 7.0)}, sys.argv[1], format='tensorstore')"
    )
    done = programs.run(code, tmp_path / "p")
    assert done.returncode == 9
    save({"v": 1}, tmp_path / "other")
    convert(tmp_path / "other", tmp_path / "p" / "new", to="safetensors")
    assert verify(tmp_path / "p").ok
    assert load(tmp_path / "p")["w"][0] == 7


@pytest.mark.parametrize("name", ["new", "new.safetensors", "new.npz", "new.msgpack"])
def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path, name):
    save({"w": np.ones(100)}, tmp_path / "old")

    def appear(done, total):
        if not os.path.lexists(tmp_path / name):
            (tmp_path / name).write_text("precious")

    with pytest.raises(FileExistsError, match="already exists; choose another path"):
        convert(tmp_path / "old", tmp_path / name, to=None if "." in name else "tensorstore", progress=appear)
    assert (tmp_path / name).read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == [name, "old"]


def test_flax_reads_converted_prng_keys(tmp_path):
    save({"rng": jax.random.key(3), "w": np.ones(2)}, tmp_path / "old")
    done = convert(tmp_path / "old", tmp_path / "new.msgpack")
    found = flax.serialization.msgpack_restore((tmp_path / "new.msgpack").read_bytes())
    np.testing.assert_array_equal(found["rng"], jax.random.key_data(jax.random.key(3)))
    assert any("has no PRNG keys: rng become numbers" in note for note in done.notes)


def test_names_in_npz_are_those_of_the_keys(tmp_path):
    tree = {"mlp/~/linear": {"w": np.ones(2)}, "a.b": np.ones(3), "100%": np.ones(1), "": np.ones(4)}
    save(tree, tmp_path / "old")
    done = convert(tmp_path / "old", tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as found:
        assert set(found) == {"mlp/~/linear.w", "a.b", "100%", ""}
    back = load(tmp_path / "new.npz")
    assert back["mlp/~/linear"]["w"].shape == (2,)
    assert back["a"]["b"].shape == (3,)
    assert any("names with dots or escapes come back changed: a.b" in note for note in done.notes)


def test_a_bare_leaf_has_numpys_name_in_npz(tmp_path):
    save(np.arange(3), tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as found:
        assert list(found) == ["arr_0"]


def test_a_dry_run_refuses_like_a_real_run(tmp_path):
    save({"n": 2**70, "w": np.ones(2)}, tmp_path / "old")
    with pytest.raises(MismatchError, match=r"msgpack cannot store these values.*leaf 'n'"):
        convert(tmp_path / "old", tmp_path / "new.msgpack", dry_run=True)
    with pytest.raises(ValueError, match="only a directory of safetensors files has shards"):
        convert(tmp_path / "old", tmp_path / "new.safetensors", max_shard_bytes=100, dry_run=True)


def test_rules_from_an_editor_that_marks_its_files(source, tmp_path):
    (tmp_path / "rules").write_bytes(b"\xef\xbb\xbfstep -> steps\r\n")
    plan = convert(source, tmp_path / "new", to="safetensors", rename=tmp_path / "rules", dry_run=True)
    assert any(leaf.name == "steps" for leaf in plan.leaves[""])
    (tmp_path / "rules").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="rules is not a text file of rules"):
        convert(source, tmp_path / "new", to="safetensors", rename=tmp_path / "rules")


@pytest.mark.parametrize(
    "rules", [None, [r"l(\d) -> l | stack \1"], [r"(l0) -> x.{}.\1 | unstack", "l. ->"]], ids=str
)
@pytest.mark.parametrize("target", ["new", "new.npz"])
def test_a_large_chunk_is_decoded_once(tmp_path, monkeypatch, target, rules):
    monkeypatch.setattr("eformer._engine.record.lazy_arrays._LARGE_CHUNKS", 1000)
    monkeypatch.setattr("eformer._engine.saving.staging._IN_ORDER_BYTES", 256)
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 128)
    tree = {f"l{i}": np.random.default_rng(i).standard_normal((6, 5, 7)) for i in range(3)}
    save(tree, tmp_path / "old", format="tensorstore", options=SaveOptions(compression="zstd"))
    decoded = []
    real = _transfer.decoded
    monkeypatch.setattr(_transfer, "decoded", lambda *how: (decoded.append(how), real(*how))[1])
    convert(tmp_path / "old", tmp_path / target, to=None if "." in target else "safetensors", rename=rules)
    assert len(decoded) == (1 if rules and "unstack" in rules[0] else 3)
    found = load(tmp_path / target)
    if rules is None:
        assert_same(jax.tree.map(np.asarray, found), tree)


@pytest.mark.thorough
def test_many_leaves_and_trees_stay_within_their_memory(tmp_path):
    for number in range(6):
        save(
            {f"l{i}": np.full(4000, i, np.float32) for i in range(2000)},
            tmp_path / "old",
            prefix=f"t{number}",
        )
    for form in ("safetensors", "tensorstore"):
        command = [sys.executable, "-c", _UNDER_A_LIMIT, tmp_path / "old", tmp_path / form, form, 300_000_000]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) <= 300_000_000


def test_leaves_that_are_made_of_one_do_not_disturb_each_other(tmp_path, monkeypatch):
    """Four-bit floats are fetched by several threads at once."""
    monkeypatch.setattr("eformer._engine.record.lazy_arrays._LARGE_CHUNKS", 1000)
    bits = np.random.default_rng(0).integers(0, 16, (16, 4, 2**14), np.uint8)
    array = bits.view(ml_dtypes.float4_e2m1fn)
    options = SaveOptions(compression="zstd", max_chunk_bytes=2**14)
    save({"w": array}, tmp_path / "old", format="tensorstore", options=options)
    for number in range(5):
        convert(tmp_path / "old", tmp_path / f"{number}", to="safetensors", rename=["w -> l.{} | unstack"])
        leaves = load(tmp_path / f"{number}")["l"]
        found = np.stack([np.asarray(leaves[str(i)]).view(np.uint8) for i in range(16)])
        np.testing.assert_array_equal(found, bits)


def test_missing_elements_are_refused():
    part = (Box((0, 0), (1, 4)), np.ones((1, 4)))
    with pytest.raises(AssertionError, match="4 of the 8 elements"):
        contiguous([part], Box((0, 0), (2, 4)), "float64")


def test_long_texts_go_to_msgpack_and_back(tmp_path):
    tree = {"cfg": "y" * 100_000, "raw": b"z" * 300_000, "k" * 70_000: 1.5, "w": np.ones(3)}
    save(tree, tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.msgpack")
    found = load(tmp_path / "new.msgpack")
    assert {name: found[name] for name in tree if name != "w"} == {n: v for n, v in tree.items() if n != "w"}


def test_a_name_inside_of_a_leaf_is_noted(tmp_path):
    save({"a": np.ones(2), "b": np.ones((2, 2))}, tmp_path / "old")
    done = convert(tmp_path / "old", tmp_path / "new", to="safetensors", rename=["b -> a.{} | unstack"])
    assert "a.0 is stored as a%2E0, because a part of its name is a leaf itself" in done.notes


@pytest.mark.thorough
def test_decoding_stays_within_the_memory(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (100, 10**6), np.uint8)
    options = SaveOptions(compression="zstd", max_chunk_bytes=2**30)
    save({"a": array, "b": array}, tmp_path / "old", format="tensorstore", options=options)
    for form in ("safetensors", "npz"):
        new = tmp_path / (f"new.{form}" if form == "npz" else form)
        command = [sys.executable, "-c", _UNDER_A_LIMIT, tmp_path / "old", new, form, 450_000_000]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) <= 450_000_000


def test_weakly_typed_arrays_stay_so_unless_they_are_changed(tmp_path):
    save({"a": jnp.asarray(0.5), "b": [jnp.asarray(1), jnp.asarray(2)]}, tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "same", to="tensorstore")
    assert all(leaf.weak_type for leaf in jax.tree.leaves(load(tmp_path / "same")))
    convert(
        tmp_path / "old",
        tmp_path / "new",
        to="safetensors",
        dtype="bf16",
        rename=[r"b\.(\d+) -> b | stack \1"],
    )
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(load(tmp_path / "new")))


FEW_DESCRIPTORS = """
import resource, sys
from eformer.checkpoint import convert, verify
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
convert(sys.argv[1], sys.argv[2], to="safetensors", max_shard_bytes=500)
convert(sys.argv[2], sys.argv[3], to="tensorstore")
assert verify(sys.argv[2]).ok and verify(sys.argv[3]).ok
"""


@pytest.mark.thorough
def test_hundreds_of_shards_need_few_descriptors(tmp_path):
    tree = {f"w{number}": np.full(50, number) for number in range(200)}
    save(tree, tmp_path / "old")
    places = [str(tmp_path / name) for name in ("old", "shards", "arrays")]
    subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, *places], check=True, timeout=300)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 200
    assert_same(load(tmp_path / "arrays"), tree)


def test_a_subtree_and_some_of_its_leaves_are_converted(tmp_path):
    tree = {
        "params": {"enc": {"b": np.zeros(1), "w": np.ones(2)}, "dec": np.ones(3), "n": 3},
        "opt": np.ones(9),
    }
    save(tree, tmp_path / "x")
    done = convert(tmp_path / "x", tmp_path / "y", to="safetensors", root="params", keys=["enc", "n"])
    assert_same(load(tmp_path / "y"), {"enc": tree["params"]["enc"], "n": 3})
    assert "params.n -> n = 3" in str(done)
    convert(tmp_path / "x", tmp_path / "z", to="zarr", root="params", rename={"enc": "e"}, keys="*.w")
    assert_same(load(tmp_path / "z"), {"enc": {"w": np.ones(2)}})
    assert not convert(tmp_path / "x", tmp_path / "v", to="msgpack", keys="opt", dry_run=True).kept


def test_a_subtree_keeps_its_structure(tmp_path):
    inner = [{1: np.ones(1), 2: (np.ones(2), None, 3)}, collections.OrderedDict(x=np.ones(3), y=4)]
    save({"params": {"layers": inner}, "a": {"b": np.ones(5)}}, tmp_path / "x")
    convert(tmp_path / "x", tmp_path / "y", to="safetensors", root="params.layers")
    assert_same(load(tmp_path / "y"), inner)
    convert(tmp_path / "x", tmp_path / "z", to="zarr", root="params.layers.0.2")
    assert_same(load(tmp_path / "z"), load(tmp_path / "x", root="params.layers.0.2"))
    convert(tmp_path / "x", tmp_path / "v.safetensors", root="a.b")
    assert_same(load(tmp_path / "v.safetensors"), np.ones(5))


def test_names_that_find_nothing_are_errors_before_anything_is_written(tmp_path):
    save({"params": {"w": np.ones(2)}}, tmp_path / "x")
    with pytest.raises(MismatchError, match=r"root: .*'parms' .*nearest is 'params'"):
        convert(tmp_path / "x", tmp_path / "y", to="zarr", root="parms")
    with pytest.raises(MismatchError, match=r"keys: .*'v'"):
        convert(tmp_path / "x", tmp_path / "y", to="zarr", keys="v", root="params")
    assert not (tmp_path / "y").exists()
