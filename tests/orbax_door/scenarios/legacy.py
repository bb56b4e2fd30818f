"""Forms of 2022 and 2023 that programs still use: checkpointers as a manager's second argument, `items=`, keywords."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.training import orbax_utils

from orbax_door.inputs import Train, small, state, zeros
from orbax_door.scenario import outcome, scenario, there


@scenario
def one_checkpointer(ocp, root):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    it = ocp.CheckpointManager(root, ocp.PyTreeCheckpointer(), options)
    tree = state()
    for step in range(3):
        yield (
            f"save {step}",
            it.save(step, tree, save_kwargs={"save_args": orbax_utils.save_args_from_target(tree)}),
        )
    yield "steps", it.all_steps()
    yield "plain", it.restore(2)
    yield "items", it.restore(2, items=zeros(tree))
    rules = {"restore_args": ocp.checkpoint_utils.construct_restore_args(tree)}
    yield "rules", it.restore(2, items=zeros(tree), restore_kwargs=rules)
    yield "files", there(root, "2/default")
    yield "structure", outcome(it.item_metadata, 2)
    it.close()


@scenario
def one_asynchronous_checkpointer(ocp, root):
    it = ocp.CheckpointManager(root, ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=50))
    yield "save", it.save(0, small())
    it.wait_until_finished()
    yield "restore", it.restore(0)
    it.close()


@scenario
def several_checkpointers(ocp, root):
    known = {"state": ocp.PyTreeCheckpointer(), "config": ocp.Checkpointer(ocp.JsonCheckpointHandler())}
    it = ocp.CheckpointManager(root, known)
    yield "save", it.save(0, {"state": state(), "config": {"a": 1}})
    yield "restore", it.restore(0)
    yield "restore one", outcome(it.restore, 0, items={"state": None})
    yield "restore by items", it.restore(0, items={"state": zeros(state()), "config": None})
    kwargs = {"state": {"restore_args": ocp.checkpoint_utils.construct_restore_args(state())}}
    yield "restore by rules", it.restore(0, items={"state": zeros(state())}, restore_kwargs=kwargs)
    yield (
        "save with kwargs",
        it.save(
            1,
            {"state": small(), "config": {}},
            save_kwargs={"state": {"save_args": jax.tree.map(lambda _: ocp.SaveArgs(), small())}},
        ),
    )
    yield "one item", outcome(it.save, 2, {"state": small()})
    yield "unknown item", outcome(it.save, 3, {"other": small()})
    yield "files", there(root, "0/state", "0/config/metadata")
    it.close()


@scenario
def several_asynchronous_checkpointers(ocp, root):
    known = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    with ocp.CheckpointManager(directory=root, checkpointers=known) as it:
        yield "save", it.save(0, items={"state": small(), "config": {"a": 1}})
        it.wait_until_finished()
        yield "restore", it.restore(0)
        yield "metadata", it.item_metadata(0)


@scenario
def standard_checkpointer_of_a_manager(ocp, root):
    with ocp.CheckpointManager(root, ocp.StandardCheckpointer()) as it:
        yield "save", outcome(it.save, 0, small())
        it.wait_until_finished()
        yield "restore", outcome(it.restore, 0)
        yield "target", outcome(it.restore, 0, zeros(small()))


@scenario
def new_forms_with_legacy_constructor(ocp, root):
    with ocp.CheckpointManager(root, ocp.PyTreeCheckpointer()) as it:
        yield "save", outcome(it.save, 0, args=ocp.args.PyTreeSave(small()))
        yield "restore", outcome(it.restore, 0, args=ocp.args.PyTreeRestore())


@scenario
def legacy_forms_with_new_constructor(ocp, root):
    with ocp.CheckpointManager(root / "a") as it:
        yield "tree", outcome(it.save, 0, small())
        yield "restore", outcome(it.restore, 0)
    with ocp.CheckpointManager(root / "b") as it:
        it.save(0, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "items", outcome(it.restore, 0, items=zeros(small()))
        yield "positional args", outcome(it.restore, 0, ocp.args.StandardRestore(zeros(small())))


@scenario
def tree_and_args(ocp, root):
    """simply gives the tree and the args."""
    with ocp.CheckpointManager(root) as it:
        yield "save", outcome(it.save, 0, small(), args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "restore", outcome(it.restore, 0, args=ocp.args.StandardRestore())


@scenario
def keywords_of_a_checkpointer(ocp, root):
    tree = state()
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "a", tree, save_args=orbax_utils.save_args_from_target(tree))
        yield "item", it.restore(root / "a", item=zeros(tree))
        yield (
            "rules",
            it.restore(root / "a", item=zeros(tree), restore_args=orbax_utils.restore_args_from_target(tree)),
        )
        yield (
            "transforms",
            it.restore(
                root / "a",
                item={"step": 0},
                restore_args={"step": ocp.RestoreArgs(restore_type=int)},
                transforms={},
            ),
        )
        yield "positional item", it.restore(root / "a", zeros(tree))
        more = {**zeros(tree), "new": np.zeros(2)}
        yield "more leaves", outcome(it.restore, root / "a", item=more, transforms={})
        none = {**zeros(tree), "new": None}
        kept = {"new": ocp.Transform(use_fallback=True)}
        yield "fallback", outcome(it.restore, root / "a", item=none, transforms=kept)


@scenario
def target_of_flax(ocp, root):
    tree = Train(3, {"w": jnp.ones((2, 2))})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as it:
        it.save(root / "a", tree, save_args=orbax_utils.save_args_from_target(tree))
        yield "plain", it.restore(root / "a")
        yield (
            "rules",
            it.restore(root / "a", item=tree, restore_args=orbax_utils.restore_args_from_target(tree)),
        )
        yield "metadata", it.metadata(root / "a").item_metadata.tree


@scenario
def checkpoints_of_flax(ocp, root):
    """flax.training.checkpoints with a checkpointer of the caller."""
    from flax.training import checkpoints

    with ocp.PyTreeCheckpointer() as it:
        for step in (1, 2, 10):
            path = checkpoints.save_checkpoint(
                str(root), small(), step, orbax_checkpointer=it, keep=2, overwrite=True
            )
        yield "path", path
        yield "latest", checkpoints.latest_checkpoint(str(root))
        yield "plain", outcome(checkpoints.restore_checkpoint, str(root), None, orbax_checkpointer=it)
        yield (
            "target",
            outcome(checkpoints.restore_checkpoint, str(root), zeros(small()), orbax_checkpointer=it),
        )
        yield "files", there(root, "checkpoint_1", "checkpoint_2", "checkpoint_10")


@scenario
def data_of_grain(ocp, root):
    import grain.python as grain

    data = grain.DataLoader(
        data_source=grain.RangeDataSource(0, 20, 1),
        sampler=grain.IndexSampler(20, grain.NoSharding(), True, 1, 0),
        worker_count=0,
    )
    it = iter(data)
    first = [next(it) for _ in range(3)]
    with ocp.CheckpointManager(root) as manager:
        save = grain.PyGrainCheckpointSave(it)
        yield (
            "save",
            manager.save(0, args=ocp.args.Composite(data=save, state=ocp.args.StandardSave(small()))),
        )
        manager.wait_until_finished()
        then = [next(it) for _ in range(3)]
        other = iter(data)
        asked = ocp.args.Composite(
            data=grain.PyGrainCheckpointRestore(other), state=ocp.args.StandardRestore()
        )
        found = manager.restore(0, args=asked)
        yield "state", found.state
        yield "type", found.data is other
        yield (
            "then",
            [int(each) for each in first + then] == [*map(int, first), *(int(next(other)) for _ in range(3))],
        )
        yield "files", there(root, "0/data", "0/data/process_0-of-1.json")


@scenario
def args_of_orbax_itself(ocp, root):
    """Libraries hand over objects of Orbax."""
    import orbax.checkpoint as theirs

    args = theirs.args
    with ocp.CheckpointManager(root, options=theirs.CheckpointManagerOptions(max_to_keep=2)) as it:
        yield "save", it.save(0, args=args.Composite(a=args.StandardSave(small()), b=args.JsonSave({"x": 1})))
        it.wait_until_finished()
        asked = args.Composite(a=args.StandardRestore(zeros(small())), b=args.JsonRestore())
        yield "restore", it.restore(0, args=asked)["a"]
        yield "mixed", it.restore(0, args=ocp.args.Composite(a=args.StandardRestore()))["a"]
    with ocp.PyTreeCheckpointer() as it:
        it.save(
            root / "p",
            state(),
            args=args.PyTreeSave(state(), save_args=jax.tree.map(lambda _: theirs.SaveArgs(), state())),
        )
        rules = theirs.checkpoint_utils.construct_restore_args(state())
        yield "rules", it.restore(root / "p", args=args.PyTreeRestore(state(), restore_args=rules))
        yield (
            "placeholder",
            it.restore(
                root / "p", args=args.PyTreeRestore(jax.tree.map(lambda _: theirs.PLACEHOLDER, state()))
            ),
        )
    policy = theirs.checkpoint_managers.LatestN(1)
    with ocp.CheckpointManager(
        root / "q", options=ocp.CheckpointManagerOptions(preservation_policy=policy)
    ) as it:
        for step in range(2):
            it.save(step, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "policy", it.all_steps()


@scenario
def handler_of_orbax_itself(ocp, root):
    import orbax.checkpoint as theirs

    class Mine(theirs.CheckpointHandler):
        def save(self, directory, item):
            (directory / "x.txt").write_text(item)

        def restore(self, directory, item=None):
            return (directory / "x.txt").read_text()

    with ocp.Checkpointer(Mine()) as it:
        yield "save", outcome(it.save, root / "a", "hello")
        yield "restore", outcome(it.restore, root / "a")
