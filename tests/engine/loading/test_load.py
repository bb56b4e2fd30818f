"""A load as a whole: its order of steps, its restarts, and what belongs to the caller."""

import threading
from types import SimpleNamespace

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eformer._engine.formats import find
from eformer._engine.loading import load as load_module
from eformer._engine.loading.load import load_tree
from eformer._engine.loading.request import Request
from eformer.checkpoint import load, placement, save
from eformer.errors import CorruptionError, FormatError, NotFoundError, StructureError
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import tree_deserialize_leaves
from support.meshes import meshes
from support.trees import Unregistered, assert_same

# --------------------------------------------------------------------------------------------- results


def test_callbacks_get_arrays_that_have_arrived_also_if_the_default_device_is_a_cpu(tmp_path, monkeypatch):
    """The mesh may be one of accelerators."""
    save({"w": jnp.ones(3), "v": jnp.ones(2)}, tmp_path)
    waited, given = [], []
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(["cpu", "cuda"]))
    monkeypatch.setattr(jax, "block_until_ready", waited.extend)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    load(tmp_path, shardings=device, callback=lambda leaf, _: given.append(any(leaf is w for w in waited)))
    assert given == [True, True]


def test_the_record_comes_with_the_tree(tmp_path):
    save({"w": np.ones(3), "step": 4}, tmp_path, metadata={"run": 7})
    loaded = load_tree([tmp_path], Request())
    tree, entry = loaded.tree, loaded.entry
    assert_same(tree, {"w": np.ones(3), "step": 4})
    assert entry.metadata == {"run": 7}
    assert list(entry.leaves) == ["w"]


def test_keys_give_a_flat_dict_and_with_like_its_structure(tmp_path):
    save({"a": {"w": np.ones(3), "n": 1}, "b": 2}, tmp_path)
    assert_same(load(tmp_path, keys="a"), {"a.w": np.ones(3), "a.n": 1})
    like = {"a": {"n": 0, "w": np.zeros(3)}}
    assert_same(load(tmp_path, keys=("a",), like=like), {"a": {"n": 1, "w": np.ones(3)}})


def test_rules_may_be_a_dict_at_every_door(tmp_path):
    mesh, rules = meshes()[0], {"w": P("x")}
    for kind, path in (("safetensors", tmp_path / "a"), ("tensorstore", tmp_path / "b")):
        save({"w": jnp.ones((8, 2)), "b": jnp.ones(3)}, path, prefix="m", format=kind)
        manager = AsyncCheckpointManager()
        loaded = [
            load(path, mesh=mesh, rules=rules),
            manager.load(path, mesh, partition_rules=rules)[0],
            manager.load_pytree(path, mesh, prefix="m", partition_rules=rules)[0],
        ]
        assert [(tree["w"].sharding.spec, tree["b"].sharding.spec) for tree in loaded] == [(P("x"), P())] * 3
        assert placement(path, mesh=mesh, rules=rules).leaves["w"].spec == P("x")
    assert tree_deserialize_leaves(tmp_path / "b", mesh, partition_rules=rules)["w"].sharding.spec == P("x")


def test_a_structure_that_cannot_be_rebuilt_is_refused_unless_it_is_not_needed(tmp_path):
    save(Unregistered(np.ones(3)), tmp_path)
    with pytest.raises(StructureError, match="Unregistered"):
        load(tmp_path)
    assert_same(load(tmp_path, keys="x"), {"x": np.ones(3)})


# --------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("batch", [1, 2, 5, None])
def test_arrays_are_read_batch_by_batch_and_handed_over_in_order(tmp_path, monkeypatch, batch):
    tree = {f"w{i}": np.full(3, i) for i in range(5)}
    save(tree, tmp_path)
    events, read = [], load_module.read_targets

    def recorded(found, entry, targets, *more, **options):
        events.append([target.name for target in targets])
        return read(found, entry, targets, *more, **options)

    monkeypatch.setattr(load_module, "read_targets", recorded)
    assert_same(
        load(tmp_path, options={"batch": batch}, callback=lambda array, name: events.append(name) or array),
        tree,
    )
    names = list(tree)
    size = batch or 5
    expected = []
    for start in range(0, 5, size):
        expected += [names[start : start + size], *names[start : start + size]]
    assert events == expected


def test_a_tree_without_arrays_is_read_once(tmp_path):
    save({"step": 3}, tmp_path)
    assert load(tmp_path, options={"batch": 1}) == {"step": 3}


# -------------------------------------------------------------------------------------------- restarts


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """The first `times` reads find that a newer save has replaced the checkpoint."""
    read = load_module.read_targets

    def install(times):
        left = iter(range(times))

        def replacing(*arguments, **options):
            if (number := next(left, None)) is not None:
                save({"new": np.full(3, number)}, tmp_path)
                raise FileNotFoundError("a file of the older one")
            read(*arguments, **options)

        monkeypatch.setattr(load_module, "read_targets", replacing)

    save({"old": np.zeros(3)}, tmp_path)
    return install


