"""Several processes save one checkpoint; as many, more, fewer or one load it."""

import os
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eformer.checkpoint import inspect, load, save, verify
from eformer.errors import NotFoundError
from multihost import scenes
from support.processes import Failed, Job
from support.safetensors_files import tensors_in
from support.thorough import IS_THOROUGH

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.sample(2)]

LAYOUTS = {
    "safetensors": {},
    "safetensors, small files": {"max_shard_bytes": 4096},
    "tensorstore": {},
    "tensorstore, zstd": {"compression": "zstd", "max_chunk_bytes": 65536},
    "tensorstore, ocdbt": {"ocdbt": True},
}
FORMATS = ["safetensors", "tensorstore"]

NUMBERS = [(2, 2), (4, 2), (1, 4), *([(4, 1)] if IS_THOROUGH else [])]  # processes, and devices of each


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    """Where to save, and how."""
    return tmp_path / request.param.replace(", ", "-").replace(" ", "-"), LAYOUTS[request.param]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / request.param


def succeed(outcomes):
    problems = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    assert not problems, "\n".join(problems)
    return outcomes


def no_scratch(path):
    return not [entry.name for entry in path.iterdir() if entry.name.startswith(".")]


# ---------------------------------------------------------------------------------------- save and load


def test_each_process_is_told_of_its_own_part(two, layout):
    path, options = layout
    for calls in (
        calls for both in succeed(two.run("save_and_load_watched", path, options)) for calls in both
    ):
        total = calls[-1][1]
        assert calls[-1] == (total, total)
        assert calls == sorted(calls)
        assert total > 0


