"""Trees under prefixes: one that need not be said, and several in one directory."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import line
from support.states import state
from support.trees import assert_same


class OnePrefix(Backend):
    """What a prefix is called, and what it is not called any more."""

    def test_one_prefix_need_not_be_said(self, manager, path):
        manager.save(state(), path, prefix="model")
        for prefix in (None, "model"):
            assert_same(manager.load(path, line(), prefix=prefix)[0], state())

    def test_an_unknown_prefix_is_refused_with_the_available(self, manager, path):
        manager.save(state(), path, prefix="model")
        for call in (
            lambda: manager.load(path, line(), prefix="modle"),
            lambda: manager.load_pytree(path, line(), prefix="modle"),
        ):
            with pytest.raises(ValueError, match=r"no prefix 'modle'.*available prefixes: \['model'\]"):
                call()

    def test_the_old_name_of_the_prefix_warns(self, manager, path):
        manager.save(state(), path, prefix="model")
        with pytest.warns(DeprecationWarning, match="use prefix") as caught:
            assert_same(manager.load(path, line(), prefix_filter="model")[0], state())
        assert caught[0].filename == __file__
        with (
            pytest.warns(DeprecationWarning, match="use prefix"),
            pytest.raises(ValueError, match="no prefix 'opt'"),
        ):
            manager.load(path, line(), prefix_filter="opt")
        with (
            pytest.warns(DeprecationWarning, match="use prefix"),
            pytest.raises(ValueError, match="contradict"),
        ):
            manager.load(path, line(), prefix="model", prefix_filter="opt")

    def test_a_parallel_load_takes_the_prefix_by_its_old_name(self, manager, path):
        manager.save(state(), path, prefix="model")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert_same(manager.load_tree_parallel(path, prefix_filter="model")[0], state())
            with pytest.raises(ValueError, match="no prefix 'opt'"):
                manager.load_tree_parallel(path, prefix_filter="opt")


class SeveralPrefixes(OnePrefix):
    """What a directory can, and one file cannot: hold several trees."""

    def test_every_prefix_has_its_tree_and_its_metadata(self, manager, path):
        for i, prefix in enumerate(("model", "opt", None)):
            manager.save(state(i), path, prefix=prefix, metadata={"who": prefix})
        for i, prefix in enumerate(("model", "opt")):
            loaded, metadata = manager.load(path, line(), prefix=prefix)
            assert_same(loaded, state(i))
            assert metadata["custom_metadata"] == {"who": prefix}
        assert_same(manager.load(path, line())[0], state(2))

    def test_saving_one_prefix_leaves_the_others(self, manager, path):
        for prefix in ("model", "opt"):
            manager.save_pytree(state(), path, prefix=prefix, extras={"who": prefix})
        before = manager.load_pytree(path, line(), prefix="opt")[1]
        manager.save_pytree({"w": jnp.ones((3, 3))}, path, prefix="model", extras={"who": "again"})
        loaded, metadata = manager.load_pytree(path, line(), prefix="opt")
        assert_same(loaded, state())
        assert metadata == before
        assert manager.load_pytree(path, line(), prefix="model")[1]["custom_metadata"] == {"who": "again"}

    def test_several_prefixes_and_none_said_is_an_error_that_lists_them(self, manager, path):
        for prefix in ("model", "opt"):
            manager.save(state(), path, prefix=prefix)
        for call in (lambda: manager.load(path, line()), lambda: manager.load_tree_parallel(path)):
            with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
                call()
        with pytest.raises(ValueError, match=r"no prefix 'zzz'.*\['model', 'opt'\]"):
            manager.load(path, line(), prefix="zzz")

    def test_prefixes_that_begin_alike_do_not_meet(self, manager, path):
        prefixes = ("m", "m.b", "m/b", "m.b.c")
        for i, prefix in enumerate(prefixes):
            manager.save_pytree({"b": jnp.full(2, i), "w": {"b": jnp.full(3, i)}}, path, prefix=prefix)
        for i, prefix in enumerate(prefixes):
            loaded, _ = manager.load_pytree(path, line(), prefix=prefix)
            assert_same(loaded, {"b": jnp.full(2, i), "w": {"b": jnp.full(3, i)}})

    def test_hostile_prefixes_stay_inside(self, manager, path):
        prefixes = [
            "..",
            "../up",
            "../../escape",
            "/abs",
            ".",
            "a/b",
            ".hidden",
            "%",
            "é",
            "manifest",
            "model",
        ]
        for i, prefix in enumerate(prefixes):
            manager.save({"w": jnp.full(2, i)}, path, prefix=prefix)
        for i, prefix in enumerate(prefixes):
            assert_same(manager.load(path, line(), prefix=prefix)[0], {"w": jnp.full(2, i)})
        outside = [p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)]
        assert outside == [path.parent]

    def test_eight_threads_may_save_eight_prefixes_to_one_directory(self, manager, path):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: manager.save(state(i), path, prefix=f"p{i}"), range(8)))
        for i in range(8):
            assert_same(manager.load(path, line(), prefix=f"p{i}")[0], state(i))

    def test_eight_managers_may_save_eight_pytrees_to_one_directory(self, path):
        with ThreadPoolExecutor(8) as pool:
            save = lambda i: self.make().save_pytree(state(i), path, prefix=f"p{i}", extras={"i": i})  # noqa: E731
            list(pool.map(save, range(8)))
        for i in range(8):
            loaded, metadata = self.make().load_pytree(path, line(), prefix=f"p{i}")
            assert_same(loaded, state(i))
            assert metadata["custom_metadata"] == {"i": i}

    def test_several_saves_may_be_under_way_at_once(self, manager, path):
        pending = [manager.save_async(state(i), path, prefix=f"p{i}") for i in range(6)]
        manager.wait_until_finished()
        assert all(p.done() and p.result() == str(path) for p in pending)
        for i in range(6):
            assert_same(manager.load(path, line(), prefix=f"p{i}")[0], state(i))


class TestTensorStore(TensorStore, SeveralPrefixes):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, SeveralPrefixes):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, SeveralPrefixes):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, OnePrefix):
    pass
