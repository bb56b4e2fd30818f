"""What a load would put where: the same bytes that it really puts there, without reading any."""

import re
import shutil
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import eformer.serialization
from eformer.checkpoint import Placement, SaveOptions, load, placement, save
from eformer.paths import LocalPath
from support.meshes import grid, line, on


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


def half():
    return Mesh(np.array(jax.devices()[:4]), ("model",))


def params():
    return {
        "bits": jnp.ones((8, 8), jnp.int4),
        "block": {
            "bias": jnp.ones(8, jnp.bfloat16),
            "kernel": jnp.ones((16, 8)),
            "mask": jnp.ones((8, 3), bool),
        },
        "empty": jnp.zeros((0, 8)),
        "list": [jnp.arange(24).reshape(8, 3), jnp.int32(3)],
        "rng": jax.random.split(jax.random.key(0), 8),
    }


def state():
    """With leaves that never go to a device unless somebody says so."""
    return params() | {"lr": 0.1, "name": "x", "numpy": np.ones((8, 2), np.float32)}


def resident(tree, mesh):
    """The bytes that really are on every device."""
    found = Counter(dict.fromkeys(mesh.devices.flat, 0))
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            numbers = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            for shard in numbers.addressable_shards:
                found[shard.device] += shard.data.nbytes
    return dict(found)


RULES = [("kernel", P("model", None)), ("bias|mask|rng", P("model"))]

REQUESTS = {
    "replicated": (line, {}),
    "some devices": (half, {}),
    "rules": (line, {"rules": RULES}),
    "rules on two axes": (
        grid,
        {"rules": [("kernel", P("data", "model")), ("list", P("model")), ("rng", P("data"))]},
    ),
    "both axes on one": (grid, {"rules": [("kernel", P(("data", "model")))]}),
    "no rule": (grid, {"rules": []}),
    "flat shardings": (line, {"shardings": {"block.kernel": P("model"), "list.0": P("model")}}),
    "nested shardings": (line, {"shardings": {"block": {"kernel": P(None, "model")}, "numpy": P("model")}}),
    "shardings and rules": (
        grid,
        {"rules": [(".*", P())], "shardings": {"block.kernel": P("data", "model")}},
    ),
    "one for all": (grid, {"shardings": P()}),
    "other devices": (half, {"shardings": {"numpy": SingleDeviceSharding(jax.devices()[7])}}),
    "cast": (line, {"dtype": "bf16"}),
    "cast and rules": (grid, {"dtype": jnp.float16, "rules": [("kernel", P("data", "model"))]}),
    "cast to less": (line, {"dtype": "float8_e4m3fn", "rules": RULES}),
}


def test_both_doors_lead_to_the_same():
    tree, rules = {"w": jnp.ones((8, 4))}, [("w", P("model"))]
    found = eformer.serialization.dry_run(tree, line(), rules=rules)
    assert found == placement(tree, mesh=line(), rules=rules)
    assert set(found.per_device.values()) == {16}
    assert "dry_run" in eformer.serialization.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = eformer.serialization.nothing


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mesh", "arguments"), REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
def test_the_bytes_are_those_that_a_load_puts_there(path, format, mesh, arguments):  # noqa: A002
    save(state(), path, format=format)
    expected = resident(load(path, mesh=mesh(), **arguments), mesh())
    assert placement(path, mesh=mesh(), **arguments).per_device == expected
    assert sum(expected.values()) > 0


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mesh", "arguments"), REQUESTS.values(), ids=REQUESTS)
def test_a_tree_of_shapes_does_as_well(path, mesh, arguments):
    shapes = jax.eval_shape(params) | {"numpy": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
    save(params() | {"numpy": jnp.ones((8, 2))}, path)
    expected = resident(load(path, mesh=mesh(), **arguments), mesh())
    assert placement(shapes, mesh=mesh(), **arguments).per_device == expected


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_paths_of_every_kind_are_known_from_trees(tmp_path, suffix):
    path = tmp_path / f"checkpoint{suffix}"
    save(params(), path)
    expected = resident(load(path, mesh=line()), line())
    for what in (path, str(path), LocalPath(path), params(), jax.eval_shape(params)):
        assert placement(what, mesh=line()).per_device == expected


def test_arrays_lie_as_they_were_saved(path):
    save({"w": jax.device_put(jnp.ones((8, 8)), on(grid(), "data", "model"))}, path)
    found = placement(path, mesh=grid())
    assert set(found.per_device.values()) == {32}
    assert found.per_device == resident(load(path, mesh=grid()), grid())
    assert found.leaves["w"].spec == P("data", "model")


def test_a_tree_that_says_where_it_lies_is_believed():
    rows = on(line(), "model")
    for leaf in (
        jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows),
        jax.device_put(jnp.ones((8, 8)), rows),
    ):
        assert placement({"w": leaf}, mesh=line()).per_device == dict.fromkeys(jax.devices(), 32)
    both = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=on(grid(), "data", "model"))
    assert placement({"w": both}, mesh=grid()).per_device == dict.fromkeys(jax.devices(), 32)


