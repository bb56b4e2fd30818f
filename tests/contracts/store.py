"""What every store does, and its uploads: the promises that a checkpoint is built on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from eformer._engine.stores.base import Entry, Replaced, read_whole, update_file
from eformer._engine.stores.checkpoints import has_unfinished
from eformer.errors import FormatError
from support.commits import SAVE, One, die_before_the_swap

OTHER = "fedcba9876543210"
ROOT = f"tree.{SAVE}"

OUTSIDE = ["../x", "/etc/passwd", "a/../../x", "", ".", "..", "a//b", "a\0b"]


class StoreContract:
    """A store says how to make one."""

    @pytest.fixture
    def store(self, tmp_path):
        raise NotImplementedError

    hides_new_files = True  # a store that cannot rename has them under names that no index has

    def held(self, store):
        """What is in a store, by name."""
        return store.kinds()

    # ------------------------------------------------------------------------------------------ helpers

    def publish(self, store, files, *, save_id=SAVE, replaced=()):
        """One save, from its beginning to its commit, of files in a directory of their own."""
        root = f"tree.{save_id}"
        with closing(store.begin(root, save_id=save_id)) as upload:
            upload.put(sorted(files.items()))
            upload.sync()
            upload.commit(One({"": root}, save_id, replaced=replaced))
        return root

    def write(self, upload, name, data):
        """Writes a large file as the upload takes it: by many threads, last part first, or from its beginning."""
        parts = [(start, data[start : start + 1000]) for start in range(0, len(data), 1000)]
        if upload.takes == "streams":
            upload.stream(name, len(data), (part for _, part in parts))
            return
        sink = upload.create(name, len(data))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda part: sink.write(part[1], part[0]), reversed(parts)))
        sink.close()

    def swap(self, store, name, data, expected=None):
        with closing(store.begin()) as upload:
            upload.swap(name, data, expected)

    def version(self, store, name):
        return store.read(name, 0, 0)[1].version

    # --------------------------------------------------------------------------------------------- read

    def test_a_place_that_is_not_there_holds_nothing(self, store):
        empty = store.at("nowhere")
        with pytest.raises(FileNotFoundError):
            empty.kinds()
        with pytest.raises(FileNotFoundError):
            empty.read("x")
        assert not empty.exists("x")

    def test_published_files_are_there(self, store):
        root = self.publish(store, {"a/.zarray": b"{}", "a/0": b"12345", "b/c/0": b"", "b/c/1/2": b"6"})
        assert store.kinds() == {root: "directory"}
        assert store.kinds(f"{root}/a") == {".zarray": "file", "0": "file"}
        assert store.at(root).kinds("b") == {"c": "directory"}
        assert store.sizes(f"{root}/a") == {".zarray": 2, "0": 5}
        assert store.sizes(f"{root}/b/c") == {"0": 0}
        assert store.sizes(f"{root}/b/c", 2) == {"0": 0, "1/2": 1}
        assert store.exists(f"{root}/a/0")
        assert not store.exists(f"{root}/a/1")

    def test_ranges_are_read_with_the_length_and_the_version_of_the_file(self, store):
        name = f"{self.publish(store, {'a/0': b'0123456789'})}/a/0"
        data, entry = store.read(name)
        assert (data, entry.name, entry.nbytes) == (b"0123456789", name, 10)
        assert store.read(name, 3, 4) == (b"3456", entry)
        assert store.read(name, 8, 100) == (b"89", entry)
        assert store.read(name, 0, 0) == (b"", entry)
        assert store.read(name, 10, 100) == store.read(name, 11, 100) == (b"", entry)
        assert read_whole(store, name, 10) == (data, entry)
        with pytest.raises(FormatError, match="10 bytes long"):
            read_whole(store, name, 9)

    def test_files_are_read_by_number(self, store):
        root = self.publish(store, {"a/0": b"0123456789", "a/1": b"abc"})
        with closing(store.open([f"{root}/a/1", f"{root}/a/0"])) as files:
            assert [files.nbytes(0), files.nbytes(1)] == [3, 10]
            memory = bytearray(4)
            assert files.read_into(1, memoryview(memory), 2) == 4
            assert bytes(memory) == b"2345"
            assert files.read_into(0, memoryview(memory), 1) == 2
            assert bytes(memory[:2]) == b"bc"

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_a_name_that_leads_out_is_refused(self, store, name):
        self.publish(store, {"a/0": b"1"})
        with pytest.raises(FormatError, match="is not the name of a file"):
            store.read(name)
        with (
            pytest.raises(FormatError, match="is not the name of a file"),
            closing(store.open([name])) as files,
        ):
            files.nbytes(0)

    def test_a_file_that_was_replaced_is_known(self, store):
        self.swap(store, "index", b"old")
        version = self.version(store, "index")
        with closing(store.open(["index"], {"index": version})) as held:
            held.hold([0])
            self.swap(store, "index", b"new!", version)
            assert held.nbytes(0) == 3
        assert self.version(store, "index") != version
        with (
            closing(store.open(["index"], {"index": version})) as files,
            pytest.raises(FileNotFoundError, match="replaced"),
        ):
            files.nbytes(0)

    # -------------------------------------------------------------------------------------------- write

    def test_nobody_sees_a_file_before_it_is_published_and_everybody_after(self, store):
        upload = store.begin(ROOT, save_id=SAVE)
        upload.put([("a/0", b"1")])
        self.write(upload, "b/0", b"123")
        upload.sync()
        assert upload.names() == ["a", "b"]
        assert store.exists(f"{ROOT}/a/0") != self.hides_new_files
        seen = []
        upload.commit(
            One({"": ROOT}, while_committing=lambda place: seen.append(place.read(f"{ROOT}/b/0")[0]))
        )
        assert seen == [b"123"]
        upload.close()
        assert store.read(f"{ROOT}/a/0")[0] == b"1"
        assert not has_unfinished(store)

    def test_an_upload_that_is_not_published_leaves_nothing(self, store):
        self.publish(store, {"a/0": b"1"}, save_id=OTHER)
        before = self.held(store)
        with closing(store.begin(ROOT, save_id=SAVE)) as upload:
            upload.put([("a/0", b"1"), ("b", b"2")])
            if upload.takes == "ranges":
                upload.create("c", 5).write(b"12345", 0)
        assert self.held(store) == before
        assert not has_unfinished(store)

    def test_a_large_file_is_written_in_parts(self, store):
        with closing(store.begin(ROOT, save_id=SAVE)) as upload:
            self.write(upload, "a/0", b"".join(bytes([n]) * 1000 for n in range(64)))
            upload.sync()
            upload.commit(One({"": ROOT}))
        assert store.read(f"{ROOT}/a/0")[0] == b"".join(bytes([n]) * 1000 for n in range(64))

    def test_what_is_published_and_not_committed_is_gone(self, store):
        with closing(store.begin(ROOT, save_id=SAVE)) as upload:
            upload.put(
                [("a/.zarray", b'{"shape":[1],"chunks":[1],"eformer":"%s"}' % SAVE.encode()), ("a/0", b"1")]
            )
            upload.sync()
            with pytest.raises(ZeroDivisionError):
                upload.commit(One({"": ROOT}, index=lambda _: 1 / 0))
        assert not store.exists(f"{ROOT}/a/0")

    def test_a_file_is_linked_only_if_it_is_the_one_that_was_looked_at(self, store):
        name = f"{self.publish(store, {'a/0': b'12345'})}/a/0"
        entry = store.read(name)[1]
        other = f"tree.{OTHER}"
        with closing(store.begin(other, save_id=OTHER)) as upload:
            assert upload.link("b/0", store, entry)
            assert not upload.link("b/1", store, Entry(name, 5, "1-2-3-4/5"))
            upload.sync()
            upload.commit(One({"": other}, OTHER))
        assert store.kinds(f"{other}/b") == {"0": "file"}
        assert store.read(f"{other}/b/0")[0] == b"12345"

    # ------------------------------------------------------------------------------------------- commit

    def test_an_index_is_swapped_as_a_whole(self, store):
        self.swap(store, "index", b"one")
        self.swap(store, "index", b"three", self.version(store, "index"))
        assert store.read("index")[0] == b"three"
        assert store.kinds() == {"index": "file"}

    def test_saves_that_swap_at_once_lose_none_of_each_others_work(self, store):
        self.swap(store, "index", b"")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: update_file(store, "index", lambda data: data + bytes([n])), range(40)))
        assert sorted(store.read("index")[0]) == list(range(40))

    def test_files_are_removed_by_name(self, store):
        self.swap(store, "a", b"1")
        self.swap(store, "b", b"2")
        with closing(store.begin()) as upload:
            upload.remove(["a", "gone"])
        assert store.kinds() == {"b": "file"}

    def test_what_is_replaced_goes_when_the_save_is_finished(self, store):
        described = b'{"shape":[1],"chunks":[1],"eformer":"%s"}' % SAVE.encode()
        old = self.publish(store, {"a/.zarray": described, "a/0": b"1"})
        new = self.publish(store, {"a/0": b"2"}, save_id=OTHER, replaced=[Replaced(old, SAVE)])
        assert store.kinds() == {new: "directory"}


class SweptContract(StoreContract):
    """What a store also does whose uploads can die and leave something. It says what a process leaves that is killed."""

    def sweep(self, store, committed):
        """Removes what dead saves have left."""
        with closing(store.begin()) as upload:
            upload.commit(One(save_ids=committed, sweeps=True))

    def kill(self, upload):
        """Lets go of an upload as a process does that dies."""
        upload.abandon()

    def dead(self, store, replaced=()):
        """An upload that was published, and whose process died before it was finished."""
        upload = store.begin(ROOT, save_id=SAVE)
        upload.put(
            [("a/.zarray", b'{"shape":[1],"chunks":[1],"eformer":"%s"}' % SAVE.encode()), ("a/0", b"1")]
        )
        upload.sync()
        die_before_the_swap(upload, {"": ROOT}, replaced=replaced)
        self.kill(upload)

    def test_a_dead_save_that_was_not_committed_is_undone(self, store):
        self.dead(store)
        assert has_unfinished(store)
        self.sweep(store, set())
        assert not store.exists(f"{ROOT}/a/0")
        assert not has_unfinished(store)

    def test_a_dead_save_that_was_committed_is_finished(self, store):
        described = b'{"shape":[1],"chunks":[1],"eformer":"%s"}' % OTHER.encode()
        old = self.publish(store, {"a/.zarray": described, "a/0": b"0"}, save_id=OTHER)
        self.dead(store, [Replaced(old, OTHER)])
        self.sweep(store, {SAVE})
        assert store.kinds() == {ROOT: "directory"}
        assert store.read(f"{ROOT}/a/0")[0] == b"1"

    def test_without_knowing_what_was_committed_nothing_published_is_touched(self, store):
        self.dead(store)
        with closing(store.begin()) as upload:
            upload.commit(One(save_ids=None, sweeps=True))
        assert store.read(f"{ROOT}/a/0")[0] == b"1"

    def test_an_upload_that_is_alive_is_not_swept(self, store):
        with closing(store.begin(ROOT, save_id=SAVE)) as alive:
            alive.put([("a/0", b"1")])
            alive.sync()
            die_before_the_swap(alive, {"": ROOT})
            self.sweep(store, set())
            assert store.read(f"{ROOT}/a/0")[0] == b"1"
