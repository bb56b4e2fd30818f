"""Hostile files of PyTorch run nothing, take no memory that they do not have, and are refused by name."""

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import EformerError, FormatError
from support.torch_files import archive, tensor

pytestmark = pytest.mark.sample(2)

HERE = Path(__file__).parent / "torch"


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("inside", [True, False], ids=["in a dict", "alone"])
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, protocol, inside):
    sentinel = tmp_path / "sentinel"
    attack = Call(os.system, f"touch {sentinel}")
    raw = pickle.dumps({"a": attack, "b": 1} if inside else attack, protocol=protocol)
    path = tmp_path / "m.pt"
    path.write_bytes(archive(raw))
    if inside:
        assert checkpoint.load(path) == {"b": 1}
    else:
        with pytest.raises(FormatError, match="holds an object of the class"):
            checkpoint.load(path)
    assert not sentinel.exists()


def test_the_pickle_of_these_tests_is_one(tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(tensor(), _0=np.arange(4, dtype="<f4").tobytes()))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "m.pt"), np.arange(4))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"size": 400}, "has 16 bytes, expected 1600"),
        ({"shape": (5,)}, "ends after element 5"),
        ({"offset": 1}, "ends after element 5"),
        ({"strides": (2,)}, "ends after element 7"),
        ({"shape": (-1,)}, "an invalid shape"),
        ({"strides": (-1,)}, "an invalid shape"),
        ({"shape": (4, 4)}, "an invalid shape"),
        ({"storage": "../../0"}, "is missing"),
        ({"storage": "1"}, "is missing"),
        ({"kind": b"QInt8Storage"}, "QInt8Storage"),
        ({"shape": (2**30, 2**20), "strides": (0, 0)}, "use them again and again"),
        ({"size": -4}, "a storage of a pickle is invalid"),
    ],
)
def test_tensors_that_make_no_sense_are_refused(tmp_path, changes, what):
    path = tmp_path / "m.pt"
    path.write_bytes(archive(tensor(**changes), _0=np.arange(4, dtype="<f4").tobytes()))
    with pytest.raises(FormatError) as caught:
        checkpoint.load(path)
    assert what in str(caught.value)


@pytest.mark.parametrize("name", ["weights", "weights_stream", "kinds"])
def test_damaged_files_are_refused_or_give_trees(tmp_path, name):
    """Whatever the bytes are, the error is ours."""
    original = (HERE / f"{name}.pt").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "m.pt"
    outcomes = set()
    for _ in range(150):
        data = bytearray(original)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            data[at] = random.integers(0, 256)
        path.write_bytes(data[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else data)
        try:
            checkpoint.load(path)
            outcomes.add("loaded")
        except EformerError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_a_pickle_that_unfolds_without_end_is_refused(tmp_path):
    """Lists of references to lists: a few hundred bytes that stand for more than fits into memory."""
    raw = b"\x80\x02(](K\x01eq\x00"
    for number in range(30):
        raw += b"](" + (b"h" + bytes([number])) * 16 + b"eq" + bytes([number + 1])
    (tmp_path / "m.pt").write_bytes(archive(raw + b"t."))
    with pytest.raises(FormatError, match="far larger than its text"):
        checkpoint.load(tmp_path / "m.pt")


def test_a_pickle_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(b"\x80\x02" + b"](" * 5000 + b"e" * 5000 + b"."))
    with pytest.raises(FormatError, match="nested too deep"):
        checkpoint.load(tmp_path / "m.pt")


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


def repeated(value, times):
    """The pickle of a list of many references to one value."""
    return b"\x80\x02(" + value + b"q\x00](" + b"h\x00" * times + b"et."


