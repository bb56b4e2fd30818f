"""When a tree of arrays is committed: at once, or by a manager of JAX."""

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from eformer import checkpoint
from eformer.errors import FormatError
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from support.arrays import INDEX, index_of
from support.meshes import line
from support.states import tree_of_all_kinds
from support.trees import assert_same


class Held(GlobalAsyncCheckpointManager):
    """JAX's manager, which commits when it is told to."""

    def __init__(self):
        super().__init__(timeout_secs=60)
        self.gate = threading.Event()
        self.before = lambda: None

    def serialize(self, arrays, tensorstore_specs, *, on_commit_callback):
        def commit():
            assert self.gate.wait(60)
            self.before()
            on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit)

    def commit(self):
        self.gate.set()
        self.wait_until_finished()


@pytest.fixture
def jax_manager():
    manager = GlobalAsyncCheckpointManager(60)
    yield manager
    manager.wait_until_finished()


@pytest.fixture
def held():
    manager = Held()
    yield manager
    with suppress(Exception):
        manager.commit()


def test_the_callback_runs_once_after_the_commit(path):
    seen = []
    tree_serialize_leaves(
        path, {"w": jnp.ones(2)}, commit_callback=lambda: seen.append(tree_deserialize_leaves(path, line()))
    )
    assert_same(seen, [{"w": jnp.ones(2)}])


def test_an_error_of_the_commit_callback_is_the_callers_and_the_tree_is_there(path):
    with pytest.raises(ZeroDivisionError):
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, commit_callback=lambda: 1 / 0)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


@pytest.mark.parametrize("prefix", [None, "model"])
def test_the_manager_of_jax_writes_every_kind_of_tree(path, jax_manager, prefix):
    tree_serialize_leaves(path, tree_of_all_kinds(), jax_manager, prefix=prefix)
    assert_same(tree_deserialize_leaves(path, line(), jax_manager, prefix=prefix), tree_of_all_kinds())
    assert checkpoint.verify(path).ok


@pytest.mark.parametrize("tree", [{}, None, 3, jnp.arange(3), {"n": np.ones(2)}], ids=str)
def test_the_manager_of_jax_writes_the_smallest_trees(path, jax_manager, tree):
    tree_serialize_leaves(path, tree, jax_manager)
    assert_same(tree_deserialize_leaves(path, line(), jax_manager), tree)


def test_a_managed_save_has_the_bytes_of_any_other(path, jax_manager):
    tree = {"w": jnp.arange(100.0).reshape(10, 10), "n": np.arange(3), "bits": jnp.ones(3, jnp.int4)}
    tree_serialize_leaves(path / "ours", tree, write_index=False)
    tree_serialize_leaves(path / "theirs", tree, jax_manager, write_index=False)
    jax_manager.wait_until_finished()
    ours, theirs = (
        {str(p.relative_to(path / by)): p.read_bytes() for p in (path / by).rglob("*") if p.is_file()}
        for by in ("ours", "theirs")
    )
    assert theirs == ours


def test_the_manager_of_ours_may_be_handed_over(path):
    manager = AsyncCheckpointManager().global_manager
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, manager, prefix="m")
    assert_same(tree_deserialize_leaves(path, line(), manager), {"w": jnp.ones(2)})


def test_the_index_appears_only_once_the_arrays_are_committed(path, held):
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, held)
    assert not (path / INDEX).exists()
    with pytest.raises(FileNotFoundError):
        tree_deserialize_leaves(path, line())
    held.commit()
    assert index_of(path)["arrays"] == [{"path": "w", "shape": [2], "dtype": "float32"}]
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


def test_until_the_commit_the_tree_before_is_there(path, held):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)})
    tree_serialize_leaves(path, {"w": jnp.ones((3, 3))}, held)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})
    held.commit()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones((3, 3))})


def test_a_held_commit_holds_no_other_save(path, held):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)}, held, prefix="slow")
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="quick")
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})
    held.commit()
    assert sorted(index_of(path)["prefixes"]) == ["quick", "slow"]


def test_the_callback_of_a_managed_save_runs_once_after_the_commit(path, held):
    seen = []
    tree_serialize_leaves(
        path, {"w": jnp.ones(2)}, held, commit_callback=lambda: seen.append((path / INDEX).exists())
    )
    assert seen == []
    held.commit()
    assert seen == [True]


