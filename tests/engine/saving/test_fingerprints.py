"""A fingerprint depends on dtype, shape and elements alone, and a checkpoint in any format has the same one."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.record import fingerprints as recorded
from eformer._engine.record.fingerprints import whole_cut
from eformer._engine.saving import commit, source_digests
from eformer._engine.saving import fingerprints as digested
from eformer._engine.trees import device_digests, devices
from eformer.checkpoint import convert, fingerprint, inspect, load, save
from eformer.errors import LeafError
from support.meshes import layouts, meshes

BLOCK = 64  # bytes of a piece, so that small arrays have many

CHECKED = {"checksums": True}
FORMATS = {
    "safetensors": {},
    "zarr": {"format": "zarr", "options": CHECKED},
    "zarr, small chunks": {"format": "zarr", "options": {"max_chunk_bytes": 90} | CHECKED},
    "zarr, zstd": {"format": "zarr", "options": {"compression": "zstd", "max_chunk_bytes": 100} | CHECKED},
    "ocdbt": {"format": "zarr", "options": {"ocdbt": True} | CHECKED},
}
DTYPES = [
    "float32",
    "bfloat16",
    "int8",
    "int4",
    "uint2",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "complex64",
    "bool",
]


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (recorded, digested, commit):
        monkeypatch.setattr(module, "PIECE_BYTES", BLOCK)
    whole_cut.cache_clear()
    yield
    whole_cut.cache_clear()


def by_the_page(array):
    """Compute a fingerprint as docs/format/manifest.md describes it."""
    digests = "".join(xxhash.xxh3_128_hexdigest(piece) for piece in _pieces(array))
    return xxhash.xxh3_128_hexdigest(f"{array.dtype}{list(array.shape)}\n{digests}".encode())


def _pieces(array):
    if array.dtype.name == "float4_e2m1fn" and array.size and array.size % 2 == 0:
        bits = np.frombuffer(array.tobytes(), np.uint8)
        yield (bits[0::2] & 15 | bits[1::2] << 4).tobytes()
    elif array.size and (array.nbytes <= BLOCK or array.size == 1):
        yield array.tobytes()
    elif array.size and array[0].nbytes <= BLOCK:
        rows = BLOCK // array[0].nbytes
        yield from (array[start : start + rows].tobytes() for start in range(0, len(array), rows))
    elif array.size:
        for row in array:
            yield from _pieces(row)


def numbers(dtype, shape, seed=0):
    values = np.random.default_rng(seed).integers(0, 2, shape)
    return np.asarray(values).astype(jnp.dtype(dtype))


sharded = st.sampled_from(
    [P(), P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y"))]
)
shapes = st.lists(st.sampled_from([1, 2, 3, 8, 16, 24]), max_size=3).map(tuple)


@given(st.sampled_from(DTYPES), shapes, sharded, st.integers(0, 2))
@example("float32", (0, 3), P(), 0)
@example("float4_e2m1fn", (8, 16), P(None, "x"), 1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sharding_of_any_array_has_the_fingerprint_of_its_elements(
    small_pieces, dtype, shape, spec, mesh
):
    array = numbers(dtype, shape)
    sharding = NamedSharding(meshes()[mesh], fitting(spec, shape, meshes()[mesh]))
    expected = by_the_page(array)
    assert fingerprint({"w": array, "x": jax.device_put(array, sharding)}) == {"w": expected, "x": expected}


def fitting(spec, shape, mesh):
    """Return the spec without the axes that the mesh lacks, or that do not divide the shape."""
    kept = []
    for size, axes in zip(shape, spec, strict=False):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        parts = int(np.prod([mesh.shape.get(name, 0) for name in names]))
        kept.append(axes if parts and size % parts == 0 else None)
    return P(*kept)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("before", layouts(), ids=str)
def test_a_checkpoint_of_any_format_has_the_fingerprints_of_the_tree(small_pieces, tmp_path, kind, before):
    tree = {dtype: jax.device_put(numbers(dtype, (16, 24)), layouts()[before]) for dtype in DTYPES}
    tree |= {"odd": np.arange(11 * 7.0).reshape(11, 7), "empty": np.zeros((0, 3)), "n": 3, "text": "a"}
    tree["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 8), layouts()["rows by both"])
    save(tree, tmp_path, **FORMATS[kind])
    assert inspect(tmp_path).trees[""].fingerprints == fingerprint(tree)
    assert fingerprint(load(tmp_path)) == fingerprint(tree)


def test_a_single_file_has_the_fingerprints_of_the_tree(small_pieces, tmp_path):
    tree = {"w": numbers("bfloat16", (16, 24)), "n": 1.5}
    save(tree, tmp_path / "a.safetensors")
    assert inspect(tmp_path / "a.safetensors").trees[""].fingerprints == fingerprint(tree)


@pytest.mark.parametrize(
    "options", [{}, {"max_chunk_bytes": 90}, {"compression": "zstd"}, {"ocdbt": True}], ids=str
)
def test_a_leaf_in_host_memory_has_its_fingerprint_in_every_layout(small_pieces, tmp_path, options):
    tree = {"numpy": numbers("float32", (11, 7)), "jax": jnp.asarray(numbers("bfloat16", (16, 24)))}
    save(tree, tmp_path, format="zarr", options=options)
    assert inspect(tmp_path).trees[""].fingerprints == fingerprint(tree)


def test_columns_in_chunks_of_their_own_have_a_fingerprint_if_checksums_are_asked_for(small_pieces, tmp_path):
    tree = {"w": jax.device_put(numbers("float32", (16, 24)), layouts()["columns"])}
    save(tree, tmp_path / "a", format="zarr")
    save(tree, tmp_path / "b", format="zarr", options=CHECKED)
    assert inspect(tmp_path / "a").trees[""].fingerprints == {"w": None}
    assert inspect(tmp_path / "b").trees[""].fingerprints == fingerprint(tree)


def test_leaves_of_more_than_one_piece_of_usual_size_keep_their_fingerprint(tmp_path):
    array = np.random.default_rng(1).standard_normal((700, 777), np.float32)
    tree = {"w": jax.device_put(array[:, :776], layouts()["columns"]), "v": array}
    for kind in ("safetensors", "zarr"):
        save(tree, tmp_path / kind, format=kind, options=CHECKED)
        assert inspect(tmp_path / kind).trees[""].fingerprints == fingerprint(tree)


@pytest.mark.parametrize(
    "other",
    [
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1],
        np.negative(
            np.arange(6, dtype=np.float32).reshape(2, 3) * [[-0.0, 1, 1], [1, 1, 1]], dtype=np.float32
        ),
        [0.0, 1.0],
    ],
    ids=["shape", "dtype", "order", "sign", "values"],
)
def test_other_leaves_have_other_fingerprints(other):
    one = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert fingerprint(one).get("w") != fingerprint({"w": other}).get("w")


def test_plain_values_and_arrays_of_one_element_have_different_fingerprints():
    leaves = [1, 1.0, True, "1", np.int64(1), np.ones((), np.int64), np.ones(1, np.int64)]
    assert len(set(fingerprint(leaves).values())) == len(leaves)


def test_memory_order_and_byte_order_do_not_matter():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    found = fingerprint({"c": array, "f": np.asfortranarray(array), "big": array.astype(">f4")})
    assert len(set(found.values())) == 1


def test_a_leaf_that_cannot_be_saved_has_no_fingerprint():
    with pytest.raises(LeafError, match="leaf 'w'"):
        fingerprint({"w": np.array(["text"])})


def test_a_converted_checkpoint_keeps_the_fingerprints_where_chunks_are_whole_pieces(tmp_path):
    tree = {"w": np.arange(600 * 700, dtype=np.float32).reshape(600, 700)}
    save(tree, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="zarr")
    assert inspect(tmp_path / "b").trees[""].fingerprints == fingerprint(tree)


# ------------------------------------------------------------------------------------- accelerators


@pytest.fixture
def accelerators(monkeypatch):
    """CPUs count as accelerators. Return the digests that were computed on them."""
    monkeypatch.setattr(device_digests, "ENABLED", True)
    monkeypatch.setattr(devices, "has_accelerator", lambda: True)
    monkeypatch.setattr(source_digests, "is_accelerator", lambda device: True)
    monkeypatch.setattr(digested, "is_in_memory", lambda array: False)
    monkeypatch.setattr("eformer._engine.saving.snapshot._Reader.look_at", lambda *_: ("device", 0, None))
    found = []

    def texts(one, call=source_digests.BoxDigests.texts):
        found.extend(call(one))
        return call(one)

    monkeypatch.setattr(source_digests.BoxDigests, "texts", texts)
    return found


def test_leaves_on_an_accelerator_are_digested_there(accelerators):
    tree = {
        "w": jnp.asarray(np.random.default_rng(0).standard_normal((600, 700), np.float32)),
        "n": jnp.arange(2),
    }
    expected = {
        "w": fingerprint({"w": np.asarray(tree["w"])})["w"],
        "n": fingerprint({"n": np.asarray(tree["n"])})["n"],
    }
    assert not accelerators
    for _ in range(3):  # the first call begins to compile the programs
        assert fingerprint(tree) == expected
        for thread in threading.enumerate():
            if thread.name == "eformer-compile":
                thread.join()
    assert len(accelerators) >= 2


def test_a_save_from_an_accelerator_copies_nothing_twice_unless_checksums_are_asked_for(
    accelerators, tmp_path
):
    tree = {"w": jnp.asarray(numbers("float32", (16, 24)))}
    options = {"compression": "zstd"}
    save(tree, tmp_path / "a", format="zarr", options=options)
    save(tree, tmp_path / "b", format="zarr", options={**options, "checksums": True})
    assert inspect(tmp_path / "a").trees[""].fingerprints == {"w": None}
    assert inspect(tmp_path / "b").trees[""].fingerprints == fingerprint(tree)


def test_numbers_of_less_than_a_byte_have_one_fingerprint_each():
    array = np.array([-1, 3, -8, 7], ml_dtypes.int4)
    assert fingerprint({"w": array}) == fingerprint({"w": jnp.asarray(array)})
