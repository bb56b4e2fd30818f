"""A cache of objects on this machine: used by the second load, bounded, and never the reason of a wrong or failed read."""

import itertools
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
from obstore.store import MemoryStore

from contracts.bucket_cache import MIB, BucketCache, change, files, one_block, used
from contracts.bucket_cache import cache as cache
from contracts.bucket_cache import fetched as fetched
from contracts.bucket_cache import tree as tree
from eformer import checkpoint
from eformer._engine.stores import cache as caches
from eformer._engine.stores import clouds
from eformer._engine.stores.cache import BLOCK, Cache, key_of
from eformer._engine.stores.objects import Objects
from eformer.checkpoint import load, save
from eformer.errors import CorruptionError
from support.buckets import around, forget, objects, overwrite
from support.trees import assert_same

numbers = itertools.count()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Every test finds caches as a new process does."""
    caches._cache_at.cache_clear()
    monkeypatch.delenv("EFORMER_CACHE", raising=False)
    monkeypatch.delenv("EFORMER_CACHE_BYTES", raising=False)


@pytest.fixture
def url():
    found = f"memory://cache-{os.getpid()}-{next(numbers)}/x"
    yield found
    forget(found)


class TestCache(BucketCache):
    """In memory."""


# ------------------------------------------------------------------------------------------------ reading


def test_the_environment_names_the_cache_and_false_means_none(url, cache, tree, fetched, monkeypatch):
    save(tree, url)
    monkeypatch.setenv("EFORMER_CACHE", str(cache))
    load(url)
    fetched.clear()
    load(url)
    assert not fetched
    load(url, options={"cache": False})
    assert fetched


def test_a_home_directory_is_found(url, tmp_path, tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tree, url)
    load(url, options={"cache": "~/.cache/eformer"})
    assert files(tmp_path / ".cache/eformer")


def test_files_of_the_cache_are_private(url, cache, tree):
    save(tree, url)
    load(url, options={"cache": cache})
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(cache)} == {0o600}


def test_a_newer_save_is_read(url, cache, tree):
    save(tree, url)
    load(url, options={"cache": cache})
    save({**tree, "b": np.arange(1000.0) + 1}, url)
    assert_same(load(url, options={"cache": cache})["b"], np.arange(1000.0) + 1)


def test_files_of_other_programs_are_known_by_their_version(url, cache, fetched):
    st = pytest.importorskip("safetensors.numpy")
    store, start = around(url)
    store.put(start + "x/model.safetensors", st.save({"w": np.zeros(1000, np.float32)}))
    assert load(url, options={"cache": cache})["w"].sum() == 0
    fetched.clear()
    load(url, options={"cache": cache})
    assert not fetched
    store.put(start + "x/model.safetensors", st.save({"w": np.ones(1000, np.float32)}))
    assert load(url, options={"cache": cache})["w"].sum() == 1000


def test_buckets_of_the_same_url_on_other_servers_are_told_apart(cache):
    for server in ("one", "other"):
        found = Objects(MemoryStore(), "memory:/", server=server)  # each numbers versions from 0 on
        value = float(len(server))
        found.put("x/model.safetensors", safetensors.numpy.save({"w": np.full(9, value)}))
        with mock.patch.object(clouds, "_memory", return_value=found):
            assert (load("memory://x", options={"cache": cache})["w"] == value).all()


def test_only_objects_that_never_change_have_a_key():
    assert key_of("s3://b/x", "model.0123456789abcdef.safetensors", None)
    assert key_of("s3://b/x", "tree.0123456789abcdef/w/0", None)
    assert key_of("s3://b/x", "model.safetensors", '"etag"\n')
    assert key_of("s3://b/x", "model.safetensors", None) is None
    assert key_of("s3://b/x", "model.0123456789abcdef.safetensors", "\n") is None  # a server without ETags
    assert key_of("s3://b/x", "w/tree.0123456789abcdef/0", None) is None
    assert len({key_of(f"s3://b/{url}", "a", tag) for url in "xy" for tag in "12"}) == 4


def test_verify_reads_the_bucket(url, cache, tree, monkeypatch):
    save(tree, url)
    monkeypatch.setenv("EFORMER_CACHE", str(cache))
    load(url)
    data = next(key for key in objects(url) if key.endswith(".safetensors"))
    overwrite(url, data, lambda old: old.__setitem__(-1, old[-1] ^ 1))
    assert not checkpoint.verify(url).ok
    assert_same(load(url), tree)


def test_an_object_that_is_gone_is_noticed_though_it_is_cached(url, cache, tree):
    save(tree, url)
    load(url, options={"cache": cache})
    store, _ = around(url)
    store.delete([key for key in objects(url) if key.endswith(".safetensors")])
    with pytest.raises(CorruptionError, match="missing"):
        load(url, options={"cache": cache})


def test_a_run_resumes_through_the_cache(url, cache, tree, fetched):
    with checkpoint.Run(url) as run:
        run.save(1, tree)
    for _ in range(2):
        fetched.clear()
        with checkpoint.Run(url) as run:
            assert_same(run.resume(options={"cache": cache}).tree, tree)
    assert not fetched


# ------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("offset", [-1, -20, 70, 3], ids=str)
def test_damage_is_fetched_again(url, cache, tree, fetched, offset):
    save(tree, url)
    load(url, options={"cache": cache})
    change(one_block(cache), offset, b"\xa5\x5a")
    fetched.clear()
    assert_same(load(url, options={"cache": cache}, verify=False), tree)
    assert [nbytes for _, nbytes in fetched] == [BLOCK]
    fetched.clear()
    assert_same(load(url, options={"cache": cache}, verify=False), tree)
    assert not fetched


@pytest.mark.sample(3)
@pytest.mark.parametrize("left", [0, 10, 5000, MIB - 1, MIB, 2 * MIB])
def test_a_truncated_or_longer_file_is_fetched_again(url, cache, tree, fetched, left):
    save(tree, url)
    load(url, options={"cache": cache})
    os.truncate(one_block(cache), left)
    assert_same(load(url, options={"cache": cache}, verify=False), tree)
    fetched.clear()
    assert_same(load(url, options={"cache": cache}, verify=False), tree)
    assert not fetched


def test_a_block_that_is_gone_is_fetched_again(url, cache, tree, fetched):
    save(tree, url)
    load(url, options={"cache": cache})
    one_block(cache).unlink()
    fetched.clear()
    assert_same(load(url, options={"cache": cache}, verify=False), tree)
    assert fetched == [(5 * BLOCK, BLOCK)]


def test_an_object_that_arrived_damaged_does_not_stay_so(url, cache, tree, fetched):
    """Its blocks match their digests; those of the checkpoint tell."""
    save(tree, url)
    data = next(key for key in objects(url) if key.endswith(".safetensors"))
    overwrite(url, data, lambda old: old.__setitem__(-1, old[-1] ^ 1))
    with pytest.raises(CorruptionError, match="damaged"):
        load(url, options={"cache": cache})
    overwrite(url, data, lambda old: old.__setitem__(-1, old[-1] ^ 1))
    assert_same(load(url, options={"cache": cache}), tree)
    fetched.clear()
    assert_same(load(url, options={"cache": cache}), tree)
    assert not fetched


# ----------------------------------------------------------------------------------------------- problems


def warned(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_directory_that_was_removed_is_made_again(url, cache, tree, fetched):
    save(tree, url)
    load(url, options={"cache": cache})
    shutil.rmtree(cache)
    for _ in range(2):
        assert_same(load(url, options={"cache": cache}), tree)
    fetched.clear()
    assert_same(load(url, options={"cache": cache}), tree)
    assert not fetched


def test_a_directory_that_cannot_be_made_is_only_a_warning(url, tmp_path, tree, caplog):
    (tmp_path / "file").write_text("")
    save(tree, url)
    for _ in range(2):
        assert_same(load(url, options={"cache": tmp_path / "file" / "cache"}), tree)
    (warning,) = warned(caplog)
    assert "cannot be used, reading from the bucket" in warning.getMessage()


def test_a_directory_that_everybody_may_write_to_is_not_used(url, cache, tree, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    save(tree, url)
    assert_same(load(url, options={"cache": cache}), tree)
    assert "all users may write to it" in caplog.text
    assert not files(cache)


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", ["pwrite", "replace", "open"])
@pytest.mark.parametrize("problem", [(28, "No space left on device"), (30, "Read-only file system")], ids=str)
def test_a_full_or_read_only_disk_is_only_a_warning(url, cache, tree, caplog, monkeypatch, call, problem):
    save(tree, url)
    real = getattr(os, call)

    def fail(where, *arguments, **others):
        if call != "open" or str(where).startswith(str(cache)):
            raise OSError(*problem)
        return real(where, *arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert_same(load(url, options={"cache": cache}), tree)
    (warning,) = warned(caplog)
    assert problem[1] in warning.getMessage()
    caches._cache_at.cache_clear()
    assert_same(load(url, options={"cache": cache}, verify=False), tree)


def test_links_are_not_followed(url, cache, tree, tmp_path, caplog):
    save(tree, url)
    load(url, options={"cache": cache})
    (victim := tmp_path / "victim").write_bytes(b"mine")
    for path in files(cache):
        path.unlink()
        path.symlink_to(victim)
    assert_same(load(url, options={"cache": cache}), tree)
    assert victim.read_bytes() == b"mine"
    assert warned(caplog)


def test_a_file_with_a_second_name_is_replaced_and_not_written(url, cache, tree, tmp_path):
    save(tree, url)
    load(url, options={"cache": cache})
    (victim := tmp_path / "victim").write_bytes(bytes(100))
    for path in files(cache):
        path.unlink()
        os.link(victim, path)
    assert_same(load(url, options={"cache": cache}), tree)
    assert victim.read_bytes() == bytes(100)
    assert victim.stat().st_nlink == 1


def test_a_pipe_is_not_waited_for(url, cache, tree, caplog):
    save(tree, url)
    load(url, options={"cache": cache})
    for path in files(cache):
        path.unlink()
        os.mkfifo(path)
    assert_same(load(url, options={"cache": cache}), tree)
    assert "is not a file of this user" in caplog.text


# -------------------------------------------------------------------------------------------------- limit


def test_the_least_recently_used_blocks_are_removed(cache):
    store, memory = Cache(str(cache), 8 * MIB), memoryview(bytearray(2 * MIB))
    for name in "abcdef":
        store.keep(name * 40, 2 * MIB, 0, memoryview(name.encode() * (2 * MIB)))
        assert store.read("a" * 40, 0, memory, 0) == 2 * MIB  # used again and again
        assert used(cache) <= 8 * MIB
    left = [path.name[0] for path in files(cache)]
    assert (left[0], left[-1]) == ("a", "f")
    assert store.read("b" * 40, 0, memory, 0) is None


def test_files_that_dead_processes_have_left_are_removed_like_others(cache):
    store = Cache(str(cache), 8 * MIB)
    store.keep("a" * 40, MIB, 0, memoryview(bytes(MIB)))
    scratch, foreign = cache / "a.0.0123456789abcdef.block", cache / "mine"
    for path in (scratch, foreign):
        path.write_bytes(bytes(12 * MIB))
        os.utime(path, (0, 0))
    store.trim()
    assert not scratch.exists()
    assert foreign.exists()


def test_an_object_that_is_larger_than_the_cache_is_left_out(url, cache, tree, monkeypatch):
    monkeypatch.setenv("EFORMER_CACHE_BYTES", str(MIB))
    save(tree, url)
    assert_same(load(url, options={"cache": cache}), tree)
    assert used(cache) <= MIB


def test_a_limit_that_is_no_number_is_refused(url, cache, tree, monkeypatch):
    monkeypatch.setenv("EFORMER_CACHE_BYTES", "10GB")
    with pytest.raises(ValueError, match="EFORMER_CACHE_BYTES is '10GB', expected a number of bytes"):
        load(url, options={"cache": cache})


def test_readers_go_on_when_their_object_is_removed(url, cache, tree):
    save(tree, url)
    mapped = load(url, options={"cache": cache}, mmap=True)
    with checkpoint.open(url, cache=cache) as view:
        for path in files(cache):
            path.unlink()
        assert_same(view["w"][...], tree["w"])
    assert_same(mapped, tree)


# --------------------------------------------------------------------------------------------------- mmap


def test_a_map_needs_a_cache(url, tree):
    save(tree, url)
    with pytest.raises(ValueError, match=r"which mmap=True needs; pass options=.* or set EFORMER_CACHE"):
        load(url, mmap=True)


def test_an_object_is_checked_before_it_is_first_mapped(url, cache, tree):
    save(tree, url)
    load(url, options={"cache": cache})
    change(one_block(cache), -1, b"\xa5")
    assert_same(load(url, options={"cache": cache}, mmap=True), tree)


def joined(cache):
    (found,) = cache.glob("*.whole.block")
    return found


@pytest.mark.parametrize("left", [0, 10, 5000, 2 * MIB + 17])
def test_a_truncated_file_is_not_mapped(url, cache, tree, left):
    """The process would die when it reads behind the end."""
    save(tree, url)
    load(url, options={"cache": cache}, mmap=True)
    os.truncate(joined(cache), left)
    assert_same(load(url, options={"cache": cache}, mmap=True), tree)


def test_an_object_that_the_disk_has_no_space_for_is_read_instead_of_mapped(url, cache, tree, monkeypatch):
    save(tree, url)
    pwrite = os.pwrite

    def fail(descriptor, data, offset):
        if len(data) > 2**16:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    assert_same(load(url, options={"cache": cache}, mmap=True), tree)


def test_a_verified_map_repairs_the_cache(url, cache, tree):
    save(tree, url)
    load(url, options={"cache": cache}, mmap=True)
    change(joined(cache), -1, b"\xa5")
    assert_same(load(url, options={"cache": cache}, mmap=True, verify=True), tree)
    assert_same(load(url, options={"cache": cache}, mmap=True), tree)


# --------------------------------------------------------------------------------------------- processes


FILL = """
import sys
import numpy as np
from eformer._engine.stores.cache import BLOCK, Cache, CachedFiles

data = np.random.default_rng(0).bytes(24 * BLOCK + 1000)


class Source:
    def fetch(self, number, offset, nbytes):
        return data[offset : offset + nbytes], len(data)


files = CachedFiles(Source(), Cache(sys.argv[1], 200 * BLOCK), "s3://b/x", ["w.0123456789abcdef"], {})
random = np.random.default_rng(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(200):
    start = int(random.integers(len(data)))
    memory = bytearray(int(random.integers(1, 3 * BLOCK)))
    assert files.read_into(0, memoryview(memory), start) == min(len(memory), len(data) - start)
    assert data[start : start + len(memory)] == memory[: len(data) - start]
"""


def test_two_processes_fill_the_cache_at_once(cache):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(cache), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == b"ready\n"
    for process in both:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert len(files(Path(cache))) == 25
