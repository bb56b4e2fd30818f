"""Names of steps, and functions that find them."""

import time

import jax.numpy as jnp

from orbax_door.scenario import listing, manager, outcome, scenario, there


def _one(ocp, root, steps, **options):
    with manager(ocp, root, **options) as it:
        for step in steps:
            it.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)}), force=True)
    return listing(root)


_FORMATS = {
    "plain": {},
    "prefix": {"step_prefix": "ckpt"},
    "prefix with underscore": {"step_prefix": "PPO_Network"},
    "fixed": {"step_format_fixed_length": 8},
    "prefix fixed": {"step_prefix": "step", "step_format_fixed_length": 4},
}


@scenario(tail={name: {"given": given} for name, given in _FORMATS.items()})
def names(ocp, root, given):
    yield "root", _one(ocp, root, (0, 42, 123456789), **given)
    with manager(ocp, root, **given) as it:
        yield "steps", it.all_steps()
        yield "latest", it.latest_step()
        yield "restore", it.restore(42, args=ocp.args.StandardRestore())
        yield "delete", it.delete(42)
        yield "then", it.all_steps(read=True)
    yield "without options", ocp.CheckpointManager(root).all_steps()


@scenario(
    tail={
        f"{one} read as {two}": {"one": one, "two": two} for one in _FORMATS for two in _FORMATS if one != two
    }
)
def names_of_another_format(ocp, root, one, two):
    _one(ocp, root, (0, 42, 123456789), **_FORMATS[one])
    yield (
        "steps",
        outcome(
            lambda: ocp.CheckpointManager(
                root, options=ocp.CheckpointManagerOptions(**_FORMATS[two])
            ).all_steps()
        ),
    )


@scenario(tail={name: {"given": given} for name, given in _FORMATS.items()})
def formats(ocp, root, given):
    it = ocp.path.step.standard_name_format(**given)
    yield "names", [it.build_name(step) for step in (0, 42, 123456789)]
    yield "of nothing", list(it.find_all(root))
    for step in (0, 42):
        (root / it.build_name(step)).mkdir()
    (root / "7").mkdir()
    (root / "00000007").mkdir()
    (root / "other_9").mkdir()
    (root / "file_3").write_text("x")
    yield "all", sorted((each.step, each.path) for each in it.find_all(root))
    yield "one", (lambda found: (found.step, found.path))(it.find_step(root, 42))
    yield "absent", outcome(it.find_step, root, 5)
    yield "path", ocp.path.step.build_step_path(root, it, 42)
    yield "latest", outcome(lambda: ocp.path.step.latest_step_metadata(root, it).step)


@scenario
def format_as_an_option(ocp, root):
    it = ocp.path.step.standard_name_format(step_prefix="s", step_format_fixed_length=3)
    yield "root", _one(ocp, root, (1, 2), step_name_format=it)
    yield (
        "steps",
        ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(step_name_format=it)).all_steps(),
    )


@scenario
def own_format(ocp, root):
    import dataclasses

    from etils import epath

    @dataclasses.dataclass(frozen=True)
    class Found:
        step: int
        path: epath.Path

        @property
        def commit_timestamp_nsecs(self):
            return None

        @property
        def init_timestamp_nsecs(self):
            return None

        @property
        def commit_timestamp(self):
            return None

    class Mine(ocp.path.step.NameFormat):
        def build_name(self, step):
            return f"checkpoint-{step:05d}"

        def build_metadata(self, step_path, step=None):
            return Found(int(step_path.name[11:]), step_path)

        def find_all(self, base_path):
            return [self.build_metadata(each) for each in sorted(epath.Path(base_path).glob("checkpoint-*"))]

        def find_step(self, base_path, step):
            path = epath.Path(base_path) / self.build_name(step)
            if not path.exists():
                raise ValueError(f"No step {step}")
            return Found(step, path)

    yield "root", outcome(_one, ocp, root, (1, 2), step_name_format=Mine())
    with manager(ocp, root, step_name_format=Mine()) as it:
        yield "steps", outcome(it.all_steps)
        yield "restore", outcome(it.restore, 2, args=ocp.args.StandardRestore())


@scenario
def composite_format(ocp, root):
    """Steps are written by the first format, and read by all."""
    make = ocp.path.step.standard_name_format
    _one(ocp, root, (1, 2), step_prefix="old")
    both = ocp.path.step.composite_name_format(
        make(step_prefix="new"), [make(step_prefix="new"), make(step_prefix="old")]
    )
    yield "root", outcome(_one, ocp, root, (3,), step_name_format=both)
    with manager(ocp, root, step_name_format=both) as it:
        yield "steps", outcome(it.all_steps)
        yield "restore", outcome(it.restore, 1, args=ocp.args.StandardRestore())


