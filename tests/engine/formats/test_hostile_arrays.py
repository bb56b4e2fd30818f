"""Hostile checkpoints of arrays are refused quickly, and no file outside them is read or removed.

A digest is no signature: an attacker who can write an index can seal it.
"""

import bz2
import functools
import gc
import gzip
import json
import os
import resource
import shutil
import struct
import subprocess
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tensorstore as ts
import zstandard

from eformer import checkpoint
from eformer._engine.record.digests import stamp_digest
from eformer._engine.stores.journal import Journal
from eformer._engine.stores.ocdbt_nodes import _Walk
from eformer._engine.stores.removal import Moved
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError, FormatError, NotFoundError
from support import programs
from support.arrays import opened, write_array
from support.damage import flip
from support.databases import MANIFEST, NODE, inner_node, nested_nodes, sealed, varint, write_bomb, write_root
from support.trees import assert_same

pytestmark = pytest.mark.sample(2)

COMPAT = Path(__file__).parents[2] / "compat"
TREE = {"w": np.arange(6, dtype=np.float32)}


@pytest.fixture
def ours(tmp_path):
    save(TREE, tmp_path / "ours", prefix="m", format="tensorstore")
    return tmp_path / "ours"


@pytest.fixture
def victim(tmp_path):
    save(TREE, tmp_path / "victim", prefix="m", format="tensorstore")
    return tmp_path / "victim"


def rewrite(path, change):
    """The index of a checkpoint with a change, and a digest that fits."""
    file = path / "tensorstore_index.json"
    index = json.loads(file.read_text())
    change(index)
    index["digest"] = "0" * 32
    file.write_bytes(stamp_digest(json.dumps(index, separators=(",", ":")).encode()))


@pytest.mark.parametrize("path", ["../victim/m/w", "..", "", "/tmp", "m/../../victim"])
def test_a_sealed_index_that_leads_out_is_refused_before_anything_is_removed(ours, victim, path):
    rewrite(
        ours, lambda index: index["prefixes"].update(old=[{"path": path, "shape": [6], "dtype": "float32"}])
    )
    for call in (
        lambda: load(ours, prefix="old"),
        lambda: save(TREE, ours, prefix="old", format="tensorstore"),
    ):
        with pytest.raises(FormatError, match="leads out of the directory"):
            call()
    assert_same(load(victim), TREE)


@pytest.mark.parametrize("name", ["..", ".", "", "../victim", "m/../../victim"])
def test_a_journal_that_leads_out_removes_nothing(ours, victim, name):
    scratch = ours / ".eformer-0123456789abcdef.tmp"
    scratch.mkdir()
    mark = checkpoint.inspect(victim).trees["m"].save_id
    moved = [Moved(name, (ours / name).stat().st_ino, m) for m in (mark, "")]
    (scratch / "journal.json").write_bytes(msgspec.json.encode(Journal("id", tuple(moved), tuple(moved))))
    (victim.parent / "empty").mkdir()
    save(TREE, ours, prefix="m", format="tensorstore")
    assert_same(load(victim), TREE)
    assert (victim.parent / "empty").is_dir()


@pytest.mark.parametrize("what", ["fifo", "/dev/zero"])
def test_a_journal_that_never_ends_delays_no_save(ours, what):
    scratch = ours / ".eformer-0123456789abcdef.tmp"
    scratch.mkdir()
    if what == "fifo":
        os.mkfifo(scratch / "journal.json")
    else:
        (scratch / "journal.json").symlink_to(what)
    save(TREE, ours, prefix="m", format="tensorstore")
    assert not scratch.exists()


@pytest.mark.parametrize("root", ["../victim/m", "/etc", "", "m/..", "a" * 300, "tensorstore_index.json"])
def test_a_tree_whose_files_are_elsewhere_is_refused(ours, victim, root):
    rewrite(ours, lambda index: index["eformer"]["trees"]["m"].update(root=root))
    with pytest.raises((FormatError, FileNotFoundError)):
        load(ours)


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "db"
    save(TREE, path, prefix="m", format="tensorstore", options=SaveOptions(ocdbt=True))
    return path


