"""Processes that save and load by the documented functions."""

from __future__ import annotations

import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from multihost.scenes.state import SHAPES, bits, check, mesh, tree, whole


def use_manager(path, arguments):
    from eformer.serialization.async_manager import AsyncCheckpointManager

    called = []
    with AsyncCheckpointManager(**arguments) as manager:
        manager.save(tree(), path, mesh=mesh(), prefix="m", callback=called.append, metadata={"a": 1})
        manager.save_async(tree(1), path, mesh=mesh(), prefix="m", callback=called.append)
        manager.wait_until_finished()
        rules = [("local", P()), ("rows", P("y", "x")), (".*", P())]
        loaded, metadata = manager.load(path, mesh(), partition_rules=rules, prefix="m")
    assert called == [str(path), str(path)]
    assert metadata["version"]
    loaded["number"] = int(loaded["number"])
    check(
        {
            **loaded,
            "local": loaded["local"].addressable_data(0),
            "numpy": np.asarray(loaded["numpy"].addressable_data(0)),
            "tuple": (loaded["tuple"][0], loaded["tuple"][1]),
        },
        1,
    )


def save_gathered(path, arguments):
    from eformer.serialization.async_manager import AsyncCheckpointManager

    AsyncCheckpointManager(**arguments).save(tree(), path, mesh=mesh(), do_all_gather=True)


def serialize_leaves(path, with_manager, write_index):
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves

    called = []
    manager = GlobalAsyncCheckpointManager(30) if with_manager else None
    for version in (0, 1) if write_index else (1,):
        saved = tree(version)
        tree_serialize_leaves(
            path,
            saved,
            manager,
            prefix="m",
            commit_callback=lambda: called.append(1),
            write_index=write_index,
        )
        for leaf in jax.tree.leaves(saved["global"]):
            leaf.delete()
    if manager:
        manager.wait_until_finished()
        deadline = time.monotonic() + 20
        while len(called) < (2 if write_index else 1) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(called) == (2 if write_index else 1)
    rules = [("local", P()), ("rows", P("x", "y")), (".*", P())]
    loaded = tree_deserialize_leaves(path, mesh(), manager, prefix="m", partition_rules=rules)
    for name in SHAPES:
        if write_index or name != "bits":  # without an index nobody knows that they are four-bit numbers
            for shard in loaded["global"][name].addressable_shards:
                assert bits(np.asarray(shard.data)) == bits(whole(name, 1)[shard.index]), name
    np.testing.assert_array_equal(loaded["local"].addressable_data(0), np.arange(3.0) + 100)


def broadcast(limit):
    from eformer.serialization.utils import broadcast_tensor

    me = jax.process_index()
    for name in SHAPES:
        host = whole(name) if me == 0 else np.zeros_like(whole(name))
        received = broadcast_tensor(host, limit)
        assert bits(np.asarray(received)) == bits(whole(name)), name
    key = broadcast_tensor(jax.random.key(7 + me), limit)
    assert bits(np.asarray(jax.random.key_data(key))) == bits(
        np.asarray(jax.random.key_data(jax.random.key(7)))
    )
    sharding = NamedSharding(mesh(), P("x"))
    spread = broadcast_tensor(np.arange(16.0, dtype=np.float32) + me, limit, sharding)
    assert spread.sharding.is_equivalent_to(sharding, 1)
    for shard in spread.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(16.0)[shard.index])
    again = broadcast_tensor(spread, limit)
    assert again is spread


def gather_all():
    from eformer.serialization.utils import apply_gather_functions

    gathered = apply_gather_functions(tree()["global"], True, False, False)
    for name, leaf in gathered.items():
        if name != "bits":
            assert bits(leaf) == bits(whole(name)), name


def use_checkpointer(path, rank):
    """Clocks differ by an hour, and one process sees the directory without its last checkpoint."""
    import datetime as dt

    from eformer.serialization import Checkpointer, CheckpointInterval, checkpointer

    now, saved = [dt.datetime(2026, 1, 1, jax.process_index(), tzinfo=dt.UTC)], []
    one = Checkpointer(
        path, dt.timedelta(minutes=7), [CheckpointInterval(20)], dt_now_injection=lambda: now[0]
    )

    def save(name, mesh, metadata):
        Checkpointer(path / name, None, []).save_pytree(tree(metadata["step"]), "model", mesh=mesh)
        saved.append((metadata["step"], metadata["is_temporary"]))

    for step in range(1, 31):
        now[0] += dt.timedelta(minutes=1)
        one.on_step(mesh(), step=step, true_callbacks=[save])
    one.on_step(mesh(), tree(31), force=True, step=31)
    one.wait_until_finished()
    seen = checkpointer.find_latest_checkpoint
    checkpointer.find_latest_checkpoint = lambda root: (
        str(path / "run-20") if jax.process_index() == rank else seen(root)
    )
    try:
        _, metadata = one.load_checkpoint(mesh(), partition_rules=[(".*", P())])
        return saved, metadata["step"]
    finally:
        checkpointer.find_latest_checkpoint = seen
