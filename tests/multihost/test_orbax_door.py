"""Two processes save steps through the door of Orbax's shape: one commit for all items, of both."""

import pytest

from eformer.checkpoint import verify

pytestmark = pytest.mark.xdist_group("processes")


def test_two_processes_save_and_restore_steps(two, tmp_path):
    assert two.run("save_by_the_door", str(tmp_path / "run")) == [[2, 3], [2, 3]]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "3"]
    assert sorted(path.name for path in (tmp_path / "run" / "3" / "data").iterdir()) == [
        "process_0.txt",
        "process_1.txt",
    ]
    found = two.run("restore_by_the_door", str(tmp_path / "run"))
    assert found == [([3.0, 5.0], 30, 3), ([7.0, 9.0], 30, 3)]
    assert verify(tmp_path / "run").ok