def test_numpy_arrays_stay_in_host_memory_unless_somebody_says_otherwise(path):
    save({"n": np.ones((8, 2), np.float32)}, path)
    for what in (path, {"n": np.ones((8, 2), np.float32)}):
        assert placement(what, mesh=line()).per_device == dict.fromkeys(jax.devices(), 0)
        assert placement(what, mesh=line(), rules=[("n", P("model"))]).per_device == dict.fromkeys(
            jax.devices(), 8
        )


def test_every_leaf_is_described(path):
    save(state(), path)
    found = placement(path, mesh=line(), rules=RULES)
    assert set(found.leaves) == {
        "bits", "block.bias", "block.kernel", "block.mask", "empty", "list.0", "list.1", "numpy", "rng",
    }  # fmt: skip
    kernel = found.leaves["block.kernel"]
    assert (kernel.dtype, kernel.shape, kernel.spec) == ("float32", (16, 8), P("model", None))
    assert (kernel.shard, kernel.shard_nbytes) == ((2, 8), 64)
    assert (found.leaves["rng"].shape, found.leaves["rng"].shard) == ((8,), (1,))


def test_a_cast_leaf_is_described_as_it_will_be(path):
    save({"f": jnp.ones(8), "i": jnp.arange(8)}, path)
    for what in (path, {"f": jnp.ones(8), "i": jnp.arange(8)}):
        found = placement(what, mesh=line(), dtype="bf16").leaves
        assert (found["f"].dtype, found["f"].shard_nbytes) == ("bfloat16", 16)
        assert (found["i"].dtype, found["i"].shard_nbytes) == ("int32", 32)


def test_the_prefix_chooses_the_tree(path):
    for prefix, size in (("model", 8), ("opt", 16)):
        save({"w": jnp.ones(size)}, path, prefix=prefix)
    assert set(placement(path, mesh=line(), prefix="model").per_device.values()) == {32}
    assert set(placement(path, mesh=line(), prefix="opt", rules=[("w", P("model"))]).per_device.values()) == {
        8
    }


@pytest.mark.parametrize(
    "options", [SaveOptions(), SaveOptions(compression="zstd"), SaveOptions(ocdbt=True)], ids=str
)
def test_no_data_is_read_from_arrays(path, options):
    save(params(), path, format="tensorstore", options=options)
    expected = resident(load(path, mesh=line()), line())
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    assert [p.name for p in path.rglob("*")] == ["tensorstore_index.json"]
    assert placement(path, mesh=line()).per_device == expected


def test_no_data_is_read_from_safetensors(path):
    save(params(), path)
    expected = resident(load(path, mesh=line()), line())
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert placement(path, mesh=line()).per_device == expected


ERRORS = {
    "nothing said": {},
    "does not fit": {"rules": [("kernel", P(None, "stage")), ("bias", P("data", "model")), (".*", P())]},
    "does not divide": {"rules": [("list", P(None, "model"))]},
    "no such leaf": {"shardings": {"block.kernal": P()}, "rules": []},
    "no sharding": {"shardings": {"block.kernel": 3}, "rules": []},
    "no pattern": {"rules": [("(", P())]},
    "no dtype": {"dtype": "int8", "rules": []},
    "no prefix": {"prefix": "opt", "rules": []},
}