def test_a_checkpoint_that_is_replaced_is_read_again(tmp_path, replaced):
    replaced(3)
    assert_same(load(tmp_path), {"new": np.full(3, 2)})


def test_a_checkpoint_that_is_replaced_all_the_time_is_an_error(tmp_path, replaced, monkeypatch):
    monkeypatch.setattr(find, "_MOST_RESTARTS", 3)
    replaced(100)
    with pytest.raises(FormatError, match="was replaced 3 times while it was being read"):
        load(tmp_path)


def test_a_reader_whom_saves_of_its_own_process_overtake_holds_them_back(tmp_path):
    saves = []
    save({"w": 0}, tmp_path)

    def use(found):
        """Read for longer than a save takes."""
        saves.append(threading.Thread(target=save, args=({"w": len(saves) + 1}, tmp_path)))
        saves[-1].start()
        saves[-1].join(60 if len(saves) <= find._FEW_RESTARTS else 1)
        if find.was_replaced(found):
            raise find.ReplacedError
        return len(saves)

    assert find.reread(tmp_path, use) <= find._FEW_RESTARTS + 2
    for thread in saves:
        thread.join()
    assert load(tmp_path) == {"w": len(saves)}


def test_a_file_that_is_gone_is_damage_if_nothing_was_replaced(tmp_path):
    save({"w": np.zeros(3)}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptionError, match="names a file that is missing") as error:
        load(tmp_path)
    assert isinstance(error.value.__cause__, FileNotFoundError)


def test_nothing_at_the_path_is_not_damage(tmp_path):
    with pytest.raises(NotFoundError):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("error", [FileNotFoundError("mine"), CorruptionError("mine")])
def test_errors_of_the_callers_functions_are_not_taken_for_a_replaced_checkpoint(tmp_path, error):
    save({"w": np.zeros(3)}, tmp_path)

    def replace_and_raise(array, name):
        save({"new": np.ones(3)}, tmp_path)
        raise error

    with pytest.raises(type(error), match=r"^mine$") as caught:
        load(tmp_path, callback=replace_and_raise)
    assert caught.value is error


# ---------------------------------------------------------------------------------- several processes


class Group:
    """Two processes as seen by one of them, whose meetings answer what the test says."""

    def __init__(self, answers=()):
        self.answers, self.steps, self.failures, self.is_over = list(answers), [], [], False

    def meet(self, message, answer):
        self.steps.append(message.decode().split()[-1])
        return self.answers.pop(0) if self.answers else b""

    def fail(self, error):
        self.failures.append(error)

    def end(self):
        self.is_over = True


@pytest.fixture
def group(monkeypatch):
    made = Group()
    monkeypatch.setattr(load_module, "processes_of", lambda placement, like: {0, 1})
    monkeypatch.setattr(load_module, "_hosts", SimpleNamespace(current=lambda *_: made))
    monkeypatch.setattr(load_module, "_BETWEEN_RESTARTS", 0)
    return made


def test_processes_meet_once_after_the_last_read(tmp_path, group):
    save({"a": np.ones(3), "b": np.ones(3)}, tmp_path)
    load(tmp_path, options={"batch": 1})
    assert (group.steps, group.is_over, group.failures) == (["1"], True, [])


def test_for_a_broadcast_they_meet_after_every_batch(tmp_path, group):
    save({"a": np.ones(3), "b": np.ones(3)}, tmp_path)
    load(tmp_path, options={"batch": 1, "broadcast": True})
    assert group.steps == ["0", "1"]


def test_processes_that_have_found_different_saves_start_again(tmp_path, group):
    save({"w": np.ones(3)}, tmp_path)
    group.answers = [b"again", b"again"]
    assert_same(load(tmp_path), {"w": np.ones(3)})
    assert (group.steps, group.failures) == (["0"] * 3, [])


def test_an_error_of_this_process_is_told_to_the_others(tmp_path, group):
    save({"w": np.ones(3)}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptionError) as error:
        load(tmp_path)
    assert group.failures == [error.value]
    assert not group.is_over


def test_a_process_on_its_own_meets_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "_hosts", SimpleNamespace(Hosts=load_module._hosts.Hosts))
    save({"w": jnp.ones(8)}, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    assert len(load(tmp_path, mesh=mesh)["w"].sharding.device_set) == 8


def test_an_axis_that_a_sharding_leaves_open_is_not_cut(tmp_path):
    save({"a": jnp.arange(16)}, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    open_axis = jax.NamedSharding(mesh, jax.P(jax.P.UNCONSTRAINED))
    loaded = load(tmp_path, shardings=open_axis)["a"]
    assert loaded.sharding == open_axis
    np.testing.assert_array_equal(loaded.addressable_data(3), np.arange(16))
