"""Copies of the parts of another process: what a process makes of the answers, also of false ones."""

import logging
import os
import threading
import time
from contextlib import ExitStack, closing

import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.processes.lines import Door, dial
from eformer._engine.record.manifest import Manifest
from eformer._engine.runs import copies
from eformer._engine.runs.copies import Follower, Shelf
from eformer._engine.runs.near_parts import GIVEN, GONE, NearPart, NearStep, ReadRange, RemoteFiles
from eformer._engine.stores import new_files
from support.links import contents

EPOCH = "0123456789abcdef"
PART = NearPart(NearStep(3, EPOCH), 0, 2)
PLACE = f"process-0/{EPOCH}/step-3"
COPY = f"process-1/of-process-0/{EPOCH}/step-3"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(copies, "_PAUSE", 0.05)


@pytest.fixture
def owner(tmp_path):
    """The near directory of the owner, with a part."""
    near = tmp_path / "owner"
    checkpoint.save({"w": np.arange(3_000_000.0), "n": 1}, near / PLACE)
    return near


@pytest.fixture
def shelf(owner):
    shelf = Shelf(owner)
    shelf.put(PART, PLACE, is_new=True)
    yield shelf
    shelf.close()


@pytest.fixture
def dialled(shelf):
    """Dial the door of the owner; the lines are closed at the end."""
    with Door("127.0.0.1", shelf.serve) as door, ExitStack() as lines:
        yield lambda: lines.enter_context(closing(dial(door.address)))


@pytest.fixture
def holder(tmp_path):
    return tmp_path / "holder"


def wait_until(is_so):
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def has_no_file(directory):
    return not any(path.is_file() for path in directory.rglob("*"))


class Followed:
    """A follower of a door, and what it has copied."""

    def __init__(self, serve, holder):
        self.copied, self.has_copied = [], threading.Event()
        self.door = Door("127.0.0.1", serve)
        self.follower = Follower(
            0, self.door.address, holder, "process-1/of-process-0", lambda: None, self.note
        )

    def note(self, part, place):
        self.copied.append((part, place))
        self.has_copied.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.door.close()
        self.follower.close()


def bytes_in(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_part_is_copied_byte_by_byte(owner, shelf, holder):
    with Followed(shelf.serve, holder) as followed:
        assert followed.has_copied.wait(30)
    assert followed.copied == [(PART, COPY)]
    assert bytes_in(holder / COPY) == bytes_in(owner / PLACE)
    assert checkpoint.verify(holder / COPY).ok


def test_a_newer_part_is_copied_as_soon_as_it_is_there(owner, shelf, holder):
    with Followed(shelf.serve, holder) as followed:
        assert followed.has_copied.wait(30)
        followed.has_copied.clear()
        checkpoint.save({"w": np.ones(3)}, owner / f"process-0/{EPOCH}/step-6")
        shelf.put(NearPart(NearStep(6, EPOCH), 0, 2), f"process-0/{EPOCH}/step-6", is_new=True)
        assert followed.has_copied.wait(30)
    assert [part.step.number for part, _ in followed.copied] == [3, 6]


def test_a_part_that_is_removed_while_it_is_read_stays_readable(owner, dialled):
    files = RemoteFiles(dialled(), PART, 5)
    data = (owner / PLACE / "model.safetensors").read_bytes()
    for file in (owner / PLACE).iterdir():
        file.unlink()
    memory = bytearray(len(data))
    assert files.read_into("model.safetensors", memoryview(memory), 0) == len(data)
    assert memory == data


@pytest.mark.parametrize(
    "part",
    [NearPart(NearStep(4, EPOCH), 0, 2), NearPart(NearStep(3, ""), 0, 2), NearPart(NearStep(3, EPOCH), 9, 2)],
)
def test_a_part_that_is_not_on_the_shelf_cannot_be_read(dialled, part):
    with pytest.raises(FileNotFoundError):
        RemoteFiles(dialled(), part, 5)


def test_nothing_is_read_through_links(owner, dialled, tmp_path):
    (tmp_path / "secret").write_text("x")
    (owner / PLACE / "linked").symlink_to(tmp_path / "secret")
    assert "linked" not in RemoteFiles(dialled(), PART, 5).sizes
    (owner / PLACE).rename(tmp_path / "moved")
    (owner / PLACE).symlink_to(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        RemoteFiles(dialled(), PART, 5)


SENSELESS = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "too many bytes": bytes(5000),
    "a read before a part is open": msgspec.msgpack.encode(ReadRange(0, 0, 1)),
    "a path": msgspec.msgpack.encode({"type": "open", "part": [[3, "../../etc"], 0, 2]}),
    "a negative step": msgspec.msgpack.encode({"type": "open", "part": [[-3, EPOCH], 0, 2]}),
    "a terabyte": msgspec.msgpack.encode({"type": "read", "file": 0, "offset": 0, "nbytes": 2**40}),
    "another verb": msgspec.msgpack.encode({"type": "remove"}),
}


@pytest.mark.parametrize("data", SENSELESS.values(), ids=SENSELESS)
def test_a_request_that_makes_no_sense_ends_the_line_alone(dialled, data):
    line = dialled()
    line.send(data)
    with pytest.raises(ConnectionError):
        line.receive(100, 5)
    assert RemoteFiles(dialled(), PART, 5).sizes


def test_requests_of_random_bytes_never_crash_or_write(owner, dialled):
    before = contents(owner)
    for _ in range(100):
        line = dialled()
        line.send(os.urandom(40))
        line.close()
    assert RemoteFiles(dialled(), PART, 5).sizes
    assert contents(owner) == before


# ------------------------------------------------------------------------------------- a false owner


def false_owner(answers):
    """An owner that has the secret, and gives these answers: to the question for news, for files, and for bytes."""

    def serve(line):
        while True:
            kind = msgspec.msgpack.decode(line.receive(2**12))["type"]
            line.send(answers[kind])

    return serve


def listed(*files):
    return GIVEN + msgspec.msgpack.encode(list(files))


NEWS = GIVEN + msgspec.msgpack.encode(PART)
FALSE = {
    "no message": {"newest": b""},
    "no part": {"newest": GIVEN + b"\xc1"},
    "a part of another process": {"newest": GIVEN + msgspec.msgpack.encode(NearPart(PART.step, 1, 2))},
    "an epoch with slashes": {"newest": GIVEN + msgspec.msgpack.encode([[3, "../../../../tmp"], 0, 2])},
    "a negative number": {"newest": GIVEN + msgspec.msgpack.encode([[-3, EPOCH], 0, 2])},
    "no list of files": {"newest": NEWS, "open": GIVEN + b"\xc1"},
    "a manifest of a terabyte": {"newest": NEWS, "open": listed(("manifest.json", 2**40))},
    "a manifest of garbage": {"newest": NEWS, "open": listed(("manifest.json", 2)), "read": b"{}"},
    "more bytes than asked for": {"newest": NEWS, "open": listed(("manifest.json", 2)), "read": bytes(100)},
}


@pytest.mark.parametrize("answers", FALSE.values(), ids=FALSE)
def test_answers_that_make_no_sense_leave_nothing_behind(answers, holder, caplog):
    with caplog.at_level(logging.WARNING), Followed(false_owner(answers), holder):
        wait_until(lambda: caplog.records)
    assert has_no_file(holder)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", "manifest.json", "..", ".", "gone"])
def test_a_manifest_that_names_another_file_is_refused(owner, holder, name, caplog):
    """A false owner, whose manifest is valid in itself."""
    manifest = Manifest.from_json((owner / PLACE / "manifest.json").read_bytes(), "it")
    tree = manifest.trees[""]
    files = (msgspec.structs.replace(tree.files[0], name=name),)
    data = manifest.with_tree("", msgspec.structs.replace(tree, files=files)).to_json()
    sizes = listed(("manifest.json", len(data)), (name, tree.files[0].nbytes))[1:] if name != "gone" else None
    answers = {
        "newest": NEWS,
        "open": GIVEN + sizes if sizes else listed(("manifest.json", len(data))),
        "read": data,
    }
    with caplog.at_level(logging.WARNING), Followed(false_owner(answers), holder):
        wait_until(lambda: caplog.records)
    assert has_no_file(holder)
    assert not any(path.name == "evil" for path in holder.parent.rglob("*"))


def test_bytes_that_do_not_match_their_digests_are_refused(owner, shelf, holder, caplog):
    file = owner / PLACE / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING), Followed(shelf.serve, holder) as followed:
        wait_until(lambda: caplog.records)
    assert "near steps of process 0 are not copied here at present: leaf 'w'" in caplog.text
    assert not followed.copied
    assert has_no_file(holder)