def test_layers_of_another_program_land_renamed_and_each_process_reads_its_own(two, tmp_path):
    """The embedding is resized, which takes all of it; of the layers each process reads half."""
    rng = np.random.default_rng(0)
    weights = {f"layers.{n}": rng.normal(size=(96, 64)).astype(np.float32) for n in range(4)}
    weights["embed"] = rng.normal(size=(100, 64)).astype(np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    layers, embed = 4 * 96 * 64 * 4, 100 * 64 * 4
    for nbytes, is_kept in succeed(two.run("load_renamed", tmp_path / "model.safetensors", weights)):
        assert is_kept
        assert layers / 2 + embed <= nbytes < layers / 2 + embed + 4096


def test_each_process_reads_the_codes_and_scales_of_its_part_of_a_quantised_weight(two, tmp_path):
    rng = np.random.default_rng(0)
    q, s = rng.normal(size=(4096, 1024)).astype(ml_dtypes.float8_e4m3fn), rng.random((32, 8), np.float32)
    save_file({"a.weight": q, "a.weight_scale_inv": s}, tmp_path / "model.safetensors")
    expected = (q.astype("f4") * s.repeat(128, 0).repeat(128, 1)).astype(ml_dtypes.bfloat16)
    for nbytes in succeed(two.run("load_dense", tmp_path / "model.safetensors", expected)):
        assert q.nbytes / 2 < nbytes < q.nbytes / 2 + 2048


def test_a_callback_that_raises_in_one_process_fails_the_save_of_all(two, path):
    succeed(two.run("save_tree", path, "sync", {}))
    ours, theirs = two.run("save_and_load_watched", path, {}, 1)
    assert "seen enough" in str(ours)
    assert "ZeroDivisionError" in str(theirs)
    scenes.check(load(path))


def test_all_processes_call_a_tensor_the_same(two, tmp_path):
    for _ in range(2):
        succeed(two.run("save_dotted", tmp_path))
        names = tensors_in(tmp_path)
        assert sorted({name.partition("%[")[0] for name in names}) == ["a.b", "c%2Ed", "c.d", "x.y.w"]
        assert verify(tmp_path).ok


@pytest.mark.sample(5)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_what_two_processes_save_loads_on_any_other_number(jobs, layout, how):
    path, options = layout
    for version in (0, 1):  # the second replaces the first
        succeed(jobs(2, 2).run("save_tree", path, how, options, version))
    assert verify(path).ok
    assert no_scratch(path)
    scenes.check(load(path), 1)  # one process, this one
    for processes, devices in NUMBERS:
        job = jobs(processes, devices)
        for spec in (("x", "y"), (None, "x"), (("x", "y"),)):
            succeed(job.run("load_tree", path, spec, 1))
        succeed(job.run("load_as_saved", path, 1))


@pytest.mark.parametrize("broadcast", [False, True])
def test_numbers_and_arrays_without_axes_are_in_every_process_what_like_has(two, path, broadcast):
    succeed(two.run("load_steps", path, broadcast))


def test_a_process_that_loads_what_it_saved_reads_no_record_but_its_own(four, path):
    assert succeed(four.run("save_and_load_rows", path)) == [1] * 4


def test_the_comparison_sees_a_difference(two, path):
    succeed(two.run("save_tree", path, "sync", {}, 1))
    for outcome in two.run("load_tree", path, ("x", "y"), 0):
        assert isinstance(outcome, Failed)
        assert outcome.kind == "AssertionError"


def test_what_four_processes_save_loads_in_one(four, layout):
    path, options = layout
    succeed(four.run("save_tree", path, "async", options))
    scenes.check(load(path))
    assert verify(path).ok
    assert "process 1 and 2 more differ from process 0" in four.told(0)


def test_every_byte_is_written_once(four, path):
    sizes = succeed(four.run("save_tree", path, "sync", {}))
    state = scenes.state_nbytes()
    assert state <= sum(sizes) <= 1.1 * state + 50_000  # headers, manifests, what the log says
    assert max(sizes) <= 0.6 * sum(sizes)  # the replicas are spread
    entry = inspect(path).trees[""]
    own = 5 * 4 + 3 * 4 + 2 * 2
    assert entry.nbytes == state + own


def test_a_process_may_load_for_itself(two, path):
    succeed(two.run("save_tree", path, "sync", {}))
    assert succeed(two.run("load_alone", path)) == [1, None]


def test_a_mesh_that_is_set_counts_where_an_argument_needs_one(two, path):
    succeed(two.run("save_tree", path, "sync", {}))
    succeed(two.run("load_inside_of_set_mesh", path, limit=60))


def test_weakly_typed_arrays_of_several_processes_come_back_weakly_typed(two, path):
    succeed(two.run("save_and_load_weak", path))


def test_what_is_held_by_several_is_read_once_if_it_is_broadcast(four, path):
    large = np.random.default_rng(0).integers(0, 2**16, (2048, 8192), np.uint16).view(ml_dtypes.bfloat16)
    save(large, path, **scenes.format_of(path))
    assert min(succeed(four.run("load_everywhere", path, False))) >= large.nbytes
    assert large.nbytes <= sum(succeed(four.run("load_everywhere", path, True))) < 1.2 * large.nbytes
    succeed(four.run("save_tree", f"{path}-2", "sync", {}))
    for spec in ((None, None), ("y",), (None, "x")):
        succeed(four.run("load_tree", f"{path}-2", spec, 0, True))


@pytest.mark.thorough
def test_many_leaves_are_broadcast_one_after_the_other(four, tmp_path):
    save({f"w{i}": np.full((1024, 1024), 7, np.float32) for i in range(40)}, tmp_path / "safetensors")
    succeed(four.run("load_much_everywhere", tmp_path / "safetensors", limit=60))


def test_saves_under_way_are_committed_in_their_order(two, path):
    succeed(two.run("save_many_at_once", path, 4))
    for version in range(4):
        assert verify(f"{path}-{version}").ok


def test_a_checkpoint_that_is_replaced_meanwhile_is_never_mixed(two, path):
    succeed(two.run("prepare_for_loads", path))
    first, second = succeed(two.run("save_while_others_load", path, 15))
    assert first == second  # the same save in both, every time


# ------------------------------------------------------------------------------------------ some of them


def test_some_processes_save_without_the_others(four, path):
    assert succeed(four.run("save_some", path, [1, 3])) == [None, 2, None, 2]
    assert succeed(four.run("save_some", path, [0, 2], 5)) == [2, None, 2, None]
    assert load(path)["w"].tolist() == [float(i + 5) for i in range(16)]


def test_each_process_saves_what_is_its_own(two, path):
    assert succeed(two.run("save_own", path)) == [(0, 0.0), (1, 1.0)]


def test_one_process_cannot_save_what_others_hold(two, path):
    for outcome in two.run("save_alone_what_all_have", path):
        assert outcome.kind == "LeafError"
        assert "which does not take part in this save" in outcome.text


def test_leaves_that_lie_in_one_process_each_are_all_saved(four, path):
    succeed(four.run("save_stages", path))
    loaded = load(path)
    assert loaded.pop("few").tolist() == [0.0, 1.0, 2.0]  # a copy in two of the four
    assert sorted(loaded) == sorted(f"{kind}-{i}" for kind in ("stage", "replica") for i in range(4))
    for name, leaf in loaded.items():
        assert leaf.tolist() == [10.0 * int(name[-1]) + i for i in range(8)]


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "says", "others"),
    [
        (
            "leaf more",
            "only in this process: more: float64[3] of numpy",
            "process 1 saves a different tree than process 0",
        ),
        ("other shape", "numpy: float64[6]", "process 1 saves a different tree than process 0"),
        ("other dtype", "global.odd: int8[7]", "process 1 saves a different tree than process 0"),
        ("other sharding", "('y',)", "process 1 saves a different tree than process 0"),
        ("unstorable leaf", "leaf 'text': a builtins.object", "process 1: LeafError"),
        (
            "other number",
            "only in this process: number: 7",
            "process 1 saves a different tree than process 0",
        ),
        (
            "other replica",
            "only in this process: global.scalar: ",
            "process 1 saves a different tree than process 0",
        ),
        ("other compression", "do different things", "'compression': 'zstd'"),
        ("other prefix", "do different things", "the prefix 'other'"),
        ("other path", "-of-its-own is not the directory", "on a file system that all of them share"),
    ],
)
def test_another_tree_in_one_process_is_an_error_in_all(two, path, kind, says, others):
    save({"old": 1}, path, **scenes.format_of(path))
    if kind == "other compression" and path.name == "safetensors":
        says, others = "for the format zarr", "process 1: ValueError"
    first, second = two.run("save_another_tree", path, 1, kind)
    assert says in second.text
    assert others in first.text
    assert max(succeed(two.run("last_took"))) < 15
    assert load(path) == {"old": 1}
    assert no_scratch(path)
    succeed(two.run("save_tree", path, "sync", {}))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_any_process_is_an_error_of_all(two, path, rank):
    outcomes = two.run("save_another_tree", path, rank, "unstorable leaf")
    assert outcomes[rank].kind == "LeafError"
    assert outcomes[1 - rank].kind == "ProcessError"
    assert f"process {rank}: LeafError" in outcomes[1 - rank].text
    outcomes = two.run("save_another_tree", path, rank, "file in the way")
    if rank == 0:
        assert outcomes[0].kind in ("FileExistsError", "NotADirectoryError")
        assert f"process 0: {outcomes[0].kind}" in outcomes[1].text
    else:
        assert "is not the directory" in outcomes[1].text
    with pytest.raises(NotFoundError):
        load(path)