def test_an_error_of_a_managed_commit_callback_surfaces_when_one_waits(path):
    manager = GlobalAsyncCheckpointManager(60)
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, manager, commit_callback=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.wait_until_finished()
    manager.wait_until_finished()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


@pytest.mark.parametrize("report", ["wait_until_finished", "check_for_errors"])
def test_a_save_that_fails_surfaces_when_one_asks_and_leaves_the_tree_before(path, held, report):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)})
    index, seen = (path / INDEX).read_bytes(), []
    tree_serialize_leaves(path, {"w": jnp.ones(64)}, held, commit_callback=lambda: seen.append(1))
    held.before = lambda: (path / INDEX).write_bytes(b"damaged")
    held.gate.set()
    held._thread.join()
    with pytest.raises(FormatError, match=f"{INDEX} is not an index of arrays"):
        getattr(held, report)()
    assert seen == []
    (path / INDEX).write_bytes(index)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})
    held.before = lambda: None
    tree_serialize_leaves(path, {"w": jnp.ones(3)}, held)
    held.commit()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(3)})


def test_an_error_of_the_save_before_leaves_nothing_behind(path):
    manager = GlobalAsyncCheckpointManager(60)
    tree_serialize_leaves(path / "first", {"w": jnp.ones(2)}, manager, commit_callback=lambda: 1 / 0)
    with suppress(
        ZeroDivisionError
    ):  # JAX's manager waits for what it is writing, and raises what that raised
        tree_serialize_leaves(path / "second", {"w": jnp.ones(2)}, manager)
        manager.wait_until_finished()
    second = path / "second"
    assert not second.exists() or not [p for p in second.iterdir() if p.name.startswith(".")]
    tree_serialize_leaves(second, {"w": jnp.ones(2)}, manager)
    assert_same(tree_deserialize_leaves(second, line(), manager), {"w": jnp.ones(2)})


def test_a_managed_save_may_leave_the_index_out(path, jax_manager):
    tree_serialize_leaves(path, {"a": {"w": jnp.ones(2)}}, jax_manager, prefix="m", write_index=False)
    jax_manager.wait_until_finished()
    assert not (path / INDEX).exists()
    assert_same(tree_deserialize_leaves(path, line(), prefix="m"), {"a": {"w": jnp.ones(2)}})


def test_after_a_managed_save_returns_arrays_may_be_donated_and_changed(path, held):
    tree = {"donated": jnp.arange(5000.0), "deleted": jnp.arange(5000), "numpy": np.arange(5000.0)}
    expected = jax.tree.map(np.array, tree)
    tree_serialize_leaves(path, tree, held)
    jax.jit(lambda x: x * 0, donate_argnums=0)(tree["donated"]).block_until_ready()
    tree["deleted"].delete()
    tree["numpy"][:] = 0
    held.commit()
    assert_same(jax.tree.map(np.array, tree_deserialize_leaves(path, line())), expected)


def test_a_managed_save_that_failed_keeps_no_arrays(path):
    manager, tree = GlobalAsyncCheckpointManager(60), {"w": jnp.ones(5000)}
    kept = weakref.ref(tree["w"])
    path.mkdir(parents=True)
    (path / INDEX).write_bytes(b"damaged")
    tree_serialize_leaves(path, tree, manager)
    with pytest.raises(FormatError, match=f"{INDEX} is not an index of arrays"):
        manager.wait_until_finished()
    del tree
    gc.collect()
    assert kept() is None


def test_a_managed_save_replaces_the_one_before(path, jax_manager):
    for tree in ({"w": jnp.ones((8, 8))}, {"w": jnp.ones(3, jnp.int8)}, {"v": jnp.ones((2, 2))}):
        tree_serialize_leaves(path, tree, jax_manager, prefix="m")
        assert_same(tree_deserialize_leaves(path, line(), jax_manager), tree)
    assert len(list(path.rglob(".zarray"))) == 1


def test_everything_works_in_a_running_event_loop(path, jax_manager):
    async def notebook():
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="a")
        tree_serialize_leaves(path, {"w": jnp.zeros(2)}, jax_manager, prefix="b")
        jax_manager.wait_until_finished()
        return [tree_deserialize_leaves(path, line(), jax_manager, prefix=prefix) for prefix in "ab"]

    assert_same(asyncio.run(notebook()), [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}])