@pytest.mark.parametrize("kind", ["absolute", "link"])
def test_a_database_elsewhere_is_refused(tmp_path, database, kind):
    elsewhere = database.rename(tmp_path / "elsewhere")
    save(TREE, database, prefix="m", format="tensorstore", options=SaveOptions(ocdbt=True))
    rewrite(database, lambda index: index["eformer"]["trees"]["m"].update(
        json.loads((elsewhere / "tensorstore_index.json").read_text())["eformer"]["trees"]["m"]))  # fmt: skip
    if kind == "absolute":
        root = str(elsewhere / "m.ocdbt")
        rewrite(database, lambda index: index["eformer"]["trees"]["m"].update(root=root))
    else:
        subprocess.run(["rm", "-r", database / "m.ocdbt"], check=True)
        (database / "m.ocdbt").symlink_to(elsewhere / "m.ocdbt")
    with pytest.raises(FormatError, match=r"outside the checkpoint|is a link"):
        load(database)


def test_a_pipe_in_a_database_delays_no_reader(database):
    file = next((database / "m.ocdbt" / "d").iterdir())
    file.unlink()
    os.mkfifo(file)
    for call in (load, lambda path: checkpoint.open(path)["w"][...]):
        with pytest.raises(FormatError, match="is not a regular file"):
            call(database)
    assert not checkpoint.verify(database).ok


@pytest.mark.parametrize(
    "coding", [["zarr", [6], '{"chunks": [1048576]}'], ["", [6]], ["zstd", [2**40]], ["lz4", [6]]], ids=str
)
def test_a_coding_that_we_never_write_is_refused(ours, coding):
    def change(index):
        index["eformer"]["trees"]["m"]["leaves"]["w"][2][0][5] = coding

    rewrite(ours, change)
    with pytest.raises(FormatError, match=r"leaf 'w' is invalid"):
        load(ours)


# --------------------------------------------------------------------------------------------- of other programs


def foreign(path, **metadata):
    array = np.arange(10, dtype=np.float32).reshape(5, 2)
    write_array(path / "w", array, **{"chunks": [5, 2], "compressor": None} | metadata)
    return path


def described(path, **changes):
    file = path / "w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("sample", ["ours", "orbax"])
def test_a_node_of_a_database_that_decodes_to_far_more_than_is_stored_is_refused(tmp_path, database, sample):
    """TensorStore would take 20 times as much again for a table of so many files."""
    where = database / "m.ocdbt"
    if sample == "orbax":
        where = database = Path(shutil.copytree(COMPAT / "orbax" / "v0_standard", tmp_path / "orbax"))
    write_bomb(where, 6_000_000)
    for call in (load, lambda path: checkpoint.open(path)["w"][...]):
        with pytest.raises(
            FormatError, match=r"d/x has a node of \d+ bytes that decodes to more than 16777216"
        ):
            call(database)


@pytest.mark.parametrize("file", [b"d/\xff", b"d/a:b", b"d/a%41"], ids=ascii)
def test_a_node_is_looked_at_whatever_its_file_is_called(database, file):
    write_bomb(database / "m.ocdbt", 6_000_000, file=file)
    with pytest.raises(FormatError, match=r"has a node of \d+ bytes that decodes to more than 16777216"):
        load(database)


def test_a_huge_inner_node_is_refused(database):
    """To look at the nodes below it would take hundreds of times as much memory."""
    write_bomb(database / "m.ocdbt", 400_000, height=1)
    with pytest.raises(FormatError, match=r"d/x has a node of \d+ bytes .*, expected at most 1048576 bytes"):
        load(database)


def test_loads_of_a_database_leave_no_objects_behind(database):
    """`tensorstore.ocdbt.dump` never frees its results."""
    load(database)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        load(database)
    gc.collect()
    assert len(gc.get_objects()) < before + 50


