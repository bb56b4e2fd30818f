"""The newer generation, `ocp.v1`: functions, the training checkpointer, contexts, checkpointables."""

import jax
import jax.numpy as jnp
import numpy as np

from orbax_door.inputs import Params, Train, abstract, numbers, sharded, small, spread, state, zeros
from orbax_door.scenario import fields, json_of, listing, outcome, scenario, there


@scenario
def save_and_load(ocp, root):
    yield "save", outcome(ocp.v1.save, root / "a", state())
    yield "load", outcome(ocp.v1.load, root / "a")
    yield "abstract", outcome(ocp.v1.load, root / "a", abstract(state()))
    yield "bare", outcome(ocp.v1.load, root / "a", abstract(state(), sharding=False))
    yield "zeros", outcome(ocp.v1.load, root / "a", zeros(state()))
    yield (
        "files",
        there(
            root,
            "a/state",
            "a/pytree",
            "a/_CHECKPOINT_METADATA",
            "a/orbax.checkpoint",
            "a/commit_success.txt",
        ),
    )
    yield "text", outcome(lambda: ocp.v1.load(str(root / "a"))["step"])


@scenario
def path_exists(ocp, root):
    ocp.v1.save(root / "a", {"x": jnp.zeros(2)})
    yield "again", outcome(ocp.v1.save, root / "a", {"x": jnp.ones(2)})
    yield "overwrite", outcome(ocp.v1.save, root / "a", {"y": jnp.ones(2)}, overwrite=True)
    yield "then", outcome(ocp.v1.load, root / "a")
    (root / "empty").mkdir()
    yield "empty", outcome(ocp.v1.save, root / "empty", {"x": jnp.ones(2)})
    yield "parent", outcome(ocp.v1.save, root / "p" / "q", {"x": jnp.ones(2)})


@scenario
def nothing_to_load(ocp, root):
    yield "absent", outcome(ocp.v1.load, root / "absent")
    (root / "empty").mkdir()
    yield "empty", outcome(ocp.v1.load, root / "empty")
    ocp.v1.save(root / "a", small())
    yield "absent name", outcome(ocp.v1.load, root / "a", checkpointable_name="other")
    yield "by name", outcome(ocp.v1.load, root / "a", checkpointable_name="state")
    yield "absent checkpointable", outcome(ocp.v1.load_checkpointables, root / "a", {"other": None})
    yield "metadata of nothing", outcome(ocp.v1.metadata, root / "absent")


@scenario
def asynchronous(ocp, root):
    done = []
    response = ocp.v1.save_async(root / "a", state())
    yield "result", response.result()
    yield "result again", response.result(timeout=10)
    yield "loaded", outcome(lambda: ocp.v1.load_async(root / "a", abstract(state())).result())
    other = ocp.v1.save_async(root / "b", small())
    yield "on_complete", outcome(other.on_complete, done.append)
    yield "waited", other.result()
    yield "again", outcome(lambda: ocp.v1.save_async(root / "a", small()).result())


@scenario
def names(ocp, root):
    ocp.v1.save(root / "a", small(), checkpointable_name="params")
    yield "files", there(root, "a/params", "a/state")
    yield "auto", outcome(ocp.v1.load, root / "a")
    yield "by name", outcome(ocp.v1.load, root / "a", checkpointable_name="params")
    yield "itself", outcome(ocp.v1.load, root / "a" / "params", checkpointable_name=None)
    yield "itself, auto", outcome(ocp.v1.load, root / "a" / "params")


@scenario
def checkpointables(ocp, root):
    given = {"state": state(), "config": {"a": [1, 2], "text": "x"}, "params": [jnp.zeros(2), jnp.ones(3)]}
    yield "save", outcome(ocp.v1.save_checkpointables, root / "a", given)
    yield "all", outcome(ocp.v1.load_checkpointables, root / "a")
    yield "none", outcome(ocp.v1.load_checkpointables, root / "a", {"config": None})
    asked = {"state": abstract(state()), "params": None}
    yield "some", outcome(ocp.v1.load_checkpointables, root / "a", asked)
    yield "one tree", outcome(ocp.v1.load, root / "a", checkpointable_name="params")
    yield "files", there(root, "a/state", "a/config", "a/params")
    found = ocp.v1.checkpointables_metadata(root / "a")
    yield "metadata", found
    yield "names", sorted(found.metadata)


