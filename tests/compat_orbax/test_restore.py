"""Leaves are restored by the rules of Orbax: as they were saved, or as arguments and targets ask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from eformer.compat import orbax as ocp

TREE = {
    "w": jnp.arange(8.0),
    "host": np.arange(3),
    "n": 3,
    "rate": 0.5,
    "text": "hi",
    "none": None,
    "t": (jnp.ones(2), []),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("restore") / "it"
    ocp.PyTreeCheckpointer().save(path, TREE)
    return path


def restored(path, item=None, **options):
    return ocp.PyTreeCheckpointer().restore(path, args=ocp.args.PyTreeRestore(item, **options))


def rules(**chosen):
    plain = {"w": 0, "host": 0, "n": 0, "rate": 0, "text": "", "t": [0]}
    return {**jax.tree.map(lambda _: ocp.RestoreArgs(), plain), **chosen}


def test_without_a_target_leaves_come_back_as_saved(path):
    found = restored(path)
    assert isinstance(found["w"], jax.Array)
    assert isinstance(found["host"], np.ndarray)
    assert (found["n"], found["rate"], found["text"], found["none"]) == (3, 0.5, "hi", None)
    assert type(found["t"]) is list
    assert found["t"][1] == []


@pytest.mark.parametrize(
    ("leaf", "args", "expected"),
    [
        ("w", ocp.RestoreArgs(restore_type=np.ndarray), np.ndarray),
        ("w", ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16), np.ndarray),
        ("host", ocp.RestoreArgs(restore_type=np.ndarray), np.ndarray),
        ("n", ocp.RestoreArgs(restore_type=float), float),
        ("rate", ocp.RestoreArgs(restore_type=int), int),
        ("n", ocp.RestoreArgs(restore_type=np.ndarray), np.ndarray),
    ],
)
def test_a_type_and_a_dtype_are_followed(path, leaf, args, expected):
    found = restored(path, restore_args=rules(**{leaf: args}))[leaf]
    assert isinstance(found, expected)
    assert args.dtype is None or found.dtype == args.dtype


def test_a_sharding_makes_an_array_of_jax(path):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    args = rules(
        w=ocp.ArrayRestoreArgs(sharding=sharding),
        host=ocp.ArrayRestoreArgs(sharding=SingleDeviceSharding(jax.devices()[2])),
    )
    found = restored(path, restore_args=args)
    assert found["w"].sharding == sharding
    assert found["host"].devices() == {jax.devices()[2]}


def test_another_shape_is_refused_or_filled(path):
    sharding = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="Requested shape"):
        restored(path, restore_args=rules(w=ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(9,))))
    loose = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(9,), strict=False)
    assert restored(path, restore_args=rules(w=loose))["w"].tolist() == [*range(8), 0.0]


def test_arrays_and_numbers_are_not_mistaken_for_each_other(path):
    with pytest.raises(ValueError, match="not a scalar"):
        restored(path, restore_args=rules(w=ocp.RestoreArgs(restore_type=int)))
    with pytest.raises(ValueError, match="saved as 'string'"):
        restored(path, restore_args=rules(text=ocp.RestoreArgs(restore_type=np.ndarray)))


def test_an_item_gives_the_structure_alone(path):
    item = {**dict.fromkeys(TREE, 0), "none": None, "t": (0, [])}
    found = restored(path, item)
    assert type(found["t"]) is tuple
    assert found["w"].shape == (8,)


def test_missing_leaves_stay_as_asked(path):
    new = jax.ShapeDtypeStruct((2,), np.float32)
    item = {"w": jnp.zeros(8), "new": new}
    args = ocp.checkpoint_utils.construct_restore_args(item)
    assert restored(path, item, restore_args=args, partial_restore=True)["new"] is new
    found = restored(path, item, restore_args=args, transforms={})
    assert found["new"] is new
    assert found["w"].tolist() == list(range(8))


def test_another_structure_is_one_error(path):
    with pytest.raises(ValueError, match="User-provided restore item") as raised:
        restored(path, {"w": 0, "x": 0})
    assert "lacks 'x'" in str(raised.value)
    assert "lacks 'host'" in str(raised.value)


def test_placeholders_are_not_read(path):
    item = {**dict.fromkeys(TREE, ocp.PLACEHOLDER), "none": None, "t": (ocp.PLACEHOLDER, []), "n": 0}
    found = restored(path, item)
    assert found["w"] is ocp.PLACEHOLDER
    assert found["n"] == 3


def test_leaves_are_renamed_and_computed(path):
    item = {"v": jnp.zeros(8), "n": 0}
    transforms = {"v": ocp.Transform(original_key="w"), "n": ocp.Transform(value_fn=lambda n: n * 2)}
    args = {"v": ocp.RestoreArgs(), "n": ocp.RestoreArgs()}
    found = restored(path, item, restore_args=args, transforms=transforms)
    assert found["v"].tolist() == list(range(8))
    assert found["n"] == 6
    with pytest.raises(NotImplementedError, match="legacy_transform_fn"):
        restored(path, item, legacy_transform_fn=lambda *_: None)


def test_a_standard_target_decides(tmp_path):
    with ocp.StandardCheckpointer() as it:
        it.save(tmp_path / "it", {"w": jnp.arange(4.0), "host": np.arange(3), "n": 3})
        sharding = SingleDeviceSharding(jax.devices()[1])
        target = {
            "w": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=sharding),
            "host": jax.ShapeDtypeStruct((3,), np.int8),
            "n": 0.0,
        }
        found = it.restore(tmp_path / "it", target)
    assert (found["w"].dtype, found["w"].sharding) == (jnp.bfloat16, sharding)
    assert isinstance(found["host"], np.ndarray)
    assert found["host"].dtype == np.int8
    assert type(found["n"]) is float


@pytest.mark.parametrize(
    ("leaf", "problem"), [("text", "Unsupported type"), (1j, "Unsupported type"), (b"x", "Unsupported type")]
)
def test_standard_refuses_the_leaves_that_orbax_refuses(tmp_path, leaf, problem):
    with ocp.StandardCheckpointer() as it, pytest.raises(ValueError, match=problem):
        it.save(tmp_path / "it", {"a": leaf})
    assert not (tmp_path / "it").exists()


def test_constructed_rules():
    target = {"a": jnp.zeros(2), "b": jax.ShapeDtypeStruct((2,), np.int8), "c": 3, "d": "x", "e": None}
    found = ocp.checkpoint_utils.construct_restore_args(target)
    assert isinstance(found["a"], ocp.ArrayRestoreArgs)
    assert (found["b"].restore_type, found["b"].dtype) == (np.ndarray, np.int8)
    assert (found["c"].restore_type, found["d"].restore_type, found["e"]) == (int, str, None)


def test_a_handler_of_types_is_refused_with_the_way_around():
    ocp.type_handlers.register_type_handler(
        jax.Array, ocp.type_handlers.SingleReplicaArrayHandler(), override=True
    )
    with pytest.raises(NotImplementedError, match="register_module"):
        ocp.type_handlers.register_type_handler(jax.Array, object(), override=True)