@pytest.mark.parametrize("arguments", ERRORS.values(), ids=ERRORS)
def test_what_does_not_fit_is_the_error_of_the_load(path, arguments):
    save(params(), path)
    with pytest.raises(ValueError) as expected:  # noqa: PT011  whatever it says
        load(path, mesh=grid(), **arguments)
    with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
        placement(path, mesh=grid(), **arguments)


def test_what_jax_cannot_hold_is_the_error_of_the_load(path):
    with jax.enable_x64(True):
        save({"w": jnp.arange(8)}, path)
    for call in (lambda: load(path, mesh=line()), lambda: placement(path, mesh=line())):
        with pytest.raises(ValueError, match=r"'w' is int64\[8\]"):
            call()


def test_several_prefixes_and_none_said_is_an_error_that_lists_them(path):
    for prefix in ("model", "opt"):
        save({"w": jnp.ones(8)}, path, prefix=prefix)
    with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
        placement(path, mesh=line())


def test_nothing_there_is_file_not_found(path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        placement(path, mesh=line())
    path.mkdir()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        placement(str(path), mesh=line())


def test_every_device_of_the_mesh_is_there_and_no_other():
    assert placement({}, mesh=half()).per_device == dict.fromkeys(jax.devices()[:4], 0)
    assert placement({"w": jnp.ones(8)}, mesh=half()).per_device == dict.fromkeys(jax.devices()[:4], 32)


def test_it_reads_well(path):
    save(params(), path)
    text = str(placement(path, mesh=line(), rules=RULES))
    lines = text.splitlines()
    total = resident(load(path, mesh=line(), rules=RULES), line())
    first, *_, last = jax.devices()
    assert lines[0] == f"8 devices, {first} to {last}: {total[first]} B each"
    assert lines[1] == "  list.0 int32[8, 3] as P(): 96 B of [8, 3] a device"
    assert f"  block.kernel float32[16, 8] as {P('model', None)}: 64 B of [2, 8] a device" in lines


def test_devices_that_hold_more_are_shown_apart():
    text = str(Placement(dict(zip(jax.devices()[:3], (5, 7, 5), strict=True)), {}))
    first, second, third = jax.devices()[:3]
    assert text.splitlines() == [f"2 devices, {first} to {third}: 5 B each", f"{second}: 7 B"]


def test_of_many_leaves_the_largest_are_shown():
    tree = {f"w{i}": jax.ShapeDtypeStruct((i + 1,), jnp.float32) for i in range(50)}
    text = str(placement(tree, mesh=half()))
    assert "  w49 float32[50]" in text
    assert "w0 " not in text
    assert text.splitlines()[-1] == "  ... and 30 smaller leaves"


def test_the_mesh_of_set_mesh_is_the_default(path):
    save({"w": jnp.ones((8, 8)), "wide": np.ones(8)}, path)
    with jax.set_mesh(grid()):
        found = placement(path, rules=[("w$", P("model"))])
        plain = placement(path)
        expected = resident(load(path), grid())
    assert found.per_device == placement(path, mesh=grid(), rules=[("w$", P("model"))]).per_device
    assert plain.per_device == expected
    with pytest.raises(ValueError, match=r"placement needs a mesh: pass mesh=, or enter jax.set_mesh"):
        placement(path)


def test_shardings_on_an_abstract_mesh_are_counted_on_the_mesh():
    sharding = jax.NamedSharding(grid().abstract_mesh, P("model"))
    tree = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    assert set(placement(tree, mesh=grid()).per_device.values()) == {64}


def test_rules_that_match_no_leaf_are_named(path, caplog):
    save({"w": jnp.ones((8, 8))}, path)
    placement(path, mesh=line(), rules=[("v", P())])
    assert "rules= that match no leaf: 'v'" in caplog.text