@scenario
def helpers(ocp, root):
    _one(ocp, root, (1, 20))
    (root / f"30{ocp.utils.TMP_DIR_SUFFIX}17").mkdir()
    utils = ocp.utils
    yield "steps", sorted(utils.checkpoint_steps(root))
    yield "steps of step", sorted(ocp.path.step.checkpoint_steps(root))
    yield "any", outcome(utils.any_checkpoint_step, root)
    yield "paths", outcome(lambda: sorted(utils.checkpoint_steps_paths(root)))
    yield "tmp", outcome(utils.tmp_checkpoints, root)
    yield (
        "is tmp",
        [utils.is_tmp_checkpoint(root / name) for name in ("1", f"30{ocp.utils.TMP_DIR_SUFFIX}17")],
    )
    yield (
        "finalized",
        [ocp.path.step.is_path_finalized(root / name) for name in ("1", f"30{ocp.utils.TMP_DIR_SUFFIX}17")],
    )
    yield "finalized by utils", utils.is_checkpoint_finalized(root / "1")
    yield "step of a name", [utils.step_from_checkpoint_name(name) for name in ("20", "ckpt_20")]
    yield "wrong name", outcome(utils.step_from_checkpoint_name, "x")
    yield "suffix", utils.TMP_DIR_SUFFIX
    yield "directory", ocp.path.step.get_save_directory(5, root)
    yield "directory of an item", ocp.path.step.get_save_directory(5, root, name="params", step_prefix="ckpt")
    yield "directory by utils", utils.get_save_directory(5, root, "params")
    yield "directory fixed", ocp.path.step.get_save_directory(5, root, step_format_fixed_length=4)
    yield (
        "other root",
        outcome(ocp.path.step.get_save_directory, 5, root, "params", override_directory=root / "b"),
    )
    yield "same module", ocp.step is ocp.path.step
    yield "primary", utils.is_primary_host(0)
    yield "absent", outcome(utils.checkpoint_steps, root / "absent")
    yield "latest", ocp.path.step.latest_step_metadata(root, ocp.path.step.standard_name_format()).step


@scenario
def steps_follow(ocp, root):
    """An evaluator takes the newest step each time."""
    it = ocp.CheckpointManager(root)
    for step in (1, 2, 3):
        it.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)}))
    it.wait_until_finished()
    found = []
    for step in ocp.checkpoint_utils.checkpoints_iterator(root, timeout=0, min_interval_secs=0):
        found.append(step)
        if step == 3:
            it.save(4, args=ocp.args.StandardSave({"a": jnp.int32(4)}))
            it.save(5, args=ocp.args.StandardSave({"a": jnp.int32(5)}))
            it.wait_until_finished()
    yield "steps", found
    yield "types", sorted({type(each).__name__ for each in found})
    it.close()


@scenario
def steps_follow_until_told(ocp, root):
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 2

    steps = ocp.checkpoint_utils.checkpoints_iterator(
        root / "none", timeout=0.1, timeout_fn=stop, min_interval_secs=0
    )
    yield "steps", outcome(list, steps)
    yield "asked", len(asked)
    _one(ocp, root / "some", (3,))
    steps = ocp.checkpoint_utils.checkpoints_iterator(
        root / "some", timeout=0.1, timeout_fn=lambda: True, min_interval_secs=0, snapshot_dir=root / "snaps"
    )
    yield "one", outcome(list, steps)


@scenario
def wait_for_a_step(ocp, root):
    wait = ocp.checkpoint_utils.wait_for_new_checkpoint
    _one(ocp, root, (3,))

    def taken(last):
        with wait(root, until_step=last, seconds_to_sleep=0.01, timeout=0.1) as step:
            return step, ocp.StandardCheckpointer().restore(
                root / str(step) / "default"
            ) if step >= 0 else None

    yield "any", outcome(taken, None)
    yield "the last", outcome(taken, 3)
    yield "before", outcome(taken, 2)
    yield "after the last", outcome(taken, 4)


@scenario
def step_is_held_while_it_is_used(ocp, root):
    it = ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=1))
    it.save(1, args=ocp.args.StandardSave({"a": jnp.int32(1)}))
    it.wait_until_finished()
    for step in ocp.checkpoint_utils.checkpoints_iterator(root, timeout=0, min_interval_secs=0):
        it.save(step + 1, args=ocp.args.StandardSave({"a": jnp.int32(2)})) if step < 2 else None
        it.wait_until_finished()
        yield f"restore {step}", outcome(ocp.StandardCheckpointer().restore, root / str(step) / "default")
        if step == 2:
            break
    it.close()
    time.sleep(0.1)
    yield "steps", ocp.CheckpointManager(root).all_steps()


@scenario
def sniffed_files(ocp, root):
    """gemma, simply, flax, Keras and maxtext look for these names."""
    args = ocp.args
    with ocp.CheckpointManager(root / "m") as it:
        it.save(0, args=args.Composite(items=args.PyTreeSave({"a": jnp.zeros(2)}), iter=args.JsonSave({})))
    yield (
        "step",
        there(root, "m/0/_CHECKPOINT_METADATA", "m/0/items", "m/0/iter", "m/0/iter/metadata", "m/0/metrics"),
    )
    with ocp.PyTreeCheckpointer() as it:
        it.save(root / "p", {"a": jnp.zeros(2)})
    yield "path", there(root, "p/_CHECKPOINT_METADATA")
    yield (
        "of its layout",
        there(root, "p/_METADATA", "p/manifest.ocdbt", "p/d", "p/checkpoint", "p/orbax.checkpoint"),
    )
