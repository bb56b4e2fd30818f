"""Saves that are under way: what may happen meanwhile, and whom their errors reach."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import line, on
from support.states import state
from support.trees import assert_same


class AsyncSaves(Backend):
    """What a save does after it has returned, and several at once."""

    @pytest.fixture
    def blocked(self, tmp_path):
        """A path where nothing can be saved, which only the save itself finds out."""
        (tmp_path / "file").write_text("in the way")
        return tmp_path / "file" / self.name

    @pytest.mark.parametrize("offload", [False, True])
    def test_after_save_async_arrays_may_be_donated_and_changed(self, manager, path, offload):
        tree = {
            "donated": jnp.arange(5000.0),
            "deleted": jnp.arange(5000),
            "sharded": jax.device_put(jnp.arange(64.0), on(line(), "model")),
            "numpy": np.arange(5000.0),
            "list": [1, 2],
        }
        expected = jax.tree.map(np.array, tree)
        pending = manager.save_async(tree, path, cpu_offload=offload)
        for name in ("donated", "sharded"):
            jax.jit(lambda x: x * 0, donate_argnums=0)(tree[name])
        tree["deleted"].delete()
        tree["numpy"][:] = 0
        tree["list"].append(3)
        assert pending.result() == str(path)
        assert_same(jax.tree.map(np.array, manager.load(path, line())[0]), expected)

    def test_save_async_takes_what_save_takes(self, manager, path):
        seen = []
        pending = manager.save_async(
            state(),
            path,
            line(),
            gather_fns={"step": lambda x: x + 1},
            float_dtype="bf16",
            metadata={"a": 1},
            callback=seen.append,
            prefix="m",
            do_all_gather=True,
            cpu_offload=True,
        )
        pending.result()
        loaded, metadata = manager.load(path, line())
        assert (int(loaded["step"]), loaded["block"]["kernel"].dtype) == (100_002, jnp.bfloat16)
        assert (metadata["custom_metadata"], seen) == ({"a": 1}, [str(path)])

    def test_the_callback_of_save_async_runs_once_it_is_committed(self, manager, path):
        seen = []
        manager.save_async(
            state(), path, callback=lambda p: seen.append(manager.load(p, line())[0]["name"])
        ).result()
        assert seen == ["run 0"]

    def test_an_error_of_the_callback_belongs_to_its_save(self, manager, path):
        pending = manager.save_async(state(), path, callback=lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pending.result()
        assert_same(manager.load(path, line())[0], state())

    def test_saves_to_one_path_are_committed_in_their_order(self, manager, path):
        pending = [manager.save_async({"i": i, "w": np.full(50_000 >> i, i)}, path) for i in range(6)]
        assert pending[-1].result()
        assert manager.load(path, None)[0]["i"] == 5
        manager.wait_until_finished()
        assert all(p.done() for p in pending)

    def test_an_error_belongs_to_its_own_save(self, manager, path, blocked):
        bad = manager.save_async(state(), blocked)
        good = manager.save_async(state(1), path)
        assert good.result() == str(path)
        manager.save(state(2), path.with_name("other" + path.suffix))
        with pytest.raises(NotADirectoryError):
            bad.result()
        assert_same(manager.load(path, line())[0], state(1))

    def test_waiting_raises_an_error_that_nobody_has_asked_for_and_only_once(self, manager, path, blocked):
        manager.save_async(state(), blocked)
        good = manager.save_async(state(), path)
        with pytest.raises(NotADirectoryError):
            manager.wait_until_finished()
        assert good.done()
        manager.wait_until_finished()

    def test_waiting_does_not_raise_what_was_asked_for(self, manager, blocked):
        pending = manager.save_async(state(), blocked)
        assert isinstance(pending.exception(), NotADirectoryError)
        manager.wait_until_finished()

    def test_of_several_errors_one_is_raised_and_the_others_are_logged(self, manager, blocked, caplog):
        for name in ("first", "second"):
            manager.save_async(state(), blocked.parent / name / self.name)
        with pytest.raises(NotADirectoryError, match="first"):
            manager.wait_until_finished()
        assert f"saving to {blocked.parent / 'second' / self.name} failed" in caplog.text

    def test_the_block_of_a_manager_waits_for_its_saves(self, path, blocked):
        with self.make() as manager:
            pending = manager.save_async(state(), path)
        assert pending.done()
        with pytest.raises(NotADirectoryError), self.make() as manager:
            manager.save_async(state(), blocked)

    def test_an_error_inside_of_the_block_is_the_one_that_is_raised(self, blocked, caplog):
        def block():
            with self.make() as manager:
                manager.save_async(state(), blocked)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            block()
        assert "a save failed, too" in caplog.text

    def test_everything_works_in_a_running_event_loop(self, manager, path):
        async def notebook():
            manager.save_pytree(state(), path, prefix="m")
            assert_same(manager.load(path, line())[0], state())
            assert_same(manager.load_tree_parallel(path)[0], state())
            assert await manager.save_async(state(1), path, prefix="m") == str(path)
            manager.wait_until_finished()
            return manager.load_pytree(path, line(), prefix="m")[0]

        assert_same(asyncio.run(notebook()), state(1))

    def test_several_threads_may_save_to_one_path(self, manager, path):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: manager.save({"w": jnp.full(2000, i), "i": i}, path), range(8)))
        loaded, _ = manager.load(path, line())
        np.testing.assert_array_equal(loaded["w"], np.full(2000, loaded["i"]))
        assert checkpoint.verify(path).ok

    def test_several_threads_may_load_at_once(self, manager, path):
        manager.save(state(), path)
        with ThreadPoolExecutor(4) as pool:
            for loaded, _ in pool.map(lambda _: manager.load(path, line()), range(8)):
                assert_same(loaded, state())


class TestTensorStore(TensorStore, AsyncSaves):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, AsyncSaves):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, AsyncSaves):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, AsyncSaves):
    pass
