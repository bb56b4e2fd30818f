"""Workers of dask.distributed, on loopback, check and compare checkpoints."""

import numpy as np
import pytest

from eformer import checkpoint

distributed = pytest.importorskip("distributed")


@pytest.fixture
def executor():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


def test_workers_of_dask_verify_compare_and_report(executor, tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.random((300, 1000), np.float32) for i in range(8)}
    checkpoint.save(tree, tmp_path / "a")
    tree["w2"][3] += 1
    checkpoint.save(tree, tmp_path / "b", format="zarr")
    a, b = tmp_path / "a", tmp_path / "b"
    assert checkpoint.verify(a, executor=executor) == checkpoint.verify(a)
    assert str(checkpoint.diff(a, b, executor=executor)) == str(checkpoint.diff(a, b))
    by_dask, alone = (checkpoint.report(b, executor=e).data["leaves"] for e in (executor, None))
    assert by_dask == alone