def many_paths(count, nbytes):
    """A table of files whose paths share all but their last byte, which takes few bytes."""
    prefixes, suffixes = varint(nbytes - 1) * (count - 1), varint(nbytes) + varint(1) * (count - 1)
    return varint(count) + prefixes + suffixes + bytes(count) + b"a" * nbytes + b"b" * (count - 1)


@pytest.mark.parametrize("where", ["manifest", "leaf", "inner"])
def test_paths_that_share_their_beginnings_are_counted_whole(database, where):
    """A hundred bytes may stand for gigabytes of paths."""
    table = many_paths(10_000, 10_000)
    if where == "manifest":
        config = bytes(16) + b"\0" + varint(100) + varint(2**23) + b"\4\0"
        (database / "m.ocdbt" / "manifest.ocdbt").write_bytes(sealed(MANIFEST, config + table))
    else:
        height = b"\1" if where == "inner" else b"\0"
        write_root(database / "m.ocdbt", sealed(NODE, height + table))
    with pytest.raises(
        FormatError, match=r"has a node whose table of files takes \d+ bytes or more, expected at most"
    ):
        load(database)


@pytest.mark.parametrize("odd", [{"offset": 2**63 + 5}, {"name_length": 2**63 + 5}], ids=str)
def test_a_number_of_a_database_that_is_too_large_is_damage(database, odd):
    write_root(database / "m.ocdbt", inner_node([]), **odd)
    with pytest.raises(CorruptionError, match=r"manifest.ocdbt is not the manifest of an OCDBT database"):
        load(database)


def test_a_node_is_looked_at_once_however_it_is_referred_to(database):
    where, seen, places = database / "m.ocdbt", [], set()
    node = inner_node([(0, 10_000 + number) for number in range(100)])
    write_root(where, node + bytes(20_000), nbytes=len(node))
    walk = _Walk(where, places)
    decode, walk._decode = walk._decode, lambda data, file: seen.append(file) or decode(data, file)
    walk.look_through("manifest.ocdbt")
    assert seen == ["manifest.ocdbt", "d/x"]
    assert len(places) == 101


def test_nodes_within_each_other_are_refused(database):
    write_root(database / "m.ocdbt", nested_nodes(40))
    with pytest.raises(FormatError, match="d/x has nodes that lie within each other"):
        load(database)


def test_all_nodes_of_a_database_are_looked_at_that_its_last_version_has(tmp_path):
    config = {"max_decoded_node_bytes": 300, "compression": None}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    store = ts.KvStore.open(spec).result()
    with ts.Transaction(atomic=True) as transaction:
        for number in range(200):
            store.with_transaction(transaction)[f"a/{number}"] = bytes(200)
    seen = set()
    walk = _Walk(tmp_path, seen)
    walk.look_through("manifest.ocdbt")
    (file,) = (tmp_path / "d").iterdir()
    assert len(seen) == file.read_bytes().count(b"\x0c\xdb\x20\xde") > 10


@pytest.mark.parametrize(
    "odd",
    [
        {"order": "F"},
        {"dtype": ">f4"},
        {"compressor": {"id": "blosc"}},
        {"compressor": {"id": "zlib", "level": 1}},
    ],
    ids=str,
)
def test_a_chunk_that_claims_to_be_huge_ends_no_process(tmp_path, odd):
    foreign(tmp_path, **odd)
    chunk = tmp_path / "w" / "0.0"
    chunk.write_bytes(chunk.read_bytes() + bytes(10_000_000))  # so that it might just hold as much
    described(tmp_path, shape=[5, 20_000_000_000], chunks=[5, 20_000_000_000])
    code = (
        "import sys, resource; from eformer.checkpoint import load\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2**34}, {2**34}))\n"
        "try: load(sys.argv[1], keys='w')\n"
        "except (ValueError, MemoryError) as error: print(type(error).__name__)"
    )
    done = programs.run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("CorruptionError", "FormatError", "MemoryError")