def test_processes_that_do_not_share_the_directory_all_say_so(two, tmp_path):
    for outcome in two.run("save_apart", tmp_path):
        assert outcome.kind == "ProcessError"
        assert "on a file system that all of them share" in outcome.text
    assert os.listdir(tmp_path / "0") == []
    assert os.listdir(tmp_path / "1") == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("absent", [0, 1])
def test_a_process_that_does_not_come_is_missed_in_time(path, absent, tmp_path):
    with Job(2, 1, tmp_path / "log") as job:  # afterwards these two are out of step
        (outcome,) = job.run("save_but_one", path, absent, ranks=[1 - absent])
        assert outcome.kind == "ProcessTimeoutError"
        assert f"after 1.5 s process {1 - absent} still waits for process {absent}" in outcome.text
        assert job.run("last_took", ranks=[1 - absent])[0] < 4


@pytest.mark.sample(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_who_fails_before_it_writes_waits_for_nobody(path, tmp_path, rank):
    with Job(2, 1, tmp_path / "log") as job:
        (outcome,) = job.run("save_what_cannot_be", path, ranks=[rank])
        assert outcome.kind == "LeafError"
        assert job.run("last_took", ranks=[rank])[0] < 5
        (late,) = job.run("save_tree", path, "sync", {}, ranks=[1 - rank])
        assert late.kind == "ProcessError"
        assert f"process {rank}: LeafError" in late.text
        succeed(job.run("save_tree", path, "sync", {}))  # they are still in step


@pytest.mark.thorough
def test_messages_of_any_length_arrive_and_are_forgotten(two):
    succeed(two.run("meet_often", 3, 600_000))
    succeed(two.run("meet_often", 200, 10))
    time.sleep(0.2)
    assert max(succeed(two.run("count_entries"))) <= 64 + 10  # the answers of the last 64 meetings


def test_the_same_keys_in_another_order_are_the_same_tree(two, path):
    succeed(two.run("save_another_tree", path, 1, "other order"))
    scenes.check(load(path))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["plain", "replicated"])