BOMBS = {
    "texts": repeated(text(b"x" * 2**20), 10_000),
    "bytes": repeated(b"\x8e" + struct.pack("<Q", 2**20) + b"x" * 2**20, 10_000),
    "numbers": repeated(b"\x8b" + struct.pack("<i", 2**20) + b"\x01" * 2**20, 10_000),
    "sets": repeated(b"\x8f(" + b"".join(b"J" + struct.pack("<i", n) for n in range(2**16)) + b"\x90", 10_000),
    "lists": b"\x80\x02(](K\x01eq\x00" + b"".join(
        b"](" + (b"h" + bytes([n])) * 16 + b"eq" + bytes([n + 1]) for n in range(5)
    ) + b"t.",
    "memo": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "long number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_memory(tmp_path, name):
    """Read in a process of its own, whose memory is looked at afterwards."""
    (tmp_path / "m.pt").write_bytes(archive(BOMBS[name]))
    program = (
        "import sys\n"
        "from eformer._engine.formats.find import find\n"
        "from eformer.errors import FormatError\n"
        "try:\n    find(sys.argv[1])\nexcept FormatError:\n    print('refused', end=' ')\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "m.pt"], check=True, capture_output=True, timeout=120
    )
    assert (b"refused" in done.stdout) == (name not in ("memo", "frame"))
    assert int(done.stdout.split()[-1]) < 400_000  # kilobytes, including the interpreter


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_stream_that_would_run_something_runs_nothing(tmp_path, protocol):
    sentinel = tmp_path / "sentinel"
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Call(os.system, f"touch {sentinel}"), [])
    (tmp_path / "m.pt").write_bytes(b"".join(pickle.dumps(part, protocol) for part in parts))
    with pytest.raises(FormatError, match="holds an object of the class"):
        checkpoint.load(tmp_path / "m.pt")
    assert not sentinel.exists()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_metadata_that_would_run_something_runs_nothing(tmp_path, at):
    sentinel = tmp_path / "sentinel"
    shutil.copytree(HERE / "distributed", tmp_path / "d")
    attack = pickle.dumps(Call(os.system, f"touch {sentinel}"), protocol=min(2 + at, 5))
    (tmp_path / "d" / ".metadata").write_bytes(attack)
    with pytest.raises(FormatError, match="expected a Metadata of PyTorch, found"):
        checkpoint.load(tmp_path / "d")
    assert not sentinel.exists()


def zipped(*members, **options):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", **options) as file:
        for name, data in members:
            file.writestr(name, data)
    return memory.getvalue()


DATA = np.arange(4, dtype="<f4").tobytes()


ARCHIVES = [
    (
        zipped(("a/data.pkl", tensor()), ("a/data/0", DATA), compression=zipfile.ZIP_DEFLATED),
        "compressed archive",
    ),
    (zipped(("a/data.pkl", tensor()), ("b/data.pkl", tensor())), "several pickles of PyTorch"),
    (zipped(("a/data.pkl", tensor()), ("a/byteorder", "big"), ("a/data/0", DATA)), "byte order b'big'"),
    (zipped(("a/version", "3"), ("a/byteorder", "little")), "an archive of PyTorch without data.pkl"),
    (zipped(("a/data.pkl", tensor()), ("../../data/0", DATA)), "'0' is missing"),
    (b"PK\x03\x04" + zipped(("a/data.pkl", tensor()), ("a/data/0", DATA)) * 2, "belong to no member"),
]


@pytest.mark.parametrize(("data", "message"), ARCHIVES, ids=[message for _, message in ARCHIVES])
def test_archives_that_make_no_sense_are_refused(tmp_path, data, message):
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        checkpoint.load(tmp_path / "m.pt")


def test_names_of_members_lead_nowhere(tmp_path):
    members = [
        ("../../../etc/data.pkl", tensor()),
        ("../../../etc/data/0", DATA),
        ("../../../etc/passwd", "x"),
    ]
    (tmp_path / "m.pt").write_bytes(zipped(*members))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "m.pt"), np.arange(4))
    assert checkpoint.inspect(tmp_path / "m.pt").left_out == ("../../../etc/passwd",)


def test_a_member_that_is_not_listed_is_noticed(tmp_path):
    """The directory of an archive, changed so that it lists one member less."""
    whole = bytearray(zipped(("a/data.pkl", tensor()), ("a/data/0", DATA), ("a/data/1", b"hidden" * 9)))
    last, end = whole.rindex(b"PK\x01\x02"), whole.rindex(b"PK\x05\x06")
    count, nbytes = struct.unpack_from("<HI", whole, end + 10)
    struct.pack_into("<HHI", whole, end + 8, count - 1, count - 1, nbytes - (end - last))
    (tmp_path / "m.pt").write_bytes(whole[:last] + whole[end:])
    with pytest.raises(FormatError, match="belong to no member of this archive"):
        checkpoint.load(tmp_path / "m.pt")


def test_marks_of_tensors_that_make_no_sense_are_refused(tmp_path):
    for marks, message in [
        (b"]", "has invalid marks"),
        (b"}X\x04\x00\x00\x00evil\x88s", "marked as evil"),
    ]:
        raw = tensor().replace(b"\x89}tR.", b"\x89}" + marks + b"tR.")
        (tmp_path / "m.pt").write_bytes(archive(raw, _0=DATA))
        with pytest.raises(FormatError, match=message):
            checkpoint.load(tmp_path / "m.pt")