_ONE = {
    "text": lambda: {"config": "text"},
    "texts": lambda: {"config": {"a": "text"}},
    "json": lambda: {"a": {"b": [1, None, True]}},
    "numbers": lambda: {"a": 1, "b": 2.5},
    "array": lambda: jnp.arange(3),
    "numpy": lambda: np.arange(3),
    "number": lambda: 3,
    "bare text": lambda: "x",
    "list of texts": lambda: ["a", "b"],
    "empty dict": dict,
    "None": lambda: None,
    "tree with text": lambda: {"a": jnp.zeros(2), "b": "x"},
    "namedtuple": lambda: Params(jnp.zeros(2), 3),
    "dataclass": lambda: Train(3, jnp.zeros(2)),
    "key": lambda: {"k": jax.random.key(0)},
    "object": object,
    "bytes": lambda: {"a": b"x"},
}


@scenario(tail={name: {"name": name} for name in _ONE})
def kinds_of_checkpointables(ocp, root, name):
    value = _ONE[name]()
    yield (
        "save",
        outcome(ocp.v1.save_checkpointables, root / "a", {"it": value, "other": {"x": jnp.zeros(1)}}),
    )
    yield "load", outcome(lambda: ocp.v1.load_checkpointables(root / "a")["it"])
    yield "load like", outcome(lambda: ocp.v1.load_checkpointables(root / "a", {"it": value})["it"])
    yield "is JSON", there(root, "a/it/data.json")
    yield "as a tree", outcome(ocp.v1.save, root / "b", value)
    yield "loaded", outcome(ocp.v1.load, root / "b")


@scenario
def keras_state(ocp, root):
    """Keras saves arrays, texts and the names of files."""
    given = {
        "pytree": {"trainable_variables": {"dense": {"kernel": np.ones((2, 2), np.float32)}}, "metrics": {}},
        "model_config": {"config": '{"module": "keras"}'},
        "assets": {"vocabulary": {"text": "a b"}},
    }
    yield "save", outcome(ocp.v1.save_checkpointables, root / "a", given)
    yield "load", outcome(ocp.v1.load_checkpointables, root / "a")
    yield "config", outcome(ocp.v1.load_checkpointables, root / "a", {"model_config": None})
    yield "tree", outcome(ocp.v1.load, root / "a", checkpointable_name="pytree")
    yield "auto", outcome(ocp.v1.load, root / "a")
    yield "sniffed", there(root, "a/orbax.checkpoint", "a/pytree", "a/model_config")


@scenario
def deprecated_names(ocp, root):
    yield "save_pytree", outcome(ocp.v1.save_pytree, root / "a", small())
    yield "load_pytree", outcome(ocp.v1.load_pytree, root / "a")
    yield "load_pytree like", outcome(ocp.v1.load_pytree, root / "a", zeros(small()))
    yield "metadata", outcome(ocp.v1.pytree_metadata, root / "a")
    yield "metadata by name", outcome(ocp.v1.pytree_metadata, root / "a", checkpointable_name="state")
    yield "async", outcome(lambda: ocp.v1.save_pytree_async(root / "b", small()).result())
    yield "load async", outcome(lambda: ocp.v1.load_pytree_async(root / "b").result())


@scenario
def metadata(ocp, root):
    ocp.v1.save(root / "a", state(), custom_metadata={"a": 1})
    found = ocp.v1.metadata(root / "a")
    yield "all", found
    yield "leaf", found.metadata["params"]["w"]
    yield "custom", found.custom_metadata
    yield "path", found.path
    yield "times", [type(getattr(found, f"{name}_timestamp_nsecs")).__name__ for name in ("init", "commit")]
    yield "load by metadata", outcome(ocp.v1.load, root / "a", found)
    yield "load by its tree", outcome(ocp.v1.load, root / "a", found.metadata)
    bare = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) if hasattr(leaf, "shape") else leaf,
        found.metadata,
    )
    yield "load cast", outcome(ocp.v1.load, root / "a", bare)


