"""Scenes of the door of Orbax's shape."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["restore_by_the_door", "save_by_the_door"]


def _array(step):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    data = np.arange(8.0, dtype=np.float32) + step
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)


def _handler(ocp):
    class Position(ocp.CheckpointHandler):
        def save(self, directory, args):
            (directory / f"process_{jax.process_index()}.txt").write_text(str(args.item))

        def restore(self, directory, args=None):
            return int((directory / f"process_{jax.process_index()}.txt").read_text())

    class Save(ocp.args.CheckpointArgs):
        def __init__(self, item=0):
            self.item = item

    ocp.args.register_with_handler(Position, for_save=True, for_restore=True)(Save)
    return Save


def save_by_the_door(root):
    from eformer.compat import orbax as ocp

    position, args = _handler(ocp), ocp.args
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(root, options=options) as it:
        for step in range(4):
            state = args.StandardSave({"w": _array(step), "n": step})
            it.save(
                step,
                args=args.Composite(state=state, data=position(step * 10), config=args.JsonSave({"a": 1})),
            )
        it.wait_until_finished()
        return it.all_steps()


def restore_by_the_door(root):
    from eformer.compat import orbax as ocp

    position, args = _handler(ocp), ocp.args
    with ocp.CheckpointManager(root) as it:
        target = {"w": _array(0), "n": 0}
        found = it.restore(None, args=args.Composite(state=args.StandardRestore(target), data=position()))
    return (
        [float(shard.data[0]) for shard in found.state["w"].addressable_shards],
        found.data,
        found.state["n"],
    )
