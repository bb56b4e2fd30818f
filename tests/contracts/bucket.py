"""What every bucket does: the promises of a store, and all those of a checkpoint on top of it.

A server inherits these classes and has a fixture `url`: a directory in a bucket that nobody else uses.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import numpy as np
import pytest

from contracts.checkpoint import CheckpointContract, DirectoryContract
from contracts.store import OTHER, ROOT, SAVE, SweptContract
from eformer import checkpoint
from eformer._engine.record.manifest import Manifest, TreeEntry
from eformer._engine.stores import leases
from eformer._engine.stores.base import Replaced, SwapError, publish
from eformer._engine.stores.bucket import BucketUpload
from eformer._engine.stores.checkpoints import has_unfinished
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import LeaseLostError
from support.buckets import forget, objects, overwrite
from support.buckets import leases as leases_of
from support.commits import One, die_before_the_swap
from support.trees import HOSTILE, assert_same

SWEEPER = "5555555555555555"


def manifest_of(*save_ids):
    """A manifest that names the directories of these saves."""
    trees = {
        save_id: TreeEntry(
            save_id=save_id, saved_at="", written_by="", block=1, files=(), raw_root=f"tree.{save_id}"
        )
        for save_id in save_ids
    }
    return Manifest(format="tensorstore", trees=trees)


class BucketStoreContract(SweptContract):
    """Of the store alone."""

    hides_new_files = False

    @pytest.fixture(autouse=True)
    def _keep(self, monkeypatch):
        self.patch = monkeypatch

    @pytest.fixture
    def store(self, url):
        return store_at(url)

    def held(self, store):
        """SeaweedFS lists directories for a while that are empty."""
        kinds = store.kinds()
        return {name: kind for name, kind in kinds.items() if kind == "file" or store.sizes(name, 99)}

    def kill(self, upload):
        """Its lease has run out."""
        super().kill(upload)
        self.patch.setattr(leases, "LEASE", -2.0)  # whole seconds are all that servers tell

    def sweep(self, store, committed):
        manifest = manifest_of(*committed)
        with closing(store.begin(save_id=SWEEPER)) as upload:
            upload.commit(One(save_id=SWEEPER, before=manifest, after=manifest, sweeps=True))

    def test_what_is_replaced_goes_when_the_save_is_finished(self, store):
        old = self.publish(store, {"a/0": b"1"})
        with closing(store.begin(f"tree.{OTHER}", save_id=OTHER)) as upload:
            upload.put([("a/0", b"2")])
            before, after = manifest_of(SAVE), manifest_of(OTHER)
            replaced = [Replaced(old, SAVE)]
            upload.commit(
                One({"": f"tree.{OTHER}"}, OTHER, replaced=replaced, before=before, after=after, sweeps=True)
            )
        assert store.exists(f"{old}/a/0")  # readers may still need it
        self.patch.setattr(leases, "LEASE", -2.0)
        self.sweep(store, {OTHER})
        assert self.held(store) == {f"tree.{OTHER}": "directory"}
        assert not has_unfinished(store)

    def test_a_file_that_was_replaced_is_known(self, store):
        self.swap(store, "index", b"old")
        version = self.version(store, "index")
        self.swap(store, "index", b"new!", version)
        with closing(store.open(["index"], {"index": version})) as files:
            for look in (lambda: files.nbytes(0), lambda: files.read_into(0, memoryview(bytearray(3)), 0)):
                with pytest.raises(FileNotFoundError, match="replaced"):
                    look()

    def test_a_dead_save_that_was_committed_is_finished(self, store):
        self.publish(store, {"a/0": b"0"}, save_id=OTHER)
        upload = store.begin(ROOT, save_id=SAVE)
        upload.put([("a/0", b"1")])
        die_before_the_swap(upload, {"": ROOT}, before=manifest_of(OTHER), after=manifest_of(SAVE))
        self.kill(upload)
        self.sweep(store, {SAVE})
        assert self.held(store) == {ROOT: "directory"}
        assert store.read(f"{ROOT}/a/0")[0] == b"1"
        assert not has_unfinished(store)

    def test_an_index_that_another_save_has_swapped_is_not_overwritten(self, store):
        self.swap(store, "index", b"one")
        before = self.version(store, "index")
        self.swap(store, "index", b"two", before)
        for expected in (before, None):
            with pytest.raises(SwapError):
                self.swap(store, "index", b"three", expected)
        assert store.read("index")[0] == b"two"

    def test_a_save_that_was_given_up_for_dead_is_not_committed(self, store):
        upload = store.begin(ROOT, save_id=SAVE)
        upload.put([("a/0", b"1")])
        before = manifest_of(OTHER)
        self.patch.setattr(leases, "LEASE", -2.0)
        with closing(store.begin(save_id=SWEEPER)) as sweeper:
            logs = []

            def index(log):
                logs.append(log)
                return b""

            sweeper.commit(One(save_id=SWEEPER, index=index, before=before, after=before, sweeps=True))
        (log,) = logs
        assert SAVE in log.dead
        assert not store.exists(f"{ROOT}/a/0")
        after = msgspec.structs.replace(before, log=log)
        with pytest.raises(LeaseLostError, match="save again"):
            upload.commit(One({"": ROOT}, before=after, after=after))
        upload.close()

    def test_large_files_are_sent_in_parts(self, store):
        chunks = [bytes([n]) * (7 * 2**20 + 1) for n in range(5)]
        with closing(store.begin(ROOT, save_id=SAVE)) as upload:
            upload.stream("a", sum(map(len, chunks)), iter(chunks))
            upload.commit(One({"": ROOT}))
        assert store.read(f"{ROOT}/a")[0] == b"".join(chunks)

    def test_a_large_file_with_its_final_name_appears_when_it_is_published(self, store):
        chunks = [bytes([n]) * (7 * 2**20 + 1) for n in range(5)]
        for is_published in (False, True):
            with closing(store.begin()) as upload:
                upload.stream("a", sum(map(len, chunks)), iter(chunks))
                assert not store.exists("a")
                if is_published:
                    publish(upload, ["a"])
            assert store.exists("a") == is_published


class InBucket:
    """Where a layout is saved, and how its contract looks at it."""

    upload = BucketUpload
    suffix = ""

    @pytest.fixture(autouse=True)
    def _keep_url(self, url):
        self.url = url

    @pytest.fixture
    def path(self, url):
        return url + self.suffix

    @pytest.fixture
    def mapping(self, tmp_path):
        return {"mmap": True, "options": {"cache": tmp_path / "cache"}}

    def place(self, folder):
        return f"{self.url.rpartition('/')[0]}/{folder.name}/x{self.suffix}"

    def make_surroundings(self, path):
        pass

    def exists(self, path):
        return bool(objects(path))

    def listing(self, path):
        return sorted(objects(path))

    def data_file(self, path):
        self.damaged = path
        found = {key: data for key, data in objects(path).items() if not key.endswith(".json")}
        return max(found, key=lambda key: len(found[key]))

    def damage(self, file, how):
        overwrite(self.damaged, file, how)

    def name_in_errors(self, file):
        return file.rpartition("/")[2]

    too_long = ()  # names that make keys longer than servers have them

    def test_hostile_names_come_back(self, path):
        tree = {key: np.full(3, i) for i, key in enumerate(HOSTILE) if key not in self.too_long}
        save(tree, path)
        assert_same(load(path), tree)


class BucketDirectory(InBucket, DirectoryContract):
    """Safetensors files in a bucket."""


class BucketFile(InBucket, CheckpointContract):
    """One object that carries its own manifest."""

    suffix = ".safetensors"


class BucketArrays(InBucket, DirectoryContract):
    """Zarr arrays in a bucket."""

    format = "tensorstore"
    too_long = ("." * 500,)

    @pytest.mark.parametrize("name", too_long)
    def test_a_name_that_makes_too_long_a_key_is_refused(self, path, name):
        with pytest.raises(OSError, match="File name too long: at most"):
            save({name: np.ones(3)}, path)
        assert not objects(path)

    def name_in_errors(self, file):
        return "bad/0"


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
class BucketCommits:
    """Saves that meet each other."""

    def test_saves_that_commit_at_once_keep_each_others_trees(self, url, kind):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: save({"w": np.full(9, n)}, url, prefix=f"p{n}", format=kind), range(24)))
        for number in range(24):
            assert load(url, prefix=f"p{number}")["w"][0] == number
        assert checkpoint.verify(url).ok
        assert not leases_of(url)

    def test_a_name_is_never_used_twice(self, url, kind):
        before = {}
        for number in range(5):
            save({"w": np.full(9, number)}, url, format=kind)
            after = {key: data for key, data in objects(url).items() if not key.endswith(".json")}
            assert before.items() <= after.items()  # what is replaced stays for a while
            assert len(after) > len(before)
            before = after

    def test_what_is_replaced_goes_after_a_while(self, url, kind, monkeypatch):
        for number in range(3):
            save({"w": np.full(9, number)}, url, format=kind)
        once = len(objects(url))
        monkeypatch.setattr(leases, "LEASE", -2.0)
        save({"w": np.full(9, 3)}, url, format=kind)
        assert load(url)["w"][0] == 3
        assert len(objects(url)) < once

    def test_unchanged_leaves_are_used_again(self, url, kind, monkeypatch):
        monkeypatch.setattr(leases, "LEASE", -2.0)
        tree = {"base": {"w": np.arange(5000.0)}, "head": {"v": np.zeros(3)}}
        for _ in range(3):
            save(tree, url, format=kind, options=SaveOptions(reuse=True))
            tree["head"]["v"] += 1
        tree["head"]["v"] -= 1
        assert_same(load(url), tree)
        assert checkpoint.verify(url).ok

    @pytest.mark.parametrize(
        "options", [{"max_shard_bytes": 1000}, {"compression": "zstd"}, {"checksums": True}], ids=str
    )
    def test_shards_and_compressed_chunks_come_back(self, url, kind, options):
        if kind == "safetensors" and "compression" in options:
            options = {}
        for number in range(2):
            tree = {"layers": [np.arange(300.0) + number for _ in range(5)], "n": number}
            save(tree, url, format=kind, options=SaveOptions(**options))
            assert_same(load(url), tree)
            assert checkpoint.verify(url).ok

    def test_tools_read_what_is_in_a_bucket(self, url, kind):
        save({"w": np.arange(6.0), "n": 3}, url, metadata={"step": 1}, format=kind)
        save({"w": np.arange(6.0) + 1, "n": 3}, f"{url}-other", format=kind)
        with checkpoint.open(url) as view:
            assert view["w"][2:4].tolist() == [2.0, 3.0]
        assert checkpoint.inspect(url).trees[""].metadata == {"step": 1}
        assert [change.name for change in checkpoint.diff(url, f"{url}-other").changed] == ["w"]


__all__ = [
    "BucketArrays",
    "BucketCommits",
    "BucketDirectory",
    "BucketFile",
    "BucketStoreContract",
    "forget",
]
