"""CheckpointManager: construction, save, restore, listing, deletion, errors."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import abstract, small, state, zeros
from orbax_door.scenario import json_of, listing, manager, outcome, scenario, there


@scenario
def new_root_is_made(ocp, root):
    with ocp.CheckpointManager(root / "a" / "b") as it:
        yield "made", there(root, "a/b")
        yield "inside", listing(root / "a/b")
        yield "steps", it.all_steps()
        yield "latest", it.latest_step()
        yield "best", it.best_step()
        yield "directory", it.directory
        yield "below", (it.directory / "x").name
        yield "exists", it.directory.exists()


@scenario
def root_is_not_made(ocp, root):
    with manager(ocp, root / "none", create=False) as it:
        yield "made", there(root, "none")
        yield "steps", it.all_steps()
        yield "read", it.all_steps(read=True)
        yield "latest", it.latest_step()
        yield "restore", outcome(it.restore, None)


@scenario
def one_item(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "save", it.save(0, args=ocp.args.StandardSave(state()))
        yield "listed at once", it.all_steps()
        it.wait_until_finished()
        yield "restore", it.restore(0)
        yield "restore by target", it.restore(0, args=ocp.args.StandardRestore(abstract(state())))
        yield (
            "files",
            there(root, "0", "0/default", "0/_CHECKPOINT_METADATA", "0/commit_success.txt", "metadata"),
        )
        yield "root", listing(root)


@scenario
def one_item_by_pytree(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(3, args=ocp.args.PyTreeSave(state()))
        it.wait_until_finished()
        yield "restore", outcome(it.restore, 3)
        yield "by args", it.restore(3, args=ocp.args.PyTreeRestore())
        rules = ocp.checkpoint_utils.construct_restore_args(state())
        yield "by item", it.restore(3, args=ocp.args.PyTreeRestore(state(), restore_args=rules))


@scenario
def several_items(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({"a": [1, 2]})))
        it.wait_until_finished()
        found = it.restore(1)
        yield "all", found
        yield "state", found.state
        yield "config", found["config"]
        yield "keys", sorted(found.keys())
        yield "in", ("state" in found, "other" in found)
        yield "one", it.restore(1, args=args.Composite(config=args.JsonRestore()))
        yield "files", there(root, "1/state", "1/config", "1/config/metadata", "1/default")
        yield "json", json_of(root, "1/config/metadata")


@scenario
def several_items_by_dict(ocp, root):
    items = {
        "params": ocp.args.StandardSave(small()),
        "opt.state": ocp.args.StandardSave({"m": jnp.zeros(3)}),
    }
    with ocp.CheckpointManager(root) as it:
        yield "save", it.save(4, args=ocp.args.Composite(**items))
        it.wait_until_finished()
        yield (
            "all",
            it.restore(4, args=ocp.args.Composite(**{key: ocp.args.StandardRestore() for key in items})),
        )
        yield "files", there(root, "4/params", "4/opt.state")


@scenario
def items_of_a_new_manager(ocp, root):
    """A manager that saved nothing itself restores every item whose kind is known."""
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({"a": 1})))
    with ocp.CheckpointManager(root) as it:
        yield "without args", outcome(it.restore, 1)
    with ocp.CheckpointManager(root) as it:
        yield "with args", it.restore(1, args=args.Composite(state=args.StandardRestore()))
        yield "without args then", outcome(it.restore, 1)
    with ocp.CheckpointManager(root, item_names=("state", "config")) as it:
        yield "item names", outcome(it.restore, 1)
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as it:
        yield "item handlers", it.restore(1)


@scenario
def one_item_of_a_new_manager(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=ocp.args.StandardSave(small()))
    with ocp.CheckpointManager(root) as it:
        yield "without args", outcome(it.restore, 1)
    with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as it:
        yield "with a handler", it.restore(1)
    with ocp.CheckpointManager(root) as it:
        yield "with args", it.restore(1, args=ocp.args.StandardRestore(zeros(small())))


@scenario
def restore_of_nothing(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "latest of none", outcome(it.restore, None)
        yield "latest of none with args", outcome(it.restore, None, args=ocp.args.StandardRestore())
        yield "absent step", outcome(it.restore, 5)
        yield "absent step with args", outcome(it.restore, 5, args=ocp.args.StandardRestore())
        it.save(0, args=ocp.args.Composite(a=ocp.args.StandardSave(small())))
        it.wait_until_finished()
        absent = ocp.args.Composite(b=ocp.args.StandardRestore())
        yield (
            "absent item",
            outcome(it.restore, 0, args=absent, words='Item "b" was not found.*Available items'),
        )


@scenario
def latest_is_restored(ocp, root):
    with ocp.CheckpointManager(root) as it:
        for step in (0, 10, 2000):
            it.save(step, args=ocp.args.StandardSave({"step": jnp.int32(step)}))
        yield "before the end", it.restore(None, args=ocp.args.StandardRestore())
        yield "latest", it.restore(it.latest_step())
        yield "steps", it.all_steps()


@scenario
def step_exists(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=ocp.args.StandardSave(small()))
        again = ocp.args.StandardSave(small())
        yield "again, declined", outcome(it.save, 1, args=again)
        yield "again, forced", outcome(it.save, 1, args=again, force=True, words="already exists")
        it.save(3, args=again)
        yield "older, declined", it.save(2, args=again)
        yield "older, forced", it.save(2, args=again, force=True)
        it.wait_until_finished()
        yield "steps", it.all_steps()
        yield "read", it.all_steps(read=True)


@scenario
def older_step_and_latest(ocp, root):
    with ocp.CheckpointManager(root) as it:
        for step in (5, 3):
            it.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)}), force=True)
        it.wait_until_finished()
        yield "latest", it.latest_step()
        it.reload()
        yield "latest after reload", it.latest_step()


@scenario
def step_that_another_wrote(ocp, root):
    """A step on disk that the manager has not listed is replaced."""
    with ocp.CheckpointManager(root) as it, ocp.CheckpointManager(root) as other:
        other.save(1, args=ocp.args.StandardSave({"a": jnp.zeros(3)}))
        other.wait_until_finished()
        yield "not listed", it.all_steps()
        yield "saved", it.save(1, args=ocp.args.StandardSave({"a": jnp.ones(3)}))
        it.wait_until_finished()
        yield "value", it.restore(1)


@scenario
def another_manager_lists(ocp, root):
    with ocp.CheckpointManager(root) as it, ocp.CheckpointManager(root) as other:
        it.save(1, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "cached", other.all_steps()
        yield "cached latest", other.latest_step()
        yield "read", other.all_steps(read=True)
        other.reload()
        yield "after reload", other.all_steps()
        yield "latest after reload", other.latest_step()


@scenario
def steps_of_other_types(ocp, root):
    with ocp.CheckpointManager(root) as it:
        for step in (np.int64(1), jnp.int32(2), np.int32(3)):
            yield (
                f"save {type(step).__name__}",
                outcome(it.save, step, args=ocp.args.StandardSave({"a": jnp.zeros(2)})),
            )
        it.wait_until_finished()
        yield "read", it.all_steps(read=True)
        yield "restore", outcome(it.restore, np.int64(3))
        yield "files", there(root, "1", "2", "3")
        yield "float", outcome(it.save, 4.5, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))


@scenario
def save_without_anything(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "nothing", outcome(it.save, 0)
        yield "tree as args", outcome(it.save, 0, args=small())
        yield "args as items", outcome(it.save, 0, ocp.args.StandardSave(small()))
        yield "restore args as save args", outcome(it.save, 0, args=ocp.args.StandardRestore())


@scenario
def mode_is_fixed_by_first_use(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root / "one") as it:
        it.save(0, args=args.StandardSave(small()))
        it.wait_until_finished()
        yield "composite", outcome(it.save, 1, args=args.Composite(a=args.StandardSave(small())))
        yield "restore composite", outcome(it.restore, 0, args=args.Composite(default=args.StandardRestore()))
    with ocp.CheckpointManager(root / "many") as it:
        it.save(0, args=args.Composite(a=args.StandardSave(small())))
        it.wait_until_finished()
        yield "one item", outcome(it.save, 1, args=args.StandardSave(small()))
        yield "restore one", outcome(it.restore, 0, args=args.StandardRestore())


@scenario
def kind_of_item_is_fixed(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=args.Composite(a=args.StandardSave(small())))
        it.wait_until_finished()
        other = args.Composite(a=args.JsonSave({"a": 1}))
        yield (
            "another kind",
            outcome(it.save, 1, args=other, words="does not match with any registered handler"),
        )
        wrong = args.Composite(a=args.JsonRestore())
        yield (
            "restored by another kind",
            outcome(it.restore, 0, args=wrong, words="does not match with any registered handler"),
        )
        yield "steps", it.all_steps(read=True)


@scenario
def item_left_out(ocp, root):
    """Items may differ from step to step."""
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=args.Composite(a=args.StandardSave(small()), b=args.JsonSave({})))
        it.save(1, args=args.Composite(a=args.StandardSave(small())))
        it.wait_until_finished()
        yield "both", it.restore(0)
        yield "one", it.restore(1)
        both = args.Composite(a=args.StandardRestore(), b=args.JsonRestore())
        yield "absent", outcome(it.restore, 1, args=both)


@scenario
def empty_composite(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "save", outcome(it.save, 0, args=ocp.args.Composite())
        yield "wait", outcome(it.wait_until_finished)
        yield "steps", it.all_steps(read=True)
        yield "restore", outcome(it.restore, 0)
        yield "restore nothing", outcome(it.restore, 0, args=ocp.args.Composite())


@scenario
def restore_from_another_root(ocp, root):
    with ocp.CheckpointManager(root / "old") as old:
        old.save(7, args=ocp.args.StandardSave(small()))
    with ocp.CheckpointManager(root / "new") as it:
        found = it.restore(7, args=ocp.args.StandardRestore(zeros(small())), directory=root / "old")
        yield "restored", found
        yield "steps", it.all_steps()


@scenario
def delete(ocp, root):
    with ocp.CheckpointManager(root) as it:
        for step in range(3):
            it.save(step, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        it.wait_until_finished()
        yield "result", it.delete(1)
        yield "steps", it.all_steps()
        yield "root", listing(root)
        yield "again", outcome(it.delete, 1)
        yield "never there", outcome(it.delete, 9)
        yield "latest", it.delete(2)
        yield "new latest", it.latest_step()


@scenario
def delete_everything(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        it.wait_until_finished()
        it.delete(0)
        yield "root", listing(root)
        yield "latest", it.latest_step()
        yield "save again", it.save(0, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
        it.wait_until_finished()
        yield "restored", it.restore(0)


@scenario
def progress(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "before", it.is_saving_in_progress()
        it.save(0, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "after", it.is_saving_in_progress()
        yield "errors", it.check_for_errors()
        yield "wait again", it.wait_until_finished()
        yield "preempted", it.reached_preemption(1)
        yield "reload", it.reload()
    yield "close again", outcome(it.close)
    yield "steps after close", outcome(it.all_steps)


@scenario
def synchronous(ocp, root):
    with manager(ocp, root, enable_async_checkpointing=False) as it:
        yield "save", it.save(0, args=ocp.args.StandardSave(small()))
        yield "root", listing(root)
        yield "restore", it.restore(0)
        yield "progress", it.is_saving_in_progress()


@scenario
def error_in_the_background(ocp, root):
    """JSON that cannot be written fails in the background; the step is forgotten."""
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        bad = args.Composite(a=args.JsonSave({"a": object()}))
        yield "save", outcome(it.save, 0, args=bad)
        yield "wait", outcome(it.wait_until_finished)
        yield "wait again", outcome(it.wait_until_finished)
        yield "steps", it.all_steps()
        yield "read", it.all_steps(read=True)
        yield "next", outcome(it.save, 1, args=args.Composite(a=args.JsonSave({"a": 1})))
        it.wait_until_finished()
        yield "steps then", it.all_steps()


@scenario
def error_raised_by_next_save(ocp, root):
    args = ocp.args
    it = ocp.CheckpointManager(root)
    it.save(0, args=args.Composite(a=args.JsonSave({"a": object()})))
    yield "next", outcome(it.save, 1, args=args.Composite(a=args.JsonSave({"a": 1})))
    yield "close", outcome(it.close)
    yield "read", ocp.CheckpointManager(root).all_steps()


@scenario
def error_raised_by_close(ocp, root):
    it = ocp.CheckpointManager(root)
    it.save(0, args=ocp.args.Composite(a=ocp.args.JsonSave({"a": object()})))
    yield "close", outcome(it.close)


@scenario
def error_before_the_background(ocp, root):
    with ocp.CheckpointManager(root) as it:
        yield "string", outcome(it.save, 0, args=ocp.args.StandardSave({"a": "text"}))
        yield "steps", it.all_steps()
        yield "read", it.all_steps(read=True)
        yield "then", outcome(it.save, 1, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        yield "wait", outcome(it.wait_until_finished)
        yield "steps then", it.all_steps(read=True)


@scenario
def foreign_names_in_the_root(ocp, root):
    for name in ("notes", "5.orbax-checkpoint-tmp-123", "x7", "12a", "-3"):
        (root / name).mkdir()
    (root / "9").write_text("a file")
    (root / "config.json").write_text("{}")
    with ocp.CheckpointManager(root) as it:
        yield "steps", it.all_steps()
        it.save(1, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "read", it.all_steps(read=True)
        yield "root", listing(root)


@scenario
def empty_directory_with_a_number(ocp, root):
    (root / "5").mkdir()
    with ocp.CheckpointManager(root) as it:
        yield "steps", it.all_steps()
        yield "should save 4", it.should_save(4)
        yield "save 5", outcome(it.save, 5, args=ocp.args.StandardSave(small()), force=True)


@scenario
def leftovers_of_a_killed_save(ocp, root):
    name = f"3{ocp.utils.TMP_DIR_SUFFIX}1700000000"
    (root / name).mkdir()
    (root / name / "default").mkdir()
    with ocp.CheckpointManager(root) as it:
        yield "kept", listing(root)
        yield "steps", it.all_steps()
    with manager(ocp, root, cleanup_tmp_directories=True) as it:
        it.save(1, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        yield "cleaned", listing(root)


@scenario
def files_beside_the_items(ocp, root):
    """Programs put files of their own into a step."""
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        (root / "1" / "config.json").write_text("{}")
        (root / "1" / "default" / "notes.txt").write_text("x")
        yield "restore", it.restore(1)
        it.delete(1)
        yield "root", listing(root)


@scenario
def item_directory_by_path(ocp, root):
    """Programs restore the directory of an item by a checkpointer."""
    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        it.save(2, args=args.Composite(params=args.StandardSave(small()), items=args.PyTreeSave(small())))
        it.save(3, args=args.Composite(params=args.StandardSave(small())))
    with ocp.StandardCheckpointer() as one:
        yield "params", one.restore(root / "2" / "params")
    with ocp.PyTreeCheckpointer() as one:
        yield "items", one.restore(root / "2" / "items")
        yield "items as text", one.restore(str(root / "2" / "items"))
        yield "metadata", one.metadata(root / "2" / "items").item_metadata
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as one:
        yield "step", one.restore(root / "3", args=args.Composite(params=args.StandardRestore()))


@scenario
def default_directory_by_path(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(2, args=ocp.args.StandardSave(small()))
    with ocp.StandardCheckpointer() as one:
        yield "default", one.restore(root / "2" / "default")
        yield "target", one.restore(root / "2" / "default", abstract(small()))
        yield "step", outcome(one.restore, root / "2")


@scenario
def moved_root(ocp, root):
    with ocp.CheckpointManager(root / "old") as it:
        it.save(2, args=ocp.args.StandardSave(small()))
    (root / "old").rename(root / "new")
    with ocp.CheckpointManager(root / "new") as it:
        yield "restored", it.restore(2, args=ocp.args.StandardRestore())


@scenario
def paths_of_all_kinds(ocp, root):
    from etils import epath

    for kind in (str, epath.Path, lambda path: f"{path}/"):
        with ocp.CheckpointManager(kind(root)) as it:
            yield "directory", it.directory
            yield "type", isinstance(it.directory, epath.Path)
            yield (
                "save",
                it.save((it.latest_step() or 0) + 1, args=ocp.args.StandardSave({"a": jnp.zeros(2)})),
            )
    yield "steps", ocp.CheckpointManager(root).all_steps()


@scenario
def relative_path(ocp, root):
    import os

    before = os.getcwd()
    os.chdir(root)
    try:
        with ocp.CheckpointManager("here") as it:
            yield "save", outcome(it.save, 0, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
            yield "wait", outcome(it.wait_until_finished)
            yield "restore", outcome(it.restore, 0)
    finally:
        os.chdir(before)


@scenario
def home_directory_is_not_expanded(ocp, root):
    import os

    before, home = os.getcwd(), os.environ.get("HOME")
    os.chdir(root)
    os.environ["HOME"] = str(root / "home")
    try:
        it = ocp.CheckpointManager("~/runs")
        yield "made", there(root, "~/runs", "home/runs")
        it.close()
    finally:
        os.chdir(before)
        os.environ["HOME"] = home or ""


@scenario
def subclass_is_asked(ocp, root):
    """Subclasses override public methods, and the manager calls them."""
    calls = []

    class Mine(ocp.CheckpointManager):
        def should_save(self, step):
            calls.append("should_save")
            return step != 2 and super().should_save(step)

        def latest_step(self):
            calls.append("latest_step")
            return super().latest_step()

        def all_steps(self, read=False):
            calls.append("all_steps")
            return super().all_steps(read)

        def restore(self, step, *args, **kwargs):
            return {"mine": super().restore(step, *args, **kwargs)}

    with Mine(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as it:
        yield (
            "saved",
            [it.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)})) for step in range(5)],
        )
        it.wait_until_finished()
        yield "should_save asked", "should_save" in calls
        yield "all_steps asked", "all_steps" in calls
        yield "restored", it.restore(4)
        yield "steps", it.all_steps()


@scenario
def subclass_with_positional_constructor(ocp, root):
    class Mine(ocp.CheckpointManager):
        def __init__(self, directory, checkpointers=None, options=None):
            super().__init__(directory, checkpointers, options)

    with Mine(root, None, ocp.CheckpointManagerOptions(max_to_keep=1)) as it:
        for step in range(2):
            it.save(step, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        it.wait_until_finished()
        yield "steps", it.all_steps()


@scenario
def private_names_that_programs_read(ocp, root):
    with manager(
        ocp, root, step_prefix="ckpt", best_fn=lambda metrics: metrics["loss"], best_mode="min"
    ) as it:
        it.save(1, args=ocp.args.StandardSave({"a": jnp.zeros(2)}), metrics={"loss": 0.5})
        it.wait_until_finished()
        yield "directory", it._directory
        yield "prefix", it._options.step_prefix
        yield "checkpoints", [(each.step, each.metrics) for each in it._checkpoints]
        yield "times", all(hasattr(each, "time") for each in it._checkpoints)


@scenario
def invalid_mixtures(ocp, root):
    handler, registry = ocp.StandardCheckpointHandler(), ocp.DefaultCheckpointHandlerRegistry()
    make = ocp.CheckpointManager
    one = ocp.PyTreeCheckpointer()
    yield "names with one handler", outcome(make, root, item_names=("a",), item_handlers=handler)
    yield (
        "registry with handlers",
        outcome(make, root, item_handlers={"a": handler}, handler_registry=registry),
    )
    yield "registry with names", outcome(make, root, item_names=("a",), handler_registry=registry)
    yield "checkpointers with names", outcome(make, root, {"a": one}, item_names=("a",))
    yield "checkpointers with handlers", outcome(make, root, one, item_handlers=handler)
    yield "checkpointers with registry", outcome(make, root, one, handler_registry=registry)
    policy = ocp.checkpoint_managers.LatestN(2)
    options = outcome(ocp.CheckpointManagerOptions, preservation_policy=policy, max_to_keep=3)
    yield "policy with max_to_keep", outcome(make, root, options=options.value)


@scenario
def many_items_wait_for_each_other(ocp, root):
    """Arrays may be changed as soon as a save has returned."""
    tree = {"host": np.zeros(1000, np.float32)}
    with ocp.CheckpointManager(root) as it:
        for step in range(3):
            tree["host"][:] = step
            it.save(step, args=ocp.args.StandardSave(tree))
            tree["host"][:] = -1
        it.wait_until_finished()
        yield "values", [it.restore(step)["host"][0] for step in range(3)]


@scenario
def donated_arrays(ocp, root):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    value = jnp.zeros(1000)
    with ocp.CheckpointManager(root) as it:
        for step in range(3):
            it.save(step, args=ocp.args.StandardSave({"x": value}))
            value = add(value)
        it.wait_until_finished()
        yield "values", [float(it.restore(step)["x"][0]) for step in range(3)]


@scenario
def errors_in_several_threads(ocp, root):
    import threading

    it = ocp.CheckpointManager(root)
    it.save(0, args=ocp.args.Composite(a=ocp.args.JsonSave({"a": object()})))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(outcome(it.wait_until_finished))) for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    yield "each", sorted(type(each.error).__name__ for each in found)
    yield "main", outcome(it.wait_until_finished)
    yield "main again", outcome(it.wait_until_finished)
    yield "close", outcome(it.close)


@scenario
def context_that_fails(ocp, root):
    def body():
        with ocp.CheckpointManager(root) as it:
            it.save(0, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
            raise RuntimeError("mine")

    yield "error", outcome(body)
    yield "saved", ocp.CheckpointManager(root).all_steps()


@scenario
def read_only(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(1, args=ocp.args.StandardSave(small()))
    with manager(ocp, root, read_only=True) as it:
        yield "steps", it.all_steps()
        yield "should save", it.should_save(5)
        yield "save", it.save(5, args=ocp.args.StandardSave(small()))
        yield "forced", outcome(it.save, 6, args=ocp.args.StandardSave(small()), force=True)
        yield "delete", it.delete(1)
        yield "still", it.all_steps(read=True)
        yield "restore", it.restore(1, args=ocp.args.StandardRestore())


@scenario
def abstract_manager_class(ocp, root):
    yield "is one", outcome(isinstance, ocp.CheckpointManager(root), ocp.AbstractCheckpointManager)
    yield "error is a ValueError", issubclass(ocp.checkpoint_manager.StepAlreadyExistsError, ValueError)
    names = [ocp.checkpoint_manager.DEFAULT_ITEM_NAME, ocp.checkpoint_manager.METRIC_ITEM_NAME]
    yield "names", [*names, ocp.checkpoint_manager.METADATA_ITEM_NAME]
