"""Checkpointers: one tree, or several items, at a path of the caller."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import abstract, small, state, zeros
from orbax_door.scenario import json_of, listing, outcome, scenario, there


def _makers(ocp):
    return {
        "Checkpointer standard": lambda: ocp.Checkpointer(ocp.StandardCheckpointHandler()),
        "Checkpointer pytree": lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        "AsyncCheckpointer standard": lambda: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()),
        "AsyncCheckpointer pytree": lambda: ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(), timeout_secs=60
        ),
        "PyTreeCheckpointer": lambda: ocp.PyTreeCheckpointer(),
        "StandardCheckpointer": lambda: ocp.StandardCheckpointer(),
    }


_EVERY = {
    name: {"maker": name}
    for name in (
        "Checkpointer standard", "Checkpointer pytree", "AsyncCheckpointer standard", "AsyncCheckpointer pytree",
        "PyTreeCheckpointer", "StandardCheckpointer",
    )
}  # fmt: skip


def _wait(it):
    if hasattr(it, "wait_until_finished"):
        it.wait_until_finished()


@scenario(tail=_EVERY)
def save_and_restore(ocp, root, maker):
    it = _makers(ocp)[maker]()
    yield "save", it.save(root / "a", state())
    _wait(it)
    yield "restore", it.restore(root / "a")
    yield "text", it.restore(str(root / "a"))["step"]
    yield "files", there(root, "a", "a/_CHECKPOINT_METADATA", "a/default", "a/commit_success.txt")
    yield "root", listing(root)
    yield "close", it.close()


@scenario(tail=_EVERY)
def exists_already(ocp, root, maker):
    with _makers(ocp)[maker]() as it:
        (root / "empty").mkdir()
        yield "empty", outcome(it.save, root / "empty", small(), words="already exists")
        it.save(root / "a", {"a": jnp.zeros(3)})
        _wait(it)
        yield "again", outcome(it.save, root / "a", small(), words="Destination .* already exists")
        (root / "a" / "foreign.txt").write_text("x")
        yield "forced", it.save(root / "a", {"b": jnp.ones(2)}, force=True)
        _wait(it)
        yield "restored", it.restore(root / "a")
        yield "foreign", there(root, "a/foreign.txt")
        it.save(root / "empty", {"b": jnp.ones(2)}, force=True)
        _wait(it)
        yield "root", listing(root)


@scenario(tail=_EVERY)
def not_there(ocp, root, maker):
    with _makers(ocp)[maker]() as it:
        yield "absent", outcome(it.restore, root / "absent")
        (root / "empty").mkdir()
        yield "empty", outcome(it.restore, root / "empty")
        (root / "file").write_text("x")
        yield "file", outcome(it.restore, root / "file")
        yield "metadata of nothing", outcome(it.metadata, root / "absent")
        yield "metadata of empty", outcome(it.metadata, root / "empty")


@scenario(tail=_EVERY)
def parent_is_made(ocp, root, maker):
    with _makers(ocp)[maker]() as it:
        yield "save", outcome(it.save, root / "x" / "y" / "z", small())
        _wait(it)
        yield "made", there(root, "x/y/z")


@scenario(tail=_EVERY)
def relative_path(ocp, root, maker):
    import os

    before = os.getcwd()
    os.chdir(root)
    try:
        with _makers(ocp)[maker]() as it:
            yield "save", outcome(it.save, "here", small())
            yield "wait", outcome(_wait, it)
            yield "restore", outcome(it.restore, "here")
    finally:
        os.chdir(before)


@scenario(tail=_EVERY)
def custom_metadata(ocp, root, maker):
    with _makers(ocp)[maker]() as it:
        yield "save", outcome(it.save, root / "a", small(), custom_metadata={"version": 3, "names": ["x"]})
        _wait(it)
        found = outcome(it.metadata, root / "a")
        yield "custom", outcome(lambda: found.value.custom_metadata)
        yield "tree", outcome(lambda: found.value.item_metadata.tree)


@scenario(tail={**_EVERY})
def args_by_position_and_name(ocp, root, maker):
    args = ocp.args
    kind = "PyTree" if "ytree" in maker.lower() else "Standard"
    save, restore = getattr(args, f"{kind}Save"), getattr(args, f"{kind}Restore")
    with _makers(ocp)[maker]() as it:
        for name, call in {
            "args=": lambda path: it.save(path, args=save(small())),
            "first": lambda path: it.save(path, save(small())),
            "tree and args": lambda path: it.save(path, small(), save(small())),
            "tree and args=": lambda path: it.save(path, small(), args=save(small())),
        }.items():
            path = root / name.replace(" ", "-")
            yield f"save {name}", outcome(call, path)
            yield f"wait {name}", outcome(_wait, it)
        path = root / "plain"
        it.save(path, small())
        _wait(it)
        yield "restore args=", outcome(it.restore, path, args=restore(zeros(small())))
        yield "restore first", outcome(it.restore, path, restore(zeros(small())))
        yield "restore item=None", outcome(it.restore, path, restore(zeros(small())), item=None)
        yield "restore item=", outcome(it.restore, path, item=zeros(small()))
        yield "restore tree", outcome(it.restore, path, zeros(small()))


@scenario
def wrong_args(ocp, root):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as it:
        yield "json for standard", outcome(it.save, root / "a", args=ocp.args.JsonSave({"a": 1}))
        yield "restore for save", outcome(it.save, root / "b", args=ocp.args.StandardRestore())
        it.save(root / "c", small())
        yield "pytree for standard", outcome(it.restore, root / "c", args=ocp.args.PyTreeRestore())
        yield "unknown keyword", outcome(it.restore, root / "c", other=1)
        yield "root", listing(root)


@scenario
def standard_positional_forms(ocp, root):
    with ocp.StandardCheckpointer() as it:
        it.save(root / "a", state())
        it.wait_until_finished()
        yield "abstract", it.restore(root / "a", abstract(state()))
        yield "target=", it.restore(root / "a", target=zeros(state()))
        yield "abstract bare", it.restore(root / "a", abstract(state(), sharding=False))
        yield "strict", it.restore(root / "a", target=zeros(state()), strict=True)
        yield (
            "save_args",
            outcome(it.save, root / "b", small(), save_args=jax.tree.map(lambda _: ocp.SaveArgs(), small())),
        )
        yield "names", sorted(it.restore(root / "a"))


@scenario
def read_before_the_end(ocp, root):
    with ocp.StandardCheckpointer() as it:
        it.save(root / "a", small())
        yield "restore", outcome(it.restore, root / "a")
        it.save(root / "b", small())
        it.save(root / "c", small())
        it.wait_until_finished()
        yield "root", listing(root)


@scenario
def saved_below_a_directory_that_is_renamed(ocp, root):
    (root / "tmp").mkdir()
    with ocp.StandardCheckpointer() as it:
        it.save(root / "tmp" / "params", small())
        it.save(root / "tmp" / "opt", small())
    (root / "tmp").rename(root / "final")
    with ocp.StandardCheckpointer() as it:
        yield "params", it.restore(root / "final" / "params")
    yield "root", listing(root / "final")


@scenario
def subclass_relations(ocp, root):
    classes = {
        name: getattr(ocp, name)
        for name in ("AsyncCheckpointer", "StandardCheckpointer", "PyTreeCheckpointer")
    }
    yield "of Checkpointer", {name: issubclass(each, ocp.Checkpointer) for name, each in classes.items()}
    yield (
        "of AsyncCheckpointer",
        {name: issubclass(each, ocp.AsyncCheckpointer) for name, each in classes.items()},
    )
    with ocp.PyTreeCheckpointer() as it:
        yield "handler", isinstance(it.handler, ocp.CheckpointHandler)
        yield "is pytree", isinstance(it.handler, ocp.PyTreeCheckpointHandler)
        yield "private", isinstance(it._handler, ocp.PyTreeCheckpointHandler)
    with ocp.StandardCheckpointer() as it:
        yield "standard", isinstance(it.handler, ocp.StandardCheckpointHandler)
    yield "composite is a handler", issubclass(ocp.CompositeCheckpointHandler, ocp.AsyncCheckpointHandler)


@scenario(
    tail={
        str(given): {"given": given}
        for given in (
            {"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True}, {"use_zarr3": True}, {"use_compression": False},
            {"save_concurrent_gb": 1, "restore_concurrent_gb": 1}, {"primary_host": 0},
        )
    }
)  # fmt: skip
def storage_options(ocp, root, given):
    make = ocp.PyTreeCheckpointHandler
    handler = outcome(make, **given)
    yield "handler", handler.error is None or handler
    with ocp.Checkpointer(handler.value or make()) as it:
        it.save(root / "a", state())
        yield "restored", it.restore(root / "a")
    one = outcome(ocp.PyTreeCheckpointer, **given)
    yield "checkpointer", one.error is None or one
    standard = outcome(ocp.StandardCheckpointer, **given)
    yield "standard", standard.error is None or standard
    with ocp.StandardCheckpointer() as it:
        yield "read by the default", it.restore(root / "a")


@scenario
def several_items_at_a_path(ocp, root):
    args = ocp.args
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "config")) as it:
        yield (
            "save",
            it.save(
                root / "a",
                args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({"x": 1})),
            ),
        )
        yield "files", there(root, "a/state", "a/config/metadata", "a/_CHECKPOINT_METADATA")
        asked = args.Composite(state=args.StandardRestore(), config=args.JsonRestore())
        yield "restore", it.restore(root / "a", args=asked)
        yield "restore all", outcome(it.restore, root / "a")
        yield "metadata", it.metadata(root / "a")


@scenario
def several_items_by_handlers(ocp, root):
    args = ocp.args
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers)) as it:
        it.save(
            root / "a", args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({"x": 1}))
        )
        it.wait_until_finished()
        yield "restore all", it.restore(root / "a")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as it:
        yield "restore", it.restore(root / "a", args=args.Composite(config=args.JsonRestore()))
        yield "restore none", outcome(it.restore, root / "a", args=args.Composite())


@scenario
def error_in_the_background(ocp, root):
    with ocp.AsyncCheckpointer(ocp.JsonCheckpointHandler()) as it:
        yield "save", outcome(it.save, root / "a", {"a": object()})
        yield "check", outcome(it.wait_until_finished)
        yield "again", outcome(it.wait_until_finished)
        yield "check_for_errors", outcome(it.check_for_errors)
        yield "made", there(root, "a")
        yield "next", outcome(it.save, root / "b", {"a": 1})
        it.wait_until_finished()
        yield "restored", it.restore(root / "b")


@scenario
def error_of_a_synchronous_save(ocp, root):
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as it:
        yield "save", outcome(it.save, root / "a", {"a": object()})
        yield "made", there(root, "a")
        yield "next", outcome(it.save, root / "a", {"a": 1})


@scenario
def temporary_directory(ocp, root):
    (root / f"a{ocp.utils.TMP_DIR_SUFFIX}1700000000").mkdir()
    with ocp.StandardCheckpointer() as it:
        yield "restore", outcome(it.restore, root / f"a{ocp.utils.TMP_DIR_SUFFIX}1700000000")


@scenario
def foreign_file_in_the_directory(ocp, root):
    """brax makes the directory, saves with `force`, and writes a file of its own beside the leaves."""
    from etils import epath

    path = epath.Path(root) / "000000001234"
    path.mkdir(parents=True)
    with ocp.PyTreeCheckpointer() as it:
        it.save(path, (small(), {"normalizer": np.ones(3)}), force=True)
        (path / "config.json").write_text("{}")
        found = it.restore(path, ocp.args.PyTreeRestore(), item=None)
        yield "a list", found
        found[0] = "assigned"
        yield "assigned", found[0]
        yield "metadata", it.metadata(path).item_metadata


@scenario
def mixed_form_of_a_save(ocp, root):
    with ocp.PyTreeCheckpointer() as it:
        yield (
            "save",
            it.save(root / "a", small(), ocp.args.PyTreeSave(small(), ocdbt_target_data_file_size=1024)),
        )
        yield "restore", it.restore(root / "a")


@scenario
def closed(ocp, root):
    it = ocp.StandardCheckpointer()
    it.save(root / "a", small())
    yield "close", it.close()
    yield "saved", there(root, "a")
    yield "again", outcome(it.close)


@scenario
def trees_that_are_leaves(ocp, root):
    for kind in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
        with kind() as it:
            for name, tree in {
                "array": jnp.arange(3),
                "number": 3,
                "none": None,
                "dict": {},
                "list": [],
                "text": "x",
            }.items():
                path = root / kind.__name__ / name
                yield f"{kind.__name__} {name}", outcome(it.save, path, tree)
                yield f"{kind.__name__} {name} wait", outcome(_wait, it)
                yield f"{kind.__name__} {name} restored", outcome(it.restore, path)


@scenario
def frame_of_a_path(ocp, root):
    with ocp.StandardCheckpointer() as it:
        it.save(root / "a", small(), custom_metadata={"x": 1})
    found = json_of(root, "a", "_CHECKPOINT_METADATA")
    yield "keys", sorted(found)
    yield "custom", found["custom_metadata"]
    yield "times", [type(found[key]).__name__ for key in ("init_timestamp_nsecs", "commit_timestamp_nsecs")]
    yield "handler is a text", type(found["item_handlers"]).__name__


@scenario
def frame_of_a_step(ocp, root):
    import pydoc

    args = ocp.args
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, options=options) as it:
        given = args.Composite(state=args.StandardSave(small()), config=args.JsonSave({}))
        it.save(0, args=given, metrics={"loss": 1.0}, custom_metadata={"x": 1})
    found = json_of(root, "0", "_CHECKPOINT_METADATA")
    yield "keys", sorted(found)
    yield "custom", found["custom_metadata"]
    yield "metrics", found["metrics"]
    yield "handlers", sorted(found["item_handlers"])
    located = pydoc.locate(found["item_handlers"]["state"])
    yield "handler is found by its name", located is not None
    yield "and is the class", located is ocp.StandardCheckpointHandler
    yield "step", listing(root / "0")