@scenario
def partial_loads(ocp, root):
    v1 = ocp.v1
    v1.save(root / "a", small())
    item = {"a": jax.ShapeDtypeStruct((8,), jnp.float32)}
    yield "strict", outcome(v1.load, root / "a", item)
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        yield "partial", outcome(v1.load, root / "a", item)
        more = {**item, "new": jax.ShapeDtypeStruct((2,), jnp.float32)}
        yield "missing", outcome(v1.load, root / "a", more)
    yield "after", outcome(v1.load, root / "a", item)
    holes = {**abstract(small()), "a": v1.PLACEHOLDER}
    yield "placeholder", outcome(v1.load, root / "a", holes)


@scenario
def other_targets(ocp, root):
    v1 = ocp.v1
    v1.save(root / "a", {"a": spread(8, 4), "b": numbers(3), "n": 3})
    yield "shape", outcome(v1.load, root / "a", {"a": jnp.zeros((9, 4)), "b": np.zeros(3), "n": 0})
    yield (
        "dtype",
        outcome(
            v1.load,
            root / "a",
            {"a": jnp.zeros((8, 4), jnp.bfloat16), "b": np.zeros(3, np.float16), "n": 0.0},
        ),
    )
    yield (
        "sharding",
        outcome(
            v1.load,
            root / "a",
            {"a": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharded("y")), "b": int, "n": int},
        ),
    )
    yield "types", outcome(v1.load, root / "a", {"a": np.ndarray, "b": np.ndarray, "n": float})
    yield "structure", outcome(v1.load, root / "a", {"a": jnp.zeros((8, 4))})
    yield "list", outcome(v1.load, root / "a", [jnp.zeros((8, 4))])


@scenario
def contexts(ocp, root):
    v1 = ocp.v1
    yield "defaults", fields(v1.Context().asynchronous, "timeout_secs", "post_finalization_callback")
    one = v1.Context()
    one.asynchronous.timeout_secs = 77
    one.array.saving.use_ocdbt = False
    one.file.path_permission_mode = 0o750
    yield "kept", one.asynchronous.timeout_secs
    two = v1.Context(one)
    yield "of a parent", [two.asynchronous.timeout_secs, two.array.saving.use_ocdbt]
    two.asynchronous.timeout_secs = 5
    yield "a copy", one.asynchronous.timeout_secs
    with one:
        v1.save(root / "a", small())
        yield "inside", v1.Context().asynchronous.timeout_secs
        yield "frozen", outcome(setattr, one.asynchronous, "timeout_secs", 3)
    yield "mode", oct((root / "a").stat().st_mode & 0o777)
    yield (
        "layout",
        v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS).checkpoint_layout.name,
    )
    yield (
        "layout as text",
        outcome(lambda: v1.Context(checkpoint_layout="SAFETENSORS").checkpoint_layout.name),
    )
    yield (
        "options",
        outcome(
            lambda: (
                v1.Context(async_options=v1.options.AsyncOptions(timeout_secs=9)).asynchronous.timeout_secs
            )
        ),
    )
    yield "names", [each.name for each in v1.options.CheckpointLayout]
    yield "pathways", outcome(lambda: one.pathways_options.checkpointing_impl)
    yield "read of options", [two.async_options.timeout_secs, two.pytree_options.loading.partial_load]


