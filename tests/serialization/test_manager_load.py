"""What a manager loads: where nothing is, what callbacks get, how it is cast, and how much at a time."""

import gc
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eformer.serialization.async_manager import AsyncCheckpointManager
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import line, on
from support.states import is_floating, state
from support.trees import assert_same

Manager = AsyncCheckpointManager


class Loads(Backend):
    """What a load returns, and what it calls meanwhile."""

    def test_nothing_there_is_file_not_found(self, manager, path):
        def refused(where):
            for call in (
                lambda: manager.load(where, line()),
                lambda: manager.load_pytree(where, line(), prefix="m"),
                lambda: manager.load_tree_parallel(where),
            ):
                with pytest.raises(FileNotFoundError, match=re.escape(str(where))):
                    call()

        refused(path)
        path.mkdir(parents=True)
        refused(path)
        (path / "notes.txt").write_text("nothing to see")
        (path / "more").mkdir()
        refused(path)

    def test_a_directory_of_checkpoints_is_no_checkpoint(self, manager, path):
        for name in ("1", "2"):
            manager.save({"w": jnp.ones(2)}, path.parent / name / self.name)
        for mesh in (None, line()):
            with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
                manager.load(path.parent, mesh)
        assert not Manager.is_tensorstore(path.parent)

    def test_the_callback_replaces_arrays_by_key(self, manager, path):
        manager.save(
            {"a": {"w": jnp.ones(3)}, "b": [jnp.ones(2)], "a.c": jnp.zeros(1), "n": 3}, path, prefix="m"
        )
        loaded, _ = manager.load(path, line(), callback=lambda x, key: (key, x.shape))
        assert loaded == {"a": {"w": ("a.w", (3,))}, "b": [("b.0", (2,))], "a.c": ("a.c", (1,)), "n": 3}
        assert manager.load_tree_parallel(path, callback=lambda x, key: key)[0]["b"] == ["b.0"]
        assert manager.load_pytree(path, line(), prefix="m", callback=lambda x, key: key)[0]["b"] == ["b.0"]

    def test_the_callback_gets_the_array_as_it_will_be(self, manager, path):
        manager.save({"w": jnp.ones((8, 8))}, path)
        seen = []
        manager.load(
            path,
            line(),
            {"w": P("model")},
            dtype="bf16",
            callback=lambda x, _: seen.append((x.sharding, x.dtype)),
        )
        assert seen == [(on(line(), "model"), jnp.bfloat16)]

    def test_an_error_of_the_callers_function_is_the_callers(self, manager, path):
        manager.save({"w": jnp.ones(3)}, path)

        def broken(*_):
            raise FileNotFoundError("mine")

        for arguments in ({"callback": broken}, {"shardings": {"w": broken}}):
            with pytest.raises(FileNotFoundError, match=r"^mine$"):
                manager.load(path, line(), **arguments)

    @pytest.mark.parametrize("dtype", ["bf16", jnp.float16, "float8_e4m3fn"], ids=str)
    def test_a_dtype_casts_floats_alone_on_load(self, manager, path, dtype):
        manager.save(state(), path, prefix="m")
        kind = jnp.bfloat16 if dtype == "bf16" else jnp.dtype(dtype)
        expected = jax.tree.map(
            lambda x: x.astype(kind) if hasattr(x, "dtype") and is_floating(x) else x, state()
        )
        for loaded, _ in (
            manager.load(path, line(), dtype=dtype),
            manager.load_tree_parallel(path, dtype=dtype),
            manager.load_pytree(path, line(), prefix="m", dtype=dtype),
        ):
            assert_same(loaded, expected)

    @pytest.mark.parametrize("arguments", [{"use_async": False}, {"chunk_size": 1}, {"chunk_size": 3}])
    def test_what_is_read_at_a_time_is_bounded(self, manager, path, arguments):
        manager.save([jnp.full(100, i) for i in range(9)], path)
        gc.collect()  # arrays of earlier tests do not go meanwhile
        before, seen = len(jax.live_arrays()), []
        most = arguments.get("chunk_size", 1)
        loaded, _ = manager.load(
            path, line(), callback=lambda x, key: seen.append(len(jax.live_arrays()) - before), **arguments
        )
        assert loaded == [None] * 9
        assert max(seen) <= most
        seen.clear()
        manager.load(path, line(), callback=lambda x, key: seen.append(len(jax.live_arrays()) - before))
        assert max(seen) == 9

    def test_a_sequential_load_is_the_same(self, manager, path):
        manager.save(state(), path)
        assert_same(manager.load(path, line(), use_async=False)[0], state())

    def test_a_negative_chunk_size_is_refused(self, manager, path):
        manager.save(state(), path, prefix="m")
        for call in (
            lambda: manager.load(path, line(), chunk_size=-1),
            lambda: manager.load_pytree(path, line(), prefix="m", chunk_size=-1),
        ):
            with pytest.raises(ValueError, match="-1"):
                call()


class TestTensorStore(TensorStore, Loads):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Loads):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Loads):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Loads):
    pass