ZEROS = bytes(100_000_000)
BOMBS = {
    "zstd": lambda: zstandard.ZstdCompressor().compress(ZEROS),
    "zlib": lambda: zlib.compress(ZEROS, 1),
    "gzip": lambda: gzip.compress(ZEROS, 1),
    "bz2": lambda: 2 * bz2.compress(ZEROS, 9),
    "blosc": lambda: struct.pack("<4B3I", 2, 1, 33, 1, len(ZEROS), len(ZEROS), 4096) + bytes(4080),
}


@functools.cache
def bomb(codec):
    return BOMBS[codec]()


@pytest.mark.parametrize("codec", BOMBS)
def test_a_chunk_that_would_take_far_more_memory_than_its_array_is_refused(tmp_path, codec):
    foreign(tmp_path, compressor={"id": codec})
    (tmp_path / "w" / "0.0").write_bytes(bomb(codec))
    described(tmp_path, chunks=[5, 5_000_000])
    for call in (load, checkpoint.verify, lambda path: checkpoint.open(path)["w"][...]):
        with pytest.raises(
            FormatError, match=r"would take 100000000 bytes of memory|cannot decode to a chunk"
        ):
            call(tmp_path)


@pytest.mark.parametrize("codec", BOMBS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_chunk_is_decompressed_to_its_length_and_no_further(tmp_path, codec, order):
    foreign(tmp_path, compressor={"id": codec})
    (tmp_path / "w" / "0.0").write_bytes(bomb(codec))
    described(tmp_path, order=order)
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptionError, match=r"decompresses to more than 40|decompress to 40|chunk of 40"
        ):
            load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_padded_chunks_of_small_arrays_are_read(tmp_path):
    foreign(tmp_path, chunks=[1000, 1000], compressor={"id": "zlib"})
    assert load(tmp_path)["w"].tolist() == np.arange(10).reshape(5, 2).tolist()


@pytest.mark.parametrize("codec", ["zlib", "gzip", "bz2", "zstd", "blosc", None])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">c8", "|b1"])
def test_every_codec_order_and_byte_order_is_read_as_tensorstore_reads_it(tmp_path, codec, order, dtype):
    array = np.random.default_rng(0).integers(0, 2, (5, 3, 4)).astype(dtype)
    compressor = codec and {"id": codec}
    write_array(tmp_path / "w", array, dtype=dtype, chunks=[2, 3, 3], compressor=compressor, order=order)
    np.testing.assert_array_equal(load(tmp_path)["w"], opened(tmp_path / "w").read().result())


@pytest.mark.parametrize("codec", ["zlib", "gzip", "bz2"])
def test_a_chunk_that_was_cut_short_is_damage(tmp_path, codec):
    chunk = foreign(tmp_path, compressor={"id": codec}) / "w" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match=r"w/0.0 cannot be decoded"):
        load(tmp_path)


def test_an_index_and_an_array_that_disagree_are_an_error(tmp_path):
    foreign(tmp_path)
    listed = {"path": "w", "shape": [7], "dtype": "int8"}
    index = {"format": "tensorstore", "version": "1.0", "arrays": [listed]}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r".zarray describes float32\[5, 2\], but the index says int8\[7\]"):
        load(tmp_path)


@pytest.mark.parametrize("extra", [b"x", b"x" * 40])
def test_a_chunk_of_another_length_is_an_error(tmp_path, extra):
    chunk = foreign(tmp_path) / "w" / "0.0"
    chunk.write_bytes(chunk.read_bytes() + extra)
    with pytest.raises(CorruptionError, match=r"w/0.0 has \d+ bytes, expected 40"):
        load(tmp_path)


@pytest.mark.parametrize("index", [
    {"prefixes": {"": [{"path": "w"}]}}, {"arrays": [{"path": "w"}, {"path": "w"}]}, {"prefixes": {"m": [{"path": "w"}] * 2}},
], ids=str)  # fmt: skip
def test_an_index_that_says_things_twice_is_refused(tmp_path, index):
    foreign(tmp_path)
    (tmp_path / "tensorstore_index.json").write_text(
        json.dumps({"format": "tensorstore", "version": "2.0"} | index)
    )
    with pytest.raises(FormatError, match=r"twice|has an empty prefix"):
        load(tmp_path)