@scenario
def handlers_by_name(ocp, root):
    handlers = ocp.v1.handlers
    registry = handlers.local_registry(include_global_registry=False)
    registry.add(handlers.PyTreeHandler, checkpointable_name="state")
    registry.add(handlers.JsonHandler, checkpointable_name="config")
    yield "has", [registry.has("state"), registry.has("other")]
    yield "again", outcome(registry.add, handlers.JsonHandler, checkpointable_name="config")
    with ocp.v1.Context(checkpointables_options=ocp.v1.options.CheckpointablesOptions(registry=registry)):
        given = {"state": small(), "config": {"a": 1}}
        yield "save", outcome(ocp.v1.save_checkpointables, root / "a", given)
        yield "load", outcome(ocp.v1.load_checkpointables, root / "a")
        yield "other", outcome(ocp.v1.save_checkpointables, root / "b", {"other": small()})
    yield "is JSON", there(root, "a/config/metadata", "a/config/data.json")
    yield "load without", outcome(ocp.v1.load_checkpointables, root / "a")
    yield "decorator", callable(handlers.register_handler)


@scenario
def safetensors(ocp, root):
    from safetensors.numpy import save_file

    v1 = ocp.v1
    save_file({"a.w": numbers(4, 2), "b": numbers(3)}, str(root / "model.safetensors"))
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        yield "load", outcome(v1.load, root / "model.safetensors")
        item = {
            "a.w": jax.ShapeDtypeStruct((4, 2), jnp.float32),
            "b": jax.ShapeDtypeStruct((3,), jnp.float32),
        }
        yield "load like", outcome(v1.load, root / "model.safetensors", item)
        yield "metadata", outcome(v1.metadata, root / "model.safetensors")
    yield "without a context", outcome(v1.load, root / "model.safetensors")


@scenario
def is_checkpoint(ocp, root):
    v1 = ocp.v1
    v1.save(root / "a", small())
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    names = ("a", "a/state", "empty", "file", "absent")
    yield "told", {name: outcome(v1.is_orbax_checkpoint, root / name) for name in names}
    yield "error", issubclass(v1.errors.InvalidLayoutError, ValueError)


@scenario
def between_generations(ocp, root):
    """Each generation reads the other's checkpoints."""
    v1, args = ocp.v1, ocp.args
    v1.save(root / "new", small())
    with ocp.StandardCheckpointer() as it:
        it.save(root / "old", small())
        it.wait_until_finished()
        yield "old reads new", outcome(it.restore, root / "new")
        yield "old reads the item of new", outcome(it.restore, root / "new" / "state")
    yield "new reads old", outcome(v1.load, root / "old")
    yield "new reads old like", outcome(v1.load, root / "old", abstract(small()))
    yield "new reads metadata of old", outcome(v1.metadata, root / "old")
    with ocp.CheckpointManager(root / "m") as it:
        it.save(3, args=args.Composite(params=args.StandardSave(small()), config=args.JsonSave({"a": 1})))
    yield "new reads a step", outcome(v1.load, root / "m" / "3", checkpointable_name="params")
    yield "new reads a step, auto", outcome(v1.load, root / "m" / "3")
    yield "new reads items", outcome(v1.load_checkpointables, root / "m" / "3")
    yield "new reads some items", outcome(v1.load_checkpointables, root / "m" / "3", {"config": None})
    with v1.training.Checkpointer(root / "m") as it:
        yield "checkpointer lists", it.latest.step
        yield "checkpointer loads", outcome(it.load_checkpointables, 3, {"params": None})
    with v1.training.Checkpointer(root / "t") as it:
        it.save(5, small())
    with ocp.CheckpointManager(root / "t") as it:
        yield "manager lists", it.all_steps()
        yield "manager restores", outcome(it.restore, 5, args=args.Composite(state=args.StandardRestore()))
        yield "manager's metadata", outcome(lambda: it.metadata(5).custom_metadata)


