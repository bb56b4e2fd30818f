"""Executors: their workers check parts of a checkpoint, and the results are those of one process."""

from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import ProcessError


class Here(Executor):
    """An executor of any other library: it runs tasks one after the other, and counts them."""

    def __init__(self):
        self.tasks = []

    def submit(self, function, /, *args, **kwargs):
        self.tasks.append(args)
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  the future has it
            future.set_exception(error)
        return future


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.random((300, 1000), np.float32) for i in range(8)}
    checkpoint.save(tree, tmp_path / "run" / "step-1")
    checkpoint.save({"ema": tree["w1"]}, tmp_path / "run" / "step-1", prefix="ema")
    checkpoint.save(tree, tmp_path / "run" / "step-2", format="zarr")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        yield executor


def damage(path):
    (file,) = path.glob("model*.safetensors")
    data = bytearray(file.read_bytes())
    for at in (3, len(data) // 2, len(data) - 1):
        data[at] ^= 255
    file.write_bytes(data)
    (path / "ema.safetensors").unlink()


def test_a_process_pool_checks_a_run(saved, pool):
    assert checkpoint.verify(saved, executor=pool) == checkpoint.verify(saved)


def test_a_process_pool_finds_the_same_damage(saved, pool):
    damage(saved / "step-1")
    alone, by_pool = checkpoint.verify(saved), checkpoint.verify(saved, executor=pool)
    assert sorted(map(str, by_pool.damages)) == sorted(map(str, alone.damages))
    assert len(by_pool.damages) > 3


def test_any_executor_will_do_and_progress_is_in_bytes(saved):
    here, told = Here(), []
    found = checkpoint.verify(saved / "step-1", executor=here, progress=lambda *call: told.append(call))
    assert found == checkpoint.verify(saved / "step-1")
    assert len(here.tasks) > 10
    assert told[-1] == (found.nbytes, found.nbytes)


def test_an_error_of_a_worker_is_raised(saved):
    with pytest.raises(FileNotFoundError, match="nothing"):
        checkpoint.verify(saved / "nothing", executor=Here())


def test_a_dead_worker_is_named(saved):
    from support.workers import die

    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        executor.submit(die)
        with pytest.raises((ProcessError, RuntimeError), match=r"died|broken|abruptly"):
            checkpoint.verify(saved, executor=executor)


def test_an_executor_is_asked_for():
    with pytest.raises(TypeError, match=r"expected a concurrent\.futures\.Executor"):
        checkpoint.verify("x", executor=3)


def changed(saved):
    tree = checkpoint.load(saved / "step-2")
    tree["w3"] = np.asarray(tree["w3"]).copy()
    tree["w3"][150:] += 1
    tree["w5"] = np.full((300, 1000), np.nan, np.float32)
    tree["new"] = np.zeros((10_000, 1000), np.float32)  # larger than a box
    checkpoint.save(tree, saved / "step-3")
    tree["new"][7000, 3] = 2
    checkpoint.save(tree, saved / "step-4")


def test_a_process_pool_compares_the_same(saved, pool):
    changed(saved)
    for a, b in (("step-2", "step-3"), ("step-3", "step-4"), ("step-1", "step-1")):
        alone = checkpoint.diff(saved / a, saved / b)
        assert str(checkpoint.diff(saved / a, saved / b, executor=pool)) == str(alone)


def test_progress_of_a_comparison_is_in_bytes(saved):
    changed(saved)
    told = []
    checkpoint.diff(
        saved / "step-2", saved / "step-3", executor=Here(), progress=lambda *call: told.append(call)
    )
    assert told[-1] == (8 * 1_200_000, 8 * 1_200_000)


@pytest.mark.parametrize("against", [None, "step-2"])
def test_a_process_pool_makes_the_same_report(saved, pool, against):
    changed(saved)
    other = against and saved / against
    alone, by_pool = (checkpoint.report(saved / "step-3", other, executor=e).data for e in (None, pool))
    for data in (alone, by_pool):
        del data["summary"]["made_at"]
    assert by_pool == alone


def test_damage_is_in_the_report_of_a_pool(saved, pool):
    (file,) = (saved / "step-1").glob("model*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    alone, by_pool = (checkpoint.report(saved / "step-1", prefix="", executor=e).data for e in (None, pool))
    assert by_pool["leaves"]["problems"] == alone["leaves"]["problems"] != {}
