"""Helpers for trees, processes, tests, and the package itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from orbax_door.inputs import Empty, Params, Train, mesh, small, state
from orbax_door.scenario import listing, outcome, scenario, there

_TREES = {
    "dict": lambda: {"a": 1, "b": {"c": 2}},
    "list": lambda: {"a": [1, 2], "b": (3, {"x": 4})},
    "empty": lambda: {"a": {}, "b": [], "c": None, "d": ()},
    "namedtuple": lambda: Params(1, {"x": 2}),
    "dataclass": lambda: {"t": Train(1, {"w": 2})},
    "int keys": lambda: {1: 2, 3: {4: 5}},
    "names with separators": lambda: {"a/b": 1, "c.d": {"e/f": 2}},
    "empty namedtuple": lambda: {"a": Empty(), "b": 1},
    "leaf": lambda: 3,
}


@scenario(tail={name: {"name": name} for name in _TREES})
def flat(ocp, root, name):
    tree = _TREES[name]()
    for module, known in {"tree": ocp.tree, "utils": ocp.utils}.items():
        flat = outcome(known.to_flat_dict, tree)
        yield f"{module} flat", flat
        yield f"{module} flat by slash", outcome(known.to_flat_dict, tree, sep="/")
        yield f"{module} flat with empty", outcome(known.to_flat_dict, tree, keep_empty_nodes=True)
        yield f"{module} back", outcome(lambda: known.from_flat_dict(flat.value))
        yield f"{module} back to the target", outcome(lambda: known.from_flat_dict(flat.value, target=tree))
        sep = lambda: known.from_flat_dict(known.to_flat_dict(tree, sep="/"), sep="/")
        yield f"{module} back by slash", outcome(sep)
        yield f"{module} serialized", outcome(known.serialize_tree, tree)
        yield f"{module} serialized with empty", outcome(known.serialize_tree, tree, keep_empty_nodes=True)
        again = lambda: known.deserialize_tree(
            known.serialize_tree(tree, keep_empty_nodes=True), target=tree, keep_empty_nodes=True
        )
        yield f"{module} deserialized", outcome(again)


@scenario
def optimizer_states(ocp, root):
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    tree = {"params": params, "opt_state": tx.init(params)}
    with ocp.StandardCheckpointer() as it:
        it.save(root / "a", tree)
        it.wait_until_finished()
        yield "plain", it.restore(root / "a")
        yield "like", it.restore(root / "a", tree)
        yield "equal", jax.tree.structure(it.restore(root / "a", tree)) == jax.tree.structure(tree)
    yield "flat", sorted(ocp.tree.to_flat_dict(tree, sep="/"))


@scenario
def states_of_nnx(ocp, root):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    graph, values = nnx.split(model)
    with ocp.StandardCheckpointer() as it:
        it.save(root / "a", values)
        it.wait_until_finished()
        yield "plain", it.restore(root / "a")
        like = it.restore(root / "a", nnx.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))))
        yield "like", like
        yield "merged", nnx.merge(graph, like)(jnp.ones((1, 2))).shape
        it.save(root / "b", nnx.to_pure_dict(values))
        it.wait_until_finished()
        pure = it.restore(root / "b")
        yield "pure", pure
        yield "replaced", outcome(nnx.replace_by_pure_dict, values, pure)


@scenario
def states_of_nnx_with_keys(ocp, root):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

    made = outcome(lambda: nnx.state(Model(nnx.Rngs(0))))
    with ocp.StandardCheckpointer() as it:
        yield "saved", outcome(it.save, root / "a", made.value)
        it.wait_until_finished()
        yield "plain", outcome(it.restore, root / "a")
        yield "like", outcome(it.restore, root / "a", made.value)


@scenario
def processes(ocp, root):
    known = ocp.multihost
    yield "numbers", [known.process_index(), known.process_count()]
    yield "primary", [known.is_primary_host(0), known.is_primary_host(None), known.is_primary_host(1)]
    yield "initialized", known.is_jax_distributed_client_initialized()
    yield "sync", outcome(known.sync_global_processes, "here")
    yield "broadcast", outcome(known.broadcast_one_to_all, {"a": np.arange(3)})
    yield "preempted", outcome(known.reached_preemption, 1)
    yield "utils", outcome(ocp.utils.sync_global_processes, "here")


@scenario
def replicated_to_global(ocp, root):
    one = mesh()
    made = jax.device_put(
        np.arange(3.0, dtype=np.float32), jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec())
    )
    yield "to global", outcome(ocp.utils.fully_replicated_host_local_array_to_global_array, made)
    yield (
        "of one device",
        outcome(ocp.utils.fully_replicated_host_local_array_to_global_array, jnp.arange(3.0)),
    )


@scenario
def helpers_for_tests(ocp, root):
    yield "erased", ocp.test_utils.erase_and_create_empty(root / "a")
    (root / "a" / "x").write_text("x")
    yield "again", ocp.test_utils.erase_and_create_empty(str(root / "a"))
    yield "empty", listing(root / "a")

    class Case:
        def assertEqual(self, one, two, *_):
            assert one == two

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    yield "equal", outcome(ocp.test_utils.assert_tree_equal, Case(), state(), state())
    other = {**state(), "step": 6}
    yield "differs", outcome(ocp.test_utils.assert_tree_equal, Case(), state(), other).error is not None


@scenario
def package(ocp, root):
    yield "version", ocp.__version__
    yield "version in a module", outcome(lambda: ocp.version.__version__)
    yield (
        "modules",
        {
            name: hasattr(ocp, name)
            for name in (
                "args checkpoint_manager checkpoint_managers checkpoint_utils checkpointers handlers logging metadata multihost "
                "options path step test_utils transform_utils tree type_handlers utils future v1 experimental checkpoint_args"
            ).split()
        },
    )
    yield (
        "names",
        {
            name: hasattr(ocp, name)
            for name in (
                "AsyncOptions Future RestoreTransform Transform merge_trees apply_transformations PLACEHOLDER CompositeOptions "
                "CheckpointHandlerRegistry ProtoCheckpointHandler BasePyTreeCheckpointHandler AbstractCheckpointer"
            ).split()
        },
    )
    yield "unknown", outcome(getattr, ocp, "no_such_name")
    yield "cloud logger", hasattr(ocp.logging, "CloudLogger")


@scenario
def stubs_that_programs_call(ocp, root):
    yield "duration", outcome(ocp.utils.record_saved_duration, 0.0)
    yield (
        "pathways",
        outcome(lambda: ocp.pathways.CheckpointingImpl.from_options(use_colocated_python=False)).error
        is None,
    )


@scenario
def loggers(ocp, root):
    class Mine(ocp.logging.AbstractLogger):
        def __init__(self):
            self.entries = []

        def log_entry(self, entry):
            self.entries.append(entry)

    mine = Mine()
    with ocp.CheckpointManager(root, logger=mine) as it:
        it.save(0, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        it.restore(0)
    yield "entries", len(mine.entries) > 0
    yield "types", sorted({type(each).__name__ for each in mine.entries})
    yield "events", sorted({str(each.get("event_type")) for each in mine.entries if isinstance(each, dict)})
    yield (
        "several",
        outcome(lambda: ocp.logging.CompositeLogger(mine, ocp.logging.StandardLogger()).log_entry({"a": 1})),
    )


@scenario
def events_of_monitoring(ocp, root):
    """Goodput tools listen to these events."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name))
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.StandardSave(small()))
        it.wait_until_finished()
        it.restore(0)
    known = [
        "save/blocking_duration_secs",
        "save/background_duration_secs",
        "restore/duration_secs",
        "write/async/blocking",
        "read/",
    ]
    yield (
        "events",
        sorted(
            {
                each
                for each in known
                if any("/jax/orbax/" in name or "/jax/checkpoint" in name for name in seen if each in name)
            }
        ),
    )