@scenario
def training(ocp, root):
    with ocp.v1.training.Checkpointer(root) as it:
        yield "empty", [it.latest, list(it.checkpoints)]
        yield "load of none", outcome(it.load)
        for step in (0, 1, 5):
            yield f"save {step}", it.save(step, {"a": jnp.int32(step)})
        yield "latest", it.latest
        yield "steps", [each.step for each in it.checkpoints]
        yield "load", it.load()
        yield "load 1", outcome(it.load, 1)
        yield "load like", outcome(it.load, 1, {"a": jax.ShapeDtypeStruct((), jnp.float32)})
        yield "load by its object", outcome(it.load, it.checkpoints[0])
        yield "absent", outcome(it.load, 9)
        yield "again", outcome(it.save, 5, {"a": jnp.int32(5)})
        yield "forced", outcome(it.save, 5, {"a": jnp.int32(5)}, force=True)
        yield "overwrite", outcome(it.save, 5, {"a": jnp.int32(55)}, overwrite=True)
        yield "directory", it.directory
        yield "root", listing(root)
        yield "files", there(root, "0/state", "0/_CHECKPOINT_METADATA", "0/orbax.checkpoint")
    yield "errors", [issubclass(ocp.v1.training.errors.StepNotFoundError, FileNotFoundError)]
    yield "errors too", issubclass(ocp.v1.training.errors.StepAlreadyExistsError, ValueError)


@scenario
def training_of_checkpointables(ocp, root):
    with ocp.v1.training.Checkpointer(root) as it:
        given = {"state": small(), "config": {"text": "a"}}
        yield (
            "save",
            outcome(it.save_checkpointables, 0, given, metrics={"loss": 1.5}, custom_metadata={"x": 1}),
        )
        yield "all", outcome(it.load_checkpointables, 0)
        yield "latest", it.load_checkpointables()
        yield "some", outcome(it.load_checkpointables, 0, {"config": None})
        yield "absent", outcome(it.load_checkpointables, 0, {"z": None})
        yield "tree", outcome(it.load, 0)
        found = it.checkpointables_metadata(0)
        yield "metadata", found
        yield "metadata of latest", it.checkpointables_metadata().step
        yield "tree's metadata", outcome(it.metadata, 0)
        yield "metrics", it.latest.metrics
        yield "files", there(root, "0/state", "0/config", "0/metrics", "0/metrics/metrics")


@scenario
def training_asynchronously(ocp, root):
    with ocp.v1.training.Checkpointer(root) as it:
        response = it.save_async(0, state())
        yield "result", response.result()
        yield "progress", it.is_saving_in_progress()
        other = it.save_checkpointables_async(1, {"state": small(), "config": {"a": "x"}}, force=True)
        it.wait()
        yield "other", other.result()
        yield "steps", [each.step for each in it.checkpoints]
        loading = outcome(lambda: it.load_async(0).result())
        yield "loaded", loading
    with ocp.v1.training.Checkpointer(
        root / "b", save_decision_policy=ocp.v1.training.save_decision_policies.FixedIntervalPolicy(2)
    ) as it:
        yield "declined", it.save_async(1, small())
        yield "not declined", it.save_async(2, small()).result()


@scenario
def training_policies(ocp, root):
    known = ocp.v1.training
    keep, decide = known.preservation_policies, known.save_decision_policies
    for name, options in {
        "default": {},
        "latest": {"preservation_policy": keep.LatestN(2)},
        "any": {"preservation_policy": keep.AnyPreservationPolicy([keep.LatestN(1), keep.EveryNSteps(3)])},
        "all": {"preservation_policy": keep.PreserveAll()},
        "best": {"preservation_policy": keep.BestN(get_metric_fn=lambda metrics: metrics["loss"], n=2)},
        "interval": {"save_decision_policy": decide.FixedIntervalPolicy(2)},
        "some": {"save_decision_policy": decide.SpecificStepsPolicy([1, 4])},
        "slow": {"save_decision_policy": decide.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)},
        "initial": {"save_decision_policy": decide.InitialSavePolicy()},
    }.items():
        with known.Checkpointer(root / name, **options) as it:
            yield (
                f"{name} saved",
                [
                    it.save(step, {"a": jnp.int32(step)}, metrics={"loss": float(step % 4)})
                    for step in range(6)
                ],
            )
            yield f"{name} steps", [each.step for each in it.checkpoints]
            yield f"{name} should save", it.should_save(6)
        yield f"{name} root", listing(root / name)