def test_processes_that_are_out_of_step_do_not_make_a_mixture(path, tmp_path, kind):
    with Job(2, 2, tmp_path / "log") as job:
        first, second = succeed(job.run("miss_a_save", path, kind))
    assert first[0].startswith("ProcessError: process 1 saves a different tree than process 0")
    assert "only in this process: step: 20" in second[0]
    assert first[1].startswith("ProcessTimeoutError")
    with pytest.raises(NotFoundError):
        load(path)


def test_a_save_and_a_load_do_not_meet(two, path):
    succeed(two.run("save_tree", path, "sync", {}))
    for rank in (0, 1):
        for outcome in two.run("save_and_load_at_once", path, rank):
            assert outcome.kind == "ProcessError"
            assert "do different things: process 0 " in outcome.text
    succeed(two.run("load_as_saved", path))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_function_of_the_callers_that_fails_in_one_process_fails_all(two, path, rank):
    outcomes = two.run("gather_and_fail", path, rank)
    assert outcomes[rank].kind == "ZeroDivisionError"
    assert f"process {rank}: ZeroDivisionError" in outcomes[1 - rank].text
    succeed(two.run("save_tree", path, "sync", {}))  # they are still in step


@pytest.mark.thorough
def test_a_save_may_take_longer_than_many_others_together(two, path):
    succeed(two.run("outlive_many", path, 70))
    assert verify(path).ok


def test_who_has_no_devices_there_loads_without_the_others(four, path):
    save({"numpy": np.arange(3, dtype=np.int32)}, path, **scenes.format_of(path))
    assert succeed(four.run("load_on_some", path, [1, 3])) == [[], [[0, 1, 2]] * 2, [], [[0, 1, 2]] * 2]


def test_an_interrupted_process_holds_nobody_up(two, path):
    succeed(two.run("save_tree", path, "sync", {}))
    first, second = two.run("interrupted", path, 1, 2)
    assert second.text == "interrupted"
    assert "process 1: KeyboardInterrupt" in first.text
    assert max(succeed(two.run("last_took"))) < 10
    scenes.check(load(path))
    assert no_scratch(path)
    succeed(two.run("save_tree", path, "sync", {}, 2))


