"""Handlers: as values, of callers, with futures, in registries, with and without a base class."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import small, state, zeros
from orbax_door.scenario import listing, outcome, scenario, there


def _path(root, name="it"):
    from etils import epath

    path = epath.Path(root) / name
    path.mkdir()
    return path


@scenario
def without_a_checkpointer(ocp, root):
    args = ocp.args
    for name, (handler, save, restore) in {
        "standard": (
            ocp.StandardCheckpointHandler(),
            args.StandardSave(state()),
            args.StandardRestore(zeros(state())),
        ),
        "pytree": (ocp.PyTreeCheckpointHandler(), args.PyTreeSave(state()), args.PyTreeRestore()),
        "json": (ocp.JsonCheckpointHandler(), args.JsonSave({"a": 1}), args.JsonRestore()),
        "array": (ocp.ArrayCheckpointHandler(), args.ArraySave(jnp.arange(3)), args.ArrayRestore()),
    }.items():
        path = _path(root, name)
        yield f"{name} save", outcome(handler.save, path, args=save)
        if hasattr(handler, "finalize"):
            yield f"{name} finalize", outcome(handler.finalize, path)
        yield f"{name} restore", outcome(handler.restore, path, args=restore)
        yield f"{name} restore bare", outcome(handler.restore, path)
        yield f"{name} metadata", outcome(lambda it=handler, at=path: it.metadata(at))
        yield f"{name} close", outcome(handler.close)


@scenario
def names_of_classes(ocp, root):
    import pydoc

    names = "Standard PyTree Json Array Composite JaxRandomKey NumpyRandomKey Proto".split()
    yield "there", {name: hasattr(ocp, f"{name}CheckpointHandler") for name in names}
    yield "in handlers", {name: hasattr(ocp.handlers, f"{name}CheckpointHandler") for name in names}
    for name in names[:5]:
        kind = getattr(ocp, f"{name}CheckpointHandler")
        located = pydoc.locate(f"{kind.__module__}.{kind.__qualname__}")
        yield f"{name} is found by its name", located is kind
        yield f"{name} has a typestr", outcome(lambda kind=kind: pydoc.locate(kind.typestr()) is not None)
    yield (
        "bases",
        {name: issubclass(getattr(ocp, f"{name}CheckpointHandler"), ocp.CheckpointHandler) for name in names},
    )
    yield (
        "async",
        {
            name: issubclass(getattr(ocp, f"{name}CheckpointHandler"), ocp.AsyncCheckpointHandler)
            for name in names
        },
    )


@scenario
def old_style(ocp, root):
    """A handler without args: `save(directory, item)`."""

    class Old(ocp.CheckpointHandler):
        def save(self, directory, item, more=""):
            (directory / "x.txt").write_text(item + more)

        def restore(self, directory, item=None):
            return (directory / "x.txt").read_text() + (item or "")

        def metadata(self, directory):
            return {"text": (directory / "x.txt").read_text()}

    with ocp.Checkpointer(Old()) as it:
        yield "save", it.save(root / "a", "hello", more="!")
        yield "restore", it.restore(root / "a")
        yield "restore item", it.restore(root / "a", item="?")
        yield "metadata", outcome(it.metadata, root / "a")
    with ocp.CheckpointManager(root / "m", {"x": ocp.Checkpointer(Old())}) as it:
        yield "by a manager", outcome(it.save, 0, {"x": "hello"})
        yield "restored", outcome(it.restore, 0)
        yield "item metadata", outcome(it.item_metadata, 0)


@scenario
def without_a_base_class(ocp, root):
    """grain's handlers have no base class."""
    seen = []

    class Bare:
        def save(self, directory, item=None, args=None):
            seen.append(type(directory).__name__ != "str")
            (directory / "x.txt").write_text((args or item).text)

        def restore(self, directory, item=None, args=None):
            return (directory / "x.txt").read_text()

        def close(self):
            pass

        def finalize(self, directory):
            pass

        @classmethod
        def typestr(cls):
            return "mine.Bare"

    @ocp.args.register_with_handler(Bare, for_save=True)
    @dataclasses.dataclass
    class Save(ocp.args.CheckpointArgs):
        text: str

    @ocp.args.register_with_handler(Bare, for_restore=True)
    @dataclasses.dataclass
    class Restore(ocp.args.CheckpointArgs):
        pass

    args = ocp.args
    with ocp.CheckpointManager(root) as it:
        yield "save", it.save(0, args=args.Composite(own=Save("hi"), state=args.StandardSave(small())))
        it.wait_until_finished()
        yield "restore", it.restore(0, args=args.Composite(own=Restore())).own
        yield "file", there(root, "0/own/x.txt")
        yield "directory is a path", seen