@scenario
def training_metadata(ocp, root):
    with ocp.v1.training.Checkpointer(root, custom_metadata={"version": 3}) as it:
        it.save(2, state(), metrics={"loss": 0.5, "text": "x"}, custom_metadata={"lr": 0.1})
        yield "metadata", outcome(it.metadata, 2)
        yield "latest", it.metadata()
        yield "absent", outcome(it.metadata, 7)
        yield "root", it.root_metadata().custom_metadata
        yield "root's directory", outcome(lambda: it.root_metadata().directory)
        yield "checkpoint", it.checkpoints[0]
        yield "path", it.checkpoints[0].path
        yield "times", type(it.checkpoints[0].commit_timestamp_nsecs).__name__
        yield "file", there(root, "metadata/_ROOT_METADATA")
    with ocp.v1.training.Checkpointer(root) as it:
        yield "read again", it.latest
        yield "metrics again", it.latest.metrics
        yield "reload", it.reload()


@scenario
def training_names(ocp, root):
    name = ocp.v1.path.step.standard_name_format(step_prefix="s", step_format_fixed_length=4)
    with ocp.v1.training.Checkpointer(root, step_name_format=name) as it:
        it.save(7, small())
        yield "latest", it.latest.step
    yield "root", listing(root)
    yield "json", sorted(json_of(root, "s_0007", "_CHECKPOINT_METADATA"))


@scenario
def training_deletes(ocp, root):
    with ocp.v1.training.Checkpointer(root) as it:
        for step in range(3):
            it.save(step, {"a": jnp.int32(step)})
        yield "delete", outcome(it.delete, 1)
        yield "steps", [each.step for each in it.checkpoints]
        yield "again", outcome(it.delete, 1)
        yield "missing ok", outcome(it.delete, 1, missing_ok=True)
        yield "root", listing(root)
        yield "latest", outcome(it.delete, 2)
        yield "then", it.latest.step
        yield "cancel", outcome(it.cancel)
    ocp.v1.save(root / "x", small())
    yield "function", outcome(ocp.v1.delete, root / "x")
    yield "gone", there(root, "x")
    yield "absent", outcome(ocp.v1.delete, root / "x")


@scenario
def training_deprecated_names(ocp, root):
    with ocp.v1.training.Checkpointer(root) as it:
        yield "save", outcome(it.save_pytree, 0, small())
        yield "load", outcome(it.load_pytree, 0)
        yield "async", outcome(lambda: it.save_pytree_async(1, small(), force=True).result())
        yield "metadata", outcome(it.pytree_metadata, 0)
        yield "close", it.close()


@scenario
def training_in_a_context(ocp, root):
    context = ocp.v1.Context()
    context.pytree.loading.partial_load = True
    with ocp.v1.training.Checkpointer(root, context=context) as it:
        it.save(0, small())
        yield "partial", outcome(it.load, 0, {"a": jax.ShapeDtypeStruct((8,), jnp.float32)})


@scenario
def stateful(ocp, root):
    """Objects that write their own files: `save` and `load` are coroutines that return awaitables."""

    class Position:
        def __init__(self, at=0):
            self.at = at

        async def save(self, directory):
            at = self.at

            async def write():
                path = await directory.await_creation()
                (path / "position.txt").write_text(str(at))

            return write()

        async def load(self, directory):
            async def read():
                self.at = int((directory / "position.txt").read_text())

            return read()

    one = Position(7)
    yield "is one", isinstance(one, ocp.v1.StatefulCheckpointable)
    yield "save", outcome(ocp.v1.save_checkpointables, root / "a", {"data": one, "state": small()})
    other = Position()
    yield (
        "load",
        outcome(lambda: sorted(ocp.v1.load_checkpointables(root / "a", {"data": other, "state": None}))),
    )
    yield "loaded", other.at
    yield "files", there(root, "a/data/position.txt")
    with ocp.v1.training.Checkpointer(root / "t") as it:
        it.save_checkpointables(0, {"data": one, "state": small()})
        again = Position()
        it.load_checkpointables(0, {"data": again})
        yield "by a checkpointer", again.at
    yield "without it", outcome(ocp.v1.load_checkpointables, root / "a")