def test_an_owner_that_never_answers_does_not_keep_the_follower_from_ending(holder):
    with Followed(lambda _: time.sleep(100), holder) as followed:
        wait_until(lambda: followed.follower._line)
    assert not followed.follower._thread.is_alive()


def test_an_owner_that_is_gone_is_asked_again(owner, shelf, holder, caplog):
    is_away = threading.Event()
    is_away.set()

    def serve(line):
        if not is_away.is_set():
            shelf.serve(line)

    with caplog.at_level(logging.INFO), Followed(serve, holder) as followed:
        wait_until(lambda: caplog.records)
        is_away.clear()
        assert followed.has_copied.wait(30)
    assert "near steps of process 0 are copied here, 24 MB each" in caplog.text


def test_a_part_is_not_begun_without_room_for_it(shelf, holder, monkeypatch, caplog):
    monkeypatch.setattr(new_files, "_free_bytes", lambda _: 10**6)
    with caplog.at_level(logging.WARNING), Followed(shelf.serve, holder):
        wait_until(lambda: caplog.records)
    assert "a copy of a part writes 24 MB, and 1 MB are free" in caplog.text
    assert has_no_file(holder)


def test_copies_are_not_written_through_links(shelf, holder, tmp_path, caplog):
    outside = tmp_path / "outside"
    outside.mkdir()
    holder.mkdir()
    (holder / "process-1").symlink_to(outside)
    with caplog.at_level(logging.WARNING), Followed(shelf.serve, holder):
        wait_until(lambda: caplog.records)
    assert contents(outside) == {}


def test_an_answer_that_the_part_is_gone_is_no_failure(holder, caplog):
    asked = threading.Event()

    def serve(line):
        for answer in (NEWS, GONE):
            line.receive(2**12)
            line.send(answer)
        line.receive(2**12)
        asked.set()
        line.receive(2**12)  # the door is closed meanwhile

    with caplog.at_level(logging.WARNING), Followed(serve, holder):
        assert asked.wait(30)
        assert not caplog.records


@pytest.mark.thorough
def test_a_process_that_saves_faster_than_it_is_copied_is_named(owner, shelf, holder, caplog):
    def save_another(step=[3]):  # noqa: B006
        step[0] += 3
        checkpoint.save({"w": np.ones(step[0])}, owner / f"process-0/{EPOCH}/step-{step[0]}")
        shelf.put(NearPart(NearStep(step[0], EPOCH), 0, 2), f"process-0/{EPOCH}/step-{step[0]}", is_new=True)

    with caplog.at_level(logging.WARNING), Followed(shelf.serve, holder) as followed:
        note = followed.note
        followed.follower._on_copied = lambda *given: (save_another(), note(*given))
        wait_until(lambda: "process 0 saves near steps faster than they are copied" in caplog.text)