@scenario
def futures(ocp, root):
    import asyncio

    done = []

    async def work():
        await asyncio.sleep(0)
        done.append(1)

    it = ocp.future.CommitFutureAwaitingContractedSignals(work())
    yield "result", outcome(it.result, timeout=10)
    yield "done", done

    async def fail():
        raise ValueError("mine")

    it = ocp.future.CommitFutureAwaitingContractedSignals(fail())
    yield "error", outcome(it.result, timeout=10, words="mine")


@scenario
def names_with_dots_and_slashes(ocp, root):
    tree = {"a/b": jnp.zeros(2), "c.d": {"e f": jnp.ones(2)}, "ä": 3}
    for kind in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
        with kind() as it:
            yield f"{kind.__name__} save", outcome(it.save, root / kind.__name__, tree)
            if hasattr(it, "wait_until_finished"):
                yield f"{kind.__name__} wait", outcome(it.wait_until_finished)
            yield f"{kind.__name__} restore", outcome(it.restore, root / kind.__name__)


@scenario
def names_that_meet(ocp, root):
    """Two leaves whose names are the same once they are joined. Orbax stores one of them, at random, and says nothing."""
    tree = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    with ocp.StandardCheckpointer() as it:
        yield "save", outcome(it.save, root / "a", tree)
        yield "wait", outcome(it.wait_until_finished)
        yield "restore", outcome(lambda: sorted(it.restore(root / "a")))
    yield "there", there(root, "a")