@scenario
def asynchronous(ocp, root):
    """A handler whose futures are awaited before the step is there."""
    import asyncio

    class Slow(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory, args):
            async def write():
                await asyncio.sleep(0.05)
                (directory / "x.txt").write_text(args.text)

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="x")]

        def save(self, directory, args):
            (directory / "x.txt").write_text(args.text)

        def restore(self, directory, args=None):
            return (directory / "x.txt").read_text()

    @ocp.args.register_with_handler(Slow, for_save=True)
    @dataclasses.dataclass
    class Save(ocp.args.CheckpointArgs):
        text: str

    @ocp.args.register_with_handler(Slow, for_restore=True)
    @dataclasses.dataclass
    class Restore(ocp.args.CheckpointArgs):
        pass

    with ocp.CheckpointManager(root / "m") as it:
        it.save(0, args=ocp.args.Composite(own=Save("hi")))
        it.wait_until_finished()
        yield "by a manager", it.restore(0, args=ocp.args.Composite(own=Restore()))
    with ocp.AsyncCheckpointer(Slow()) as it:
        it.save(root / "a", args=Save("there"))
        it.wait_until_finished()
        yield "by a checkpointer", it.restore(root / "a", args=Restore())
    with ocp.Checkpointer(Slow()) as it:
        yield "not asynchronous", outcome(it.save, root / "b", args=Save("sync"))
        yield "restored", outcome(it.restore, root / "b", args=Restore())


@scenario
def futures_without_a_class(ocp, root):
    class Done:
        def __init__(self, call):
            self.call = call

        def result(self, timeout=None):
            self.call()

    class Own(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory, item):
            return [Done(lambda: (directory / "x.txt").write_text(item))]

        def save(self, directory, item):
            (directory / "x.txt").write_text(item)

        def restore(self, directory, item=None):
            return (directory / "x.txt").read_text()

    with ocp.AsyncCheckpointer(Own()) as it:
        yield "save", outcome(it.save, root / "a", "hi")
        it.wait_until_finished()
        yield "restore", it.restore(root / "a")


@scenario
def that_fail(ocp, root):
    class Fails(ocp.CheckpointHandler):
        def save(self, directory, item):
            (directory / "half.txt").write_text("x")
            raise OSError("mine")

        def restore(self, directory, item=None):
            raise LookupError("mine too")

    with ocp.Checkpointer(Fails()) as it:
        yield "save", outcome(it.save, root / "a", "x", words="mine")
        yield "there", there(root, "a")
        (root / "b").mkdir()
        yield "restore", outcome(it.restore, root / "b")


@scenario
def that_fail_in_the_background(ocp, root):
    class Fails(ocp.AsyncCheckpointHandler):
        async def async_save(self, directory, item):
            async def fail():
                raise OSError("mine")

            return [ocp.future.CommitFutureAwaitingContractedSignals(fail(), name="x")]

        def save(self, directory, item):
            raise OSError("mine")

        def restore(self, directory, item=None):
            return None

    it = ocp.AsyncCheckpointer(Fails())
    yield "save", outcome(it.save, root / "a", "x")
    yield "wait", outcome(it.wait_until_finished, words="mine")
    yield "wait again", outcome(it.wait_until_finished)
    yield "there", there(root, "a")
    yield "close", outcome(it.close)


@scenario
def that_finalize(ocp, root):
    calls = []

    class Own(ocp.CheckpointHandler):
        def save(self, directory, item):
            calls.append("save")
            (directory / "x.txt").write_text(item)

        def restore(self, directory, item=None):
            calls.append("restore")

        def finalize(self, directory):
            calls.append(("finalize", (directory / "x.txt").exists()))

        def close(self):
            calls.append("close")

    with ocp.Checkpointer(Own()) as it:
        it.save(root / "a", "x")
        it.restore(root / "a")
    yield "calls", calls


@scenario
def that_do_nothing(ocp, root):
    """kauldron's handlers for items that are not saved."""

    class Noop(ocp.CheckpointHandler):
        def save(self, directory, args=None):
            pass

        def restore(self, directory, args=None):
            return "nothing"

    @ocp.args.register_with_handler(Noop, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):
        pass

    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.Composite(a=Args(), b=ocp.args.StandardSave(small())))
        it.wait_until_finished()
        yield "restore", it.restore(0, args=ocp.args.Composite(a=Args()))
        yield "files", there(root, "0/a")


@scenario
def registry(ocp, root):
    known = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = ocp.StandardCheckpointHandler()
    known.add("state", ocp.args.StandardSave, handler)
    known.add("state", ocp.args.StandardRestore, handler)
    yield "get", known.get("state", ocp.args.StandardSave) is handler
    yield "has", [known.has("state", ocp.args.StandardSave), known.has("other", ocp.args.StandardSave)]
    yield "again", outcome(known.add, "state", ocp.args.StandardSave, handler)
    yield "absent", outcome(known.get, "other", ocp.args.CheckpointArgs)
    yield "entries", len(known.get_all_entries()) >= 2
    with ocp.CheckpointManager(root, handler_registry=known) as it:
        it.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(small())))
        it.wait_until_finished()
        yield "restore", it.restore(0)
        yield "other item", outcome(it.save, 1, args=ocp.args.Composite(other=ocp.args.JsonSave({})))
    with ocp.CheckpointManager(root, handler_registry=known) as it:
        yield "metadata", it.item_metadata(0)


