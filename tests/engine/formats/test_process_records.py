"""The records that a load reads grow with the loaded leaves, not with the number of processes that saved."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.formats import process_records
from eformer._engine.formats.find import find
from eformer._engine.record.boxes import Box
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.owners import Owners, pack_numbers
from eformer._engine.saving import commit as _record
from eformer._engine.saving import several
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.objects import Objects
from eformer.checkpoint import load
from eformer.errors import CorruptionError, FormatError
from support.hosts import Crew, save_together, sharded_tree
from support.trees import bits


@pytest.fixture(params=["safetensors", "tensorstore", "tensorstore, ocdbt", "tensorstore, zstd"])
def layout(request):
    """A format, and options of it."""
    name, _, option = request.param.partition(", ")
    return name, {"ocdbt": {"ocdbt": True}, "zstd": {"compression": "zstd"}}.get(option, {})


@pytest.fixture
def asked(monkeypatch):
    """Every read of a file and every request to a bucket."""
    calls = []

    def count(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *how: (calls.append(name), call(*how))[1])

    for owner, name in ((LocalStore, "read"), (LocalFiles, "read_into"), (Objects, "_request")):
        count(owner, name)
    return calls


@pytest.fixture
def records(monkeypatch):
    """The numbers of the files whose records were read."""
    numbers, read = [], process_records._read

    def watched(tree, number, *how):
        numbers.append(number)
        return read(tree, number, *how)

    monkeypatch.setattr(process_records, "_read", watched)
    return numbers


def stages():
    """Return leaves that each lie on one of eight devices."""
    return {
        f"stage-{number}": jax.device_put(jnp.arange(8.0) + number, device)
        for number, device in enumerate(jax.devices())
    }


@pytest.mark.parametrize("name", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_load_asks_as_often_however_many_processes_wrote(tmp_path, asked, name, place):
    often = []
    for count in (2, 4, 8):
        path = tmp_path / str(count) if place == "disk" else f"memory://bucket/{name}-{count}"
        assert save_together(Crew(count), lambda host: stages(), path, (name, {})) == [None] * count
        asked.clear()
        loaded = load(path, keys="stage-5")
        often.append(len(asked))
        assert loaded["stage-5"].tolist() == (np.arange(8.0) + 5).tolist()
    assert often[0] == often[1] == often[2]
    assert 0 < often[0] <= 8


def test_only_the_records_of_the_wanted_boxes_are_read(tmp_path, records, layout):
    assert save_together(Crew(4), lambda host: sharded_tree(), tmp_path, layout) == [None] * 4
    tree = find(tmp_path).listed(None)
    assert records == []
    for number in range(4):
        box = Box((16 * number, 0), (16 * number + 16, 8))
        (extent,) = tree.locate({"rows": [box]}).leaves["rows"].extents
        assert extent.region == (box.start, box.stop)
    assert records == [0, 1, 2, 3]


def test_located_leaves_are_as_all_records_together_say(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(_record, "PIECE_BYTES", 256)
    assert save_together(Crew(4), lambda host: sharded_tree(), tmp_path, layout) == [None] * 4
    found = find(tmp_path)
    whole, listed = found.tree(None), find(tmp_path).listed(None)
    boxes = [Box((a, b), (a + 10, b + 3)) for a in (0, 7, 50) for b in (0, 4)]
    for name in ("rows", "both", "columns", "everywhere"):
        for box in boxes:
            there = listed.locate({name: [box]})
            assert overlapping(there, name, box) == overlapping(whole, name, box) != []
    assert listed.locate({"empty": None}).leaves["empty"].nbytes == 0


def overlapping(tree, name, box):
    entry = tree.leaves[name]
    return sorted(
        (tree.path_of(extent.file), extent.offset, extent.digests)
        for extent in entry.extents
        if entry.region_of(extent).overlap(box)
    )


def test_shapes_are_described_without_the_records(tmp_path, records, layout):
    tree = sharded_tree()
    assert save_together(Crew(4), lambda host: tree, tmp_path, layout) == [None] * 4
    described = checkpoint.abstract(tmp_path)
    assert {name: leaf.shape for name, leaf in described.items() if name != "n"} == {
        name: leaf.shape for name, leaf in tree.items() if name != "n"
    }
    assert records == []


def test_a_checkpoint_without_a_table_loads_alike(tmp_path, monkeypatch, records, layout):
    """Earlier versions wrote none, and a process whose leaves are cut in too many ways does not."""
    tree, owners_of = sharded_tree(), several.owners_of
    seen = []

    def unless_first_of_four(*how):
        seen.append(None)
        return None if len(seen) == 1 else owners_of(*how)

    monkeypatch.setattr(several, "owners_of", unless_first_of_four)
    assert save_together(Crew(4), lambda host: tree, tmp_path, layout) == [None] * 4
    assert not find(tmp_path).manifest.trees[""].owners
    loaded = load(tmp_path)
    assert sorted(records) == [0, 1, 2, 3]
    assert {name: bits(leaf) for name, leaf in loaded.items() if name != "n"} == {
        name: bits(leaf) for name, leaf in tree.items() if name != "n"
    }
    assert checkpoint.verify(tmp_path).ok


def test_damage_to_a_record_harms_only_loads_of_its_leaves(tmp_path):
    assert save_together(Crew(8), lambda host: stages(), tmp_path) == [None] * 8
    manifest = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "")
    file = tmp_path / manifest.trees[""].files[3].name
    file.write_bytes(file.read_bytes().replace(b"extents", b"extinct"))
    assert load(tmp_path, keys="stage-2")["stage-2"].tolist() == (np.arange(8.0) + 2).tolist()
    for keys in ("stage-3", None):
        with pytest.raises(CorruptionError, match=file.name):
            load(tmp_path, keys=keys)


def test_a_bit_of_the_table_that_flips_is_an_error(tmp_path):
    assert save_together(Crew(4), lambda host: sharded_tree(), tmp_path) == [None] * 4
    manifest = tmp_path / "manifest.json"
    data = bytearray(manifest.read_bytes())
    data[data.index(b'"holdings"') + 30] ^= 1
    manifest.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda table: Owners(table.leaves, table.files[:-1]),
            "has the boxes of 3 files, but names 4",
        ),
        (lambda table: Owners(table.leaves, ((), *table.files[1:])), "do not cover"),
        (lambda table: Owners((), ((),) * 4), "do not cover"),
        (
            lambda table: Owners((pack_numbers([10**6]),) * len(table.leaves), table.files),
            "a list of other leaves",
        ),
    ],
)
def test_a_table_that_is_wrong_is_an_error_and_never_other_values(tmp_path, change, says):
    assert save_together(Crew(4), lambda host: sharded_tree(), tmp_path) == [None] * 4
    manifest = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "")
    tree = manifest.trees[""]
    tree = msgspec.structs.replace(tree, owners=change(tree.owners))
    (tmp_path / "manifest.json").write_bytes(manifest.with_tree("", tree).to_json())
    with pytest.raises(FormatError, match=says):
        load(tmp_path)
    assert checkpoint.verify(tmp_path).ok  # it reads every record
