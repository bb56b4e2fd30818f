"""Shardings, boxes and devices of the leaves of a load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading import pinned_stream, placement
from eformer._engine.loading.contents import Contents
from eformer._engine.loading.placement import (
    current_mesh,
    jax_holds,
    on_current_mesh,
    place_targets,
    processes_of,
    refuse_on_devices,
)
from eformer._engine.loading.request import PlacementRequest, Request
from eformer._engine.loading.select import LeafTarget
from eformer._engine.record.boxes import Box
from eformer._engine.record.manifest import LeafEntry
from eformer.checkpoint import LoadOptions
from eformer.errors import MismatchError
from support.meshes import meshes


def grid():
    return meshes()[1]


def target(name="w", shape=(8, 4), dtype="float32", **more):
    return LeafTarget(name, LeafEntry(dtype, shape, (), key=more.pop("key", None)), dtype, **more)


@pytest.fixture
def by_boxes(monkeypatch):
    """As if the leaves were too large to be read whole and cut afterwards."""
    monkeypatch.setattr(placement, "_WORTH_READING_PARTS", 0)


def placed(*targets, broadcast=False, **request):
    contents = Contents({}, {}, b"null")
    options = LoadOptions(broadcast=broadcast)
    place_targets(targets, contents, Request(placement=PlacementRequest(**request), options=options))
    return targets if len(targets) > 1 else targets[0]


# ---------------------------------------------------------------------------------------------- places


def test_without_arguments_leaves_are_read_whole():
    found = placed(target())
    assert (found.sharding, found.boxes, found.device_boxes) == (None, None, None)


def test_each_box_is_read_once_and_every_device_knows_its_own(by_boxes):
    found = placed(target(), mesh=grid(), rules=[("w", P("x"))])
    assert found.boxes == [Box((0, 0), (4, 4)), Box((4, 0), (8, 4))]
    assert dict(zip(found.device_boxes.devices, found.device_boxes.numbers, strict=True)) == {
        device: n // 4 for n, device in enumerate(jax.devices())
    }
    assert (found.is_explicit, found.as_numpy) == (True, False)


def test_a_small_leaf_is_read_whole_and_cut_afterwards():
    found = placed(target(), mesh=grid(), rules=[("w", P("x"))])
    assert found.boxes is None
    assert found.device_boxes.cuts == [(slice(0, 4), slice(0, 4)), (slice(4, 8), slice(0, 4))]


def test_a_leaf_that_every_device_holds_is_read_whole():
    found = placed(target(shape=(2**20, 8)), mesh=grid(), rules=[("w", P())])
    assert (found.boxes, found.device_boxes.cuts, found.device_boxes.numbers) == (None, None, [0] * 8)


def test_leaves_that_are_alike_share_their_placement():
    one, two = placed(target("w"), target("x"), mesh=grid(), rules=[(".", P("x"))])
    assert one.sharding is two.sharding
    assert one.boxes is two.boxes


def test_the_numbers_inside_of_a_key_are_never_cut(by_boxes):
    found = placed(
        target(shape=(8, 2), dtype="uint32", key="threefry2x32"), mesh=grid(), rules=[("w", P("x"))]
    )
    assert found.boxes == [Box((0, 0), (4, 2)), Box((4, 0), (8, 2))]


def test_a_reshaped_leaf_and_a_number_are_read_whole():
    rules = {"mesh": grid(), "rules": [("w", P("x"))]}
    assert placed(target(new_shape=(4, 8)), **rules).boxes is None
    number = placed(target(shape=(), as_numpy=True, like_scalar=0.0), **rules)
    assert (number.sharding, number.as_numpy) == (None, True)


def test_functions_are_kept_for_the_loaded_arrays():
    found, other = placed(target("a"), target("b"), shardings={"a": np.asarray})
    assert (found.transform, other.transform) == (np.asarray, None)


# ------------------------------------------------------------------------------------- 64 bits and others


def test_dtypes_that_jax_would_change_are_known():
    assert jax_holds("bfloat16", x64=False)
    assert not jax_holds("int64", x64=False)
    assert not jax_holds("datetime64[ns]", x64=False)


def test_leaves_that_jax_cannot_hold_stay_in_host_memory_with_a_warning(caplog):
    found, other = placed(target("wide", dtype="int64"), target("w"))
    assert (found.as_numpy, other.as_numpy) == (True, False)
    assert "1 leaves are returned as numpy arrays" in caplog.text
    with pytest.raises(MismatchError, match=r"set jax_enable_x64.*leaf 'wide' is int64\[8, 4\]"):
        placed(target("wide", dtype="int64"), shardings=SingleDeviceSharding(jax.devices()[0]))


def test_nothing_to_refuse_is_no_error():
    refuse_on_devices([])


# ---------------------------------------------------------------------------------------- current mesh


def test_the_current_mesh_is_that_of_set_mesh_and_none_while_tracing():
    assert current_mesh() is None
    with jax.set_mesh(grid()):
        assert current_mesh() == grid()
        found = []
        jax.jit(lambda: found.append(current_mesh()))()
    assert found == [None]


def test_a_mesh_that_is_given_wins_over_the_current_one():
    given = PlacementRequest(mesh=meshes()[0])
    with jax.set_mesh(grid()):
        assert on_current_mesh(given, None) is given
        found = on_current_mesh(PlacementRequest(), None)
    assert (found.mesh, found.is_current_mesh) == (grid(), True)


def test_a_current_mesh_of_several_processes_counts_only_if_an_argument_needs_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # the devices are those of process 0
    abstract = NamedSharding(grid().abstract_mesh, P("x"))
    described = jax.ShapeDtypeStruct((8,), "float32", sharding=abstract)
    with jax.set_mesh(grid()):
        for placement, like in [
            (PlacementRequest(), None),
            (PlacementRequest(shardings={"w": SingleDeviceSharding(jax.devices()[0])}), {"w": jnp.ones(3)}),
        ]:
            assert on_current_mesh(placement, like) is placement
        for placement, like in [
            (PlacementRequest(rules=[]), None),
            (PlacementRequest(shardings={"w": P("x")}), None),
            (PlacementRequest(shardings=abstract), None),
            (PlacementRequest(), {"w": described}),
            (PlacementRequest(), {"w": P("x")}),
        ]:
            assert on_current_mesh(placement, like).mesh == grid()


# ------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    "arguments", [{}, {"mesh": True}, {"shardings": True}], ids=["none", "mesh", "shardings"]
)
def test_devices_of_this_process_alone_need_no_meeting(arguments):
    given = {"mesh": grid(), "shardings": {"w": SingleDeviceSharding(jax.devices()[0])}}
    request = PlacementRequest(**{name: given[name] for name in arguments})
    assert processes_of(request, {"w": jnp.ones(3)}) == set()


def test_processes_are_those_of_the_devices_that_are_named(monkeypatch):
    class Device:
        def __init__(self, process):
            self.process_index = process

    monkeypatch.setattr(placement, "_devices", lambda where: [Device(n) for n in (0, 2)])
    assert processes_of(PlacementRequest(mesh=grid()), None) == {0, 2}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert processes_of(PlacementRequest(mesh=grid()), None) == set()


def test_a_mesh_without_devices_names_none():
    abstract = NamedSharding(grid().abstract_mesh, P("x"))
    assert (
        processes_of(PlacementRequest(), {"w": jax.ShapeDtypeStruct((8,), "float32", sharding=abstract)})
        == set()
    )


# ------------------------------------------------------------------------------------------- broadcast


@pytest.fixture
def shared(monkeypatch, by_boxes):
    """As if every sharding had the same boxes in several processes, and a byte were worth a broadcast."""
    placement._disjoint.cache_clear()
    monkeypatch.setattr(placement, "_is_shared", lambda sharding, shape: True)
    monkeypatch.setattr(placement, "_WORTH_BROADCASTING", 1)
    yield
    placement._disjoint.cache_clear()


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [(P(), (8, 4), P(("x", "y"), None)), (P("x"), (8, 4), P(("x", "y"), None)), (P(), (3, 8), P(None, ("x", "y"))),
     (P(None, "y"), (6, 4), P(("x",), ("y",)))],
)  # fmt: skip
def test_a_leaf_is_read_cut_by_all_axes_and_then_broadcast(shared, spec, shape, expected):
    found = placed(target(shape=shape), broadcast=True, mesh=grid(), shardings=spec)
    assert found.read_sharding.is_equivalent_to(NamedSharding(grid(), expected), len(shape))
    assert len(found.boxes) == 8
    assert found.sharding.spec == spec


@pytest.mark.parametrize("leaf", [{"shape": (3, 5)}, {"dtype": "int4"}], ids=["does not divide", "packed"])
def test_a_leaf_that_cannot_be_cut_further_is_read_by_every_process(shared, leaf):
    assert placed(target(**leaf), broadcast=True, mesh=grid(), shardings=P()).read_sharding is None


def test_a_leaf_that_no_two_processes_hold_is_not_broadcast():
    found = placed(target(shape=(2**10, 2**10)), broadcast=True, mesh=grid(), shardings=P())
    assert found.read_sharding is None


# ---------------------------------------------------------------------------------------- accelerators


def test_what_a_cpu_device_holds_is_not_streamed():
    assert pinned_stream._accelerator(None, None) is None
    assert pinned_stream._accelerator(SingleDeviceSharding(jax.devices()[0]), None) is None


def test_a_numpy_array_is_not_streamed():
    assert pinned_stream.accelerator_of(target(as_numpy=True)) is None