def test_an_index_of_nothing_holds_no_tree(tmp_path):
    (tmp_path / "tensorstore_index.json").write_text(
        '{"format": "tensorstore", "version": "2.0", "prefixes": {}}'
    )
    with pytest.raises(NotFoundError, match="holds no tree"):
        load(tmp_path)


@pytest.mark.parametrize("byte", range(0, 200, 3))
def test_a_flipped_byte_in_a_description_is_an_error_of_ours_or_none(tmp_path, byte):
    file = foreign(tmp_path) / "w" / ".zarray"
    flip(file, byte % file.stat().st_size, 0x80)
    try:
        load(tmp_path)
    except (FormatError, NotFoundError) as error:
        assert "w" in str(error)  # noqa: PT017


def test_a_damaged_tree_of_another_program_harms_none_of_ours(tmp_path):
    foreign(tmp_path / "sub")
    (tmp_path / "sub").rename(tmp_path / "old")
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"old": [{"path": "old/w"}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path, prefix="m", format="tensorstore")
    (tmp_path / "old" / "w" / "0.0").unlink()
    assert_same(load(tmp_path, prefix="m"), TREE)
    with pytest.raises(CorruptionError, match=r"'w'.*missing"):
        load(tmp_path, prefix="old")


def test_arrays_without_an_index_stay_readable_when_a_tree_is_saved_beside_them(tmp_path):
    foreign(tmp_path)
    save(TREE, tmp_path, prefix="m", format="tensorstore")
    np.testing.assert_array_equal(load(tmp_path, prefix="")["w"], np.arange(10).reshape(5, 2))
    assert_same(load(tmp_path, prefix="m"), TREE)


def test_arrays_of_ours_whose_index_is_lost_are_not_listed_by_the_next_save(ours):
    (ours / "tensorstore_index.json").unlink()
    save({"v": 1}, ours, prefix="new", format="tensorstore")
    assert load(ours) == {"v": 1}


def test_arrays_that_would_get_one_name_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "m"):
        foreign(path)
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [{"path": "m/w"}, {"path": "w"}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="would get the same name"):
        load(tmp_path)


def test_arrays_that_jax_cannot_hold_come_back_as_numpy_arrays(tmp_path):
    array = np.arange(10, dtype=np.longdouble).reshape(5, 2)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "0.0").write_bytes(array.tobytes())
    (tmp_path / "w" / ".zarray").write_text(json.dumps(
        {"shape": [5, 2], "chunks": [5, 2], "dtype": "<f16", "compressor": None, "order": "C", "filters": None, "fill_value": None, "zarr_format": 2}))  # fmt: skip
    np.testing.assert_array_equal(load(tmp_path)["w"], array)


def test_many_readers_at_once_do_not_run_out_of_files(tmp_path):
    tree = {f"w{i}": np.full(3, i) for i in range(200)}
    save(tree, tmp_path, format="tensorstore")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        views = [checkpoint.open(tmp_path) for _ in range(6)]
        assert all(view["w7"][0] == 7 for view in views)
        assert_same(load(tmp_path), tree)
        for view in views:
            view.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_view_of_a_replaced_checkpoint_says_so(database):
    view = checkpoint.open(database)
    save({"w": np.zeros(2)}, database, prefix="m", format="tensorstore", options=SaveOptions(ocdbt=True))
    with pytest.raises(FileNotFoundError, match="was replaced by a newer save; open it again"):
        view["w"][...]


def test_a_database_that_is_gone_is_in_the_report(database):
    subprocess.run(["rm", "-r", database / "m.ocdbt"], check=True)
    (damage,) = checkpoint.verify(database).damages
    assert f"{database}/m.ocdbt is missing" in damage.problem
