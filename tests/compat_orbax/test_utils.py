"""Helpers of evaluators, of processes and of loggers."""

import jax.numpy as jnp
import pytest

from eformer.compat import orbax as ocp


def test_an_evaluator_sees_the_newest_step_once_and_its_end(tmp_path):
    with ocp.CheckpointManager(tmp_path) as it:
        for step in (1, 2):
            it.save(step, args=ocp.args.StandardSave({"a": jnp.ones(1)}))
    found = ocp.checkpoint_utils.checkpoints_iterator(tmp_path, timeout=0, seconds_to_sleep=0)
    assert list(found) == [2]
    with ocp.checkpoint_utils.wait_for_new_checkpoint(
        tmp_path, until_step=9, timeout=0, seconds_to_sleep=0
    ) as step:
        assert step == -1


def test_the_functions_of_processes_of_one_process():
    known = ocp.multihost
    assert (known.process_index(), known.process_count()) == (0, 1)
    assert known.is_primary_host(0)
    assert not known.reached_preemption(3)
    known.sync_global_processes("here")
    assert ocp.pathways.CheckpointingImpl.from_options() is None


def test_a_logger_gets_an_entry_for_each_save(tmp_path):
    class Mine(ocp.logging.AbstractLogger):
        entries = []

        def log_entry(self, entry):
            self.entries.append(entry["event_type"])

    mine = ocp.logging.CompositeLogger(Mine(), ocp.logging.StandardLogger())
    with ocp.CheckpointManager(tmp_path, logger=mine) as it:
        it.save(0, args=ocp.args.StandardSave({"a": jnp.ones(1)}))
        it.restore(0)
    assert Mine.entries == ["save", "restore"]


def test_helpers_of_tests(tmp_path):
    place = ocp.test_utils.erase_and_create_empty(tmp_path / "a")
    assert list(place.iterdir()) == []
    ocp.test_utils.assert_tree_equal(None, {"a": jnp.ones(1)}, {"a": jnp.ones(1)})
    with pytest.raises(AssertionError):
        ocp.test_utils.assert_tree_equal(None, {"a": jnp.ones(1)}, {"a": jnp.zeros(1)})
    array = ocp.utils.fully_replicated_host_local_array_to_global_array(jnp.arange(3))
    assert array.is_fully_replicated