@scenario
def stateful_subclass(ocp, root):
    class Position(ocp.v1.StatefulCheckpointable):
        def __init__(self, at=0):
            self.at = at

        async def save(self, directory):
            async def write():
                path = await directory.await_creation()
                (path / "position.txt").write_text(str(self.at))

            return write()

        async def load(self, directory):
            async def read():
                self.at = int((directory / "position.txt").read_text())

            return read()

    yield "save", outcome(ocp.v1.save_checkpointables, root / "a", {"data": Position(3)})
    other = Position()
    ocp.v1.load_checkpointables(root / "a", {"data": other})
    yield "loaded", other.at


@scenario
def own_handler(ocp, root):
    handlers = ocp.v1.handlers

    class Point:
        def __init__(self, x):
            self.x = x

    class PointHandler(handlers.CheckpointableHandler):
        async def save(self, directory, checkpointable):
            async def write():
                path = await directory.await_creation()
                (path / "x.txt").write_text(str(checkpointable.x))

            return write()

        async def load(self, directory, abstract_checkpointable=None):
            async def read():
                return Point(int((directory / "x.txt").read_text()))

            return read()

        async def metadata(self, directory):
            return None

        def is_handleable(self, checkpointable):
            return isinstance(checkpointable, Point)

        def is_abstract_handleable(self, abstract_checkpointable):
            return abstract_checkpointable is None or isinstance(abstract_checkpointable, Point)

    registry = outcome(lambda: handlers.local_registry())
    yield "registry", registry.error is None
    yield "add", outcome(lambda: registry.value.add(PointHandler)).error is None
    context = ocp.v1.Context(
        checkpointables_options=ocp.v1.options.CheckpointablesOptions(registry=registry.value)
    )
    with context:
        yield "save", outcome(ocp.v1.save_checkpointables, root / "a", {"point": Point(4), "state": small()})
        yield "load", outcome(lambda: ocp.v1.load_checkpointables(root / "a", {"point": None})["point"].x)
    yield "files", there(root, "a/point/x.txt")
    yield "unknown", outcome(ocp.v1.save_checkpointables, root / "b", {"point": Point(4)})


@scenario
def trees(ocp, root):
    yield "merge", outcome(ocp.v1.tree.merge, {"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})
    yield "merge overwrites", outcome(ocp.v1.tree.merge, {"a": 1}, {"a": 2})
    yield "shapes", outcome(ocp.v1.arrays.to_shape_dtype_struct, jnp.zeros((2, 3)))
    yield "shapes of numpy", outcome(ocp.v1.arrays.to_shape_dtype_struct, np.zeros(2))
    yield "placeholder", ocp.v1.PLACEHOLDER
    yield (
        "processes",
        [
            ocp.v1.multihost.process_index(),
            ocp.v1.multihost.process_count(),
            ocp.v1.multihost.is_primary_host(0),
        ],
    )


@scenario
def callback_before_the_commit(ocp, root):
    calls = []
    context = ocp.v1.Context()
    context.asynchronous.post_finalization_callback = lambda: calls.append(1)
    with context:
        ocp.v1.save_async(root / "a", small()).result()
    yield "calls", calls


@scenario
def errors_of_an_asynchronous_save(ocp, root):
    yield "object", outcome(lambda: ocp.v1.save_async(root / "a", {"a": object()}))
    yield "there", there(root, "a")
    yield "reserved name", outcome(ocp.v1.save_checkpointables, root / "b", {"metrics": {"a": 1}})
    yield (
        "reserved name of training",
        outcome(
            lambda: ocp.v1.training.Checkpointer(root / "c").save_checkpointables(
                0, {"metrics": {"a": 1}}, metrics={"b": 1}
            )
        ),
    )
    yield "nothing", outcome(ocp.v1.save_checkpointables, root / "d", {})
    yield "an odd name", outcome(ocp.v1.save_checkpointables, root / "e", {"a/b": small()})