def test_an_error_after_the_commit_does_not_claim_that_nothing_was_committed(two, tmp_path):
    succeed(two.run("save_tree", tmp_path / "safetensors", "sync", {}))
    first, second = two.run("save_and_fail_after_the_seal", tmp_path / "safetensors")
    assert first.kind == "ZeroDivisionError"
    assert second.text.startswith("the save failed after the new tree was put in place")
    scenes.check(load(tmp_path / "safetensors"), 3)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("step", "rank"), [("write", 0), ("write", 1), ("seal", 0), ("place", 0)])
def test_a_disk_that_fails_one_process_fails_all_and_the_old_tree_stays(two, path, rank, step):
    succeed(two.run("save_tree", path, "sync", {}))
    arrays = " arrays" if path.name == "tensorstore" and step != "place" else ""
    outcomes = two.run("save_and_fail_at", path, rank, step + arrays)
    assert outcomes[rank].kind == "OSError"
    assert outcomes[1 - rank].kind == "ProcessError"
    assert f"process {rank}: OSError(28" in outcomes[1 - rank].text
    assert no_scratch(path)
    scenes.check(load(path))
    succeed(two.run("save_tree", path, "sync", {}, 2))
    scenes.check(load(path), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_process_cannot_see_is_an_error_of_all(two, path, rank):
    succeed(two.run("save_tree", path, "sync", {}))
    outcomes = two.run("load_what_only_one_sees", path, rank)
    assert outcomes[1 - rank].kind == "NotFoundError"
    assert f"process {1 - rank}: NotFoundError" in outcomes[rank].text
    outcomes = two.run("load_with_a_bad_callback", path, rank)
    assert outcomes[rank].kind == "ZeroDivisionError"
    assert outcomes[1 - rank] is None


# ------------------------------------------------------------------------------------------- front doors


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments", [{}, {"use_tensorstore": False}, {"enable_validation": True, "enable_compression": True}]
)
def test_the_manager_saves_and_loads_in_several_processes(four, tmp_path, arguments):
    succeed(four.run("use_manager", tmp_path / "a", arguments))
    succeed(four.run("save_gathered", tmp_path / "b", arguments))
    scenes.check(load(tmp_path / "b"))
    if arguments.get("use_tensorstore") is False:
        whole = [
            leaf.shape for leaf in inspect(tmp_path / "b").trees[""].leaves.values() if len(leaf.extents) == 1
        ]
        assert len(whole) == len(scenes.SHAPES) + 3


@pytest.mark.sample(4)
@pytest.mark.parametrize("write_index", [True, False])
@pytest.mark.parametrize("with_manager", [False, True])
def test_leaves_are_serialized_in_several_processes(four, tmp_path, with_manager, write_index):
    path = tmp_path / "tensorstore"
    succeed(four.run("serialize_leaves", path, with_manager, write_index))
    assert no_scratch(path)
    if write_index:
        assert verify(path).ok


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_any_process_is_raised_by_the_manager_of_the_first(two, tmp_path, rank):
    path = tmp_path / "tensorstore"
    succeed(two.run("save_tree", path, "sync", {}))
    outcomes = two.run("serialize_and_fail_at", path, rank, "write arrays")
    assert outcomes[rank].kind == "OSError"
    assert outcomes[1 - rank].kind == "ProcessError"
    assert f"process {rank}: OSError(28" in outcomes[1 - rank].text
    assert no_scratch(path)
    scenes.check(load(path))
    succeed(two.run("serialize_leaves", path, True, True))


@pytest.mark.parametrize("limit", [100_000, 10**9])
def test_a_tensor_is_broadcast_bit_for_bit(two, limit):
    succeed(two.run("broadcast", limit))


@pytest.mark.thorough
def test_arrays_are_gathered_from_several_processes(two):
    succeed(two.run("gather_all"))