@scenario
def composite_of_handlers(ocp, root):
    args = ocp.args
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(), config=ocp.JsonCheckpointHandler()
    )
    path = root / "it"
    with ocp.Checkpointer(handler) as it:
        it.save(path, args=args.Composite(state=args.PyTreeSave(small()), config=args.JsonSave({"a": 1})))
    yield "all", outcome(handler.restore, path)
    yield "none asked", outcome(handler.restore, path, args=args.Composite())
    yield "some", outcome(handler.restore, path, args=args.Composite(config=args.JsonRestore()))
    yield "absent", outcome(handler.restore, path, args=args.Composite(other=args.JsonRestore()))
    yield "metadata", outcome(lambda: handler.metadata(path))
    yield "listing", listing(path)


@scenario
def composite_by_names(ocp, root):
    args = ocp.args
    handler = ocp.CompositeCheckpointHandler("state", "config")
    path = root / "it"
    with ocp.Checkpointer(handler) as it:
        it.save(path, args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({})))
    yield "all", outcome(handler.restore, path)
    again = ocp.CompositeCheckpointHandler()
    yield "by another", outcome(again.restore, path)
    yield (
        "by another with args",
        outcome(again.restore, path, args=args.Composite(state=args.StandardRestore())),
    )
    yield "unknown item", outcome(handler.save, _path(root, "b"), args=args.Composite(z=args.JsonSave({})))


@scenario
def item_handlers_of_a_manager(ocp, root):
    args = ocp.args
    handlers = {"state": ocp.PyTreeCheckpointHandler(use_ocdbt=False), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as it:
        it.save(0, args=args.Composite(state=args.PyTreeSave(small()), config=args.JsonSave({"a": 1})))
        it.wait_until_finished()
        yield "all", it.restore(0)
        yield "other kind", outcome(it.save, 1, args=args.Composite(state=args.StandardSave(small())))
        yield (
            "further item",
            outcome(it.save, 2, args=args.Composite(state=args.PyTreeSave(small()), more=args.JsonSave({}))),
        )
        it.wait_until_finished()
        yield "steps", it.all_steps()


@scenario
def one_handler_of_a_manager(ocp, root):
    with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as it:
        it.save(0, args=ocp.args.PyTreeSave(small()))
        it.wait_until_finished()
        yield "restore", it.restore(0)
        yield "other kind", outcome(it.save, 1, args=ocp.args.StandardSave(small()))
        yield "composite", outcome(it.save, 2, args=ocp.args.Composite(a=ocp.args.PyTreeSave(small())))


@scenario
def item_names(ocp, root):
    args = ocp.args
    with ocp.CheckpointManager(root, item_names=("state", "config")) as it:
        it.save(0, args=args.Composite(state=args.StandardSave(small()), config=args.JsonSave({})))
        it.wait_until_finished()
        yield "all", it.restore(0)
        yield "further", outcome(it.save, 1, args=args.Composite(more=args.JsonSave({})))
        yield "steps", it.all_steps()
    with ocp.CheckpointManager(root / "one", item_names=("state",)) as it:
        yield "one item", outcome(it.save, 0, args=args.StandardSave(small()))


@scenario
def item_names_that_are_odd(ocp, root):
    args = ocp.args
    names = ("with space", "a.b", "a-b", "ä", "0", "default", "metrics", "metadata", "a/b", "..")
    for number, name in enumerate(names):
        with ocp.CheckpointManager(root / str(number)) as it:
            yield f"save {name}", outcome(it.save, 0, args=args.Composite(**{name: args.JsonSave({"a": 1})}))
            yield f"wait {name}", outcome(it.wait_until_finished)
            yield f"restore {name}", outcome(it.restore, 0)
            yield f"there {name}", there(root, f"{number}/0/{name}")


@scenario
def subclass_of_a_handler(ocp, root):
    """Programs subclass the handler of trees, and change what is saved."""

    class Mine(ocp.PyTreeCheckpointHandler):
        async def async_save(self, directory, *args, **kwargs):
            return await super().async_save(directory, *args, **kwargs)

        def restore(self, directory, *args, **kwargs):
            return {"mine": super().restore(directory, *args, **kwargs)}

    with ocp.Checkpointer(Mine()) as it:
        yield "save", outcome(it.save, root / "a", {"x": np.arange(3)})
        yield "restore", outcome(it.restore, root / "a")
