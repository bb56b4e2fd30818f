"""Sign a checkpoint, and find all differences from its signature."""

import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from eformer import checkpoint
from eformer._engine.stores.signed import SignedStore
from eformer.checkpoint import load, save, sign, verify
from eformer.errors import AlteredError, NotFoundError, SignatureError
from eformer.pytree import save_to_file
from support import buckets
from support.keys import OTHER_PRIVATE, OTHER_PUBLIC, PRIVATE, PUBLIC

COMPAT = Path(__file__).parents[2] / "compat"
ORBAX = COMPAT / "orbax"


def tree(start=0.0):
    return {
        "w": np.arange(700, dtype=np.float32) + start,
        "b": {"c": np.ones((3, 4), np.float32), "d": np.arange(5, dtype=np.int32)},
    }


def hugging_face(path):
    path.mkdir()
    safetensors.numpy.save_file(
        {"w": np.arange(700, dtype=np.float32)}, path / "model-00001-of-00002.safetensors"
    )
    safetensors.numpy.save_file({"c": np.ones((3, 4))}, path / "model-00002-of-00002.safetensors")
    weights = {"w": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"layers": 2}')
    (path / "README.md").write_text("a model")
    return path


def step(path):
    with checkpoint.Run(path) as run:
        run.save(3, tree())
    return path / "step-3"


def file(name, write):
    def make(path):
        path.mkdir()
        write(path / name)
        return path / name

    return make


def kept(**arguments):
    def make(path):
        save(tree(), path, **arguments)
        return path

    return make


LAYOUTS = {
    "directory": kept(options={"max_shard_bytes": 2000}),
    "file": file("model.safetensors", lambda path: save(tree(), path)),
    "zarr": kept(format="tensorstore", options={"max_chunk_bytes": 1000}),
    "zarr of a prefix": kept(format="tensorstore", prefix="ema"),
    "database": kept(format="tensorstore", options={"ocdbt": True}),
    "msgpack": file("state.msgpack", lambda path: save_to_file(tree(), str(path))),
    "npz": file("arrays.npz", lambda path: np.savez(path, w=np.arange(700), c=np.ones(3))),
    "hugging face": hugging_face,
    "step": step,
    "zarr without an index": lambda path: shutil.copytree(COMPAT / "data" / "ts_noindex", path),
    "zarr of the original": lambda path: shutil.copytree(COMPAT / "data" / "ts_v2", path),
    "orbax": lambda path: shutil.copytree(ORBAX / "v0_standard", path),
    "orbax, version 1": lambda path: shutil.copytree(ORBAX / "v1", path),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that small files have many pieces, and reads begin and end inside of them."""
    for module in ("record.signature", "stores.signed"):
        monkeypatch.setattr(f"eformer._engine.{module}.SIGNED_BLOCK_BYTES", 512)
    monkeypatch.setattr(SignedStore, "read_bytes", 2048)


@pytest.fixture(params=LAYOUTS)
def path(request, tmp_path):
    return LAYOUTS[request.param](tmp_path / "made")


@pytest.fixture
def signed(path):
    sign(path, private_key=PRIVATE)
    return path


@pytest.fixture
def directory(tmp_path):
    """A signed checkpoint of the default format."""
    path = LAYOUTS["directory"](tmp_path / "made")
    sign(path, private_key=PRIVATE)
    return path


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# ------------------------------------------------------------------------------------------ every layout


def test_what_is_signed_loads_with_the_key_as_it_does_without(signed):
    assert same(load(signed, signed_by=PUBLIC), load(signed))
    report = verify(signed, signed_by=PUBLIC)
    assert report.ok
    assert "; signed by " in str(report)


def test_the_unsigned_is_refused(path):
    for refuse in (load, checkpoint.open, verify):
        with pytest.raises(SignatureError, match=r"is not signed: there is no .*eformer\.sig"):
            refuse(path, signed_by=PUBLIC)


def test_what_another_key_has_signed_is_refused(signed):
    for refuse in (load, checkpoint.open, verify):
        with pytest.raises(SignatureError, match="is signed by another key"):
            refuse(signed, signed_by=OTHER_PUBLIC)


def test_a_signature_is_not_left_out_and_verify_says_that_it_was_not_checked(signed):
    report = verify(signed)
    assert report.ok
    assert report.is_signed
    assert report.signed_by is None
    assert "it is signed, which was not checked without a key" in str(report)
    record = checkpoint.inspect(signed)
    assert record.left_out == ()
    assert len(record.signed_by) == 64


def test_signing_leaves_one_file_behind_and_can_be_repeated(path):
    before = set(path.parent.rglob("*"))
    made = sign(path, private_key=OTHER_PRIVATE)
    assert sign(path, private_key=PRIVATE) == made
    assert set(path.parent.rglob("*")) - before == {Path(made)}
    assert verify(path, signed_by=PUBLIC).ok


class Originals(dict):
    def __repr__(self):
        return "the originals"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Every layout once, signed with small pieces, and what it holds."""
    made = Originals()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in ("record.signature", "stores.signed"):
            monkeypatch.setattr(f"eformer._engine.{module}.SIGNED_BLOCK_BYTES", 512)
        for name, make in LAYOUTS.items():
            path = make(tmp_path_factory.mktemp("original") / "made")
            sign(path, private_key=PRIVATE)
            made[name] = path, load(path)
    return made


def flip(data, at, value):
    data[at % len(data)] ^= value


def insert(data, at, value):
    data.insert(at % (len(data) + 1), value)


def remove(data, at, value):
    del data[at % len(data)]


EDITS = {"flip": flip, "insert": insert, "remove": remove}


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    edit=st.sampled_from(sorted(EDITS)),
    which=st.integers(0, 2**16),
    at=st.integers(0, 2**32),
    value=st.integers(1, 255),
)
def test_any_byte_that_is_changed_added_or_removed_is_found(originals, layout, edit, which, at, value):
    path, expected = originals[layout]
    files = files_of(path)
    chosen = files[which % len(files)]
    data = bytearray(chosen.read_bytes())
    if not data and edit != "insert":
        return
    before = bytes(data)
    EDITS[edit](data, at, value)
    if data == before:  # the removed byte had the same neighbour
        return
    chosen.write_bytes(data)
    try:
        require_found(path, expected)
    finally:
        chosen.write_bytes(before)


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    edit=st.sampled_from(["add", "remove", "rename", "swap", "empty"]),
    which=st.integers(0, 2**16),
)
def test_any_file_that_is_added_removed_or_renamed_is_found(originals, layout, edit, which):
    path, expected = originals[layout]
    files = [each for each in files_of(path) if not each.name.endswith("eformer.sig")]
    chosen = files[which % len(files)]
    other = chosen.with_name("other.safetensors")
    before = {each: each.read_bytes() for each in files}
    if edit == "add" and path.is_file():
        return
    if edit == "add":
        other.write_bytes(b"12345")
    elif edit == "remove":
        chosen.unlink()
    elif edit == "rename":
        chosen.rename(other)
    elif edit == "empty":
        chosen.write_bytes(b"")
    elif before[chosen] != before[files[0]]:
        chosen.write_bytes(before[files[0]])
    try:
        if {each: each.read_bytes() for each in files_of(path) if each in before or each == other} != before:
            require_found(path, expected)
    finally:
        other.unlink(missing_ok=True)
        for each, data in before.items():
            each.write_bytes(data)


def files_of(path):
    """Return the files of a checkpoint, and its signature."""
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [each for each in (path, path.with_name(f"{path.name}.eformer.sig")) if each.exists()]


def require_found(path, expected):
    """Require that the alteration is found; a load that does not read those bytes may return what was signed."""
    with suppress(SignatureError, NotFoundError):
        assert not verify(path, signed_by=PUBLIC).ok
    try:
        loaded = load(path, signed_by=PUBLIC)
    except (SignatureError, NotFoundError):
        return
    assert same(loaded, expected)


# ----------------------------------------------------------------------------- between the check and the use


def test_a_file_that_is_swapped_after_it_was_looked_at_is_found(directory, monkeypatch):
    data = {each: each.read_bytes() for each in directory.iterdir()}
    look = SignedStore.differences
    for name in ("manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):

        def swap(store, name=name):
            found = look(store)
            flipped = bytearray(data[directory / name])
            flipped[-1] ^= 1
            (directory / f"{name}.new").write_bytes(flipped)
            os.replace(directory / f"{name}.new", directory / name)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(SignedStore, "differences", swap)
            with pytest.raises(AlteredError, match="differs from its signature"):
                load(directory, signed_by=PUBLIC)
        (directory / name).write_bytes(data[directory / name])
    assert same(load(directory, signed_by=PUBLIC), tree())


def test_another_whole_checkpoint_in_its_place_is_refused(directory, tmp_path):
    """Its own digests, which anyone can compute, are all right."""
    save(tree(5.0), tmp_path / "other", options={"max_shard_bytes": 2000})
    for each in (tmp_path / "other").iterdir():
        shutil.copy(each, directory / each.name)
    assert same(load(directory), tree(5.0))
    with pytest.raises(AlteredError):
        load(directory, signed_by=PUBLIC)
    assert not verify(directory, signed_by=PUBLIC).ok


def test_a_view_finds_what_is_altered_while_it_is_open(directory):
    with checkpoint.open(directory, signed_by=PUBLIC) as view:
        assert view["w"][3] == 3
        for each in directory.glob("*.safetensors"):
            data = bytearray(each.read_bytes())
            for at in range(0, len(data), 100):
                data[at] ^= 1
            each.write_bytes(data)
        with pytest.raises(AlteredError):
            [view[name][...] for name in ("b.c", "b.d", "w")]


def test_a_pickled_view_keeps_its_key(directory):
    with checkpoint.open(directory, signed_by=PUBLIC) as view:
        copy = pickle.dumps(view)
    pickle.loads(copy).close()
    (directory / "eformer.sig").unlink()
    with pytest.raises(SignatureError, match="is not signed"):
        pickle.loads(copy)


def test_files_that_are_not_needed_are_not_read(directory, monkeypatch):
    assert list(load(directory, signed_by=PUBLIC, keys="b.d")) == ["b.d"]


def test_mapped_files_could_change_and_are_refused(directory):
    with pytest.raises(ValueError, match="mapped files may change"):
        load(directory, signed_by=PUBLIC, mmap=True)


# ------------------------------------------------------------------------------------------------ saves


@pytest.mark.parametrize(
    "arguments", [{}, {"format": "tensorstore"}, {"format": "tensorstore", "options": {"ocdbt": True}}]
)
def test_a_save_removes_the_signature_of_what_it_replaces(tmp_path, arguments):
    save(tree(), tmp_path / "c", **arguments)
    signature = Path(sign(tmp_path / "c", private_key=PRIVATE))
    before = signature.read_bytes()
    save(tree(1.0), tmp_path / "c", **arguments)
    assert not signature.exists()
    with pytest.raises(SignatureError, match="is not signed"):
        load(tmp_path / "c", signed_by=PUBLIC)
    signature.write_bytes(before)  # as if the save had died before it could remove it
    with pytest.raises(AlteredError, match="saved again since"):
        load(tmp_path / "c", signed_by=PUBLIC)
    sign(tmp_path / "c", private_key=PRIVATE)
    assert same(load(tmp_path / "c", signed_by=PUBLIC), tree(1.0))


@pytest.mark.parametrize("name", ["state.msgpack", "model.safetensors"])
def test_a_new_file_removes_the_signature_of_the_old_one(tmp_path, name):
    def write(what):
        save_to_file(what, str(tmp_path / name)) if "msgpack" in name else save(what, tmp_path / name)

    write(tree())
    signature = Path(sign(tmp_path / name, private_key=PRIVATE))
    before = signature.read_bytes()
    write(tree(1.0))
    assert not signature.exists()
    signature.write_bytes(before)
    with pytest.raises(AlteredError):
        load(tmp_path / name, signed_by=PUBLIC)


def test_a_save_that_fails_leaves_the_signature(directory, monkeypatch):
    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("eformer._engine.stores.local_upload.LocalUpload._publish", fail)
    with pytest.raises(OSError, match="full"):
        save(tree(1.0), directory)
    assert same(load(directory, signed_by=PUBLIC), tree())


def test_a_checkpoint_that_is_replaced_while_it_is_signed_is_signed_as_it_is_then(tmp_path, monkeypatch):
    from eformer._engine.tools import sign as module

    save(tree(), tmp_path / "c")
    digest, calls = module.digest_files, []

    def slow(*arguments):
        found = digest(*arguments)
        calls.append(len(calls))
        if len(calls) == 1:
            save(tree(1.0), tmp_path / "c")
        return found

    monkeypatch.setattr(module, "digest_files", slow)
    sign(tmp_path / "c", private_key=PRIVATE)
    assert len(calls) == 2
    assert same(load(tmp_path / "c", signed_by=PUBLIC), tree(1.0))


# ------------------------------------------------------------------------------------------------- runs


def test_a_run_resumes_from_a_signed_step_and_from_no_other(tmp_path):
    with checkpoint.Run(tmp_path / "run") as run:
        run.save(1, tree(1.0))
        run.save(2, tree(2.0))
    assert sign(tmp_path / "run", private_key=PRIVATE).endswith("step-2/eformer.sig")
    with checkpoint.Run(tmp_path / "run") as run:
        found = run.resume(signed_by=PUBLIC)
        assert found.step == 2
        assert same(found.tree, tree(2.0))
        run.save(3, tree(3.0))
    assert same(load(tmp_path / "run" / "step-2", signed_by=PUBLIC), tree(2.0))
    for refuse in (
        checkpoint.Run(tmp_path / "run", signals=()).resume,
        lambda signed_by: load(tmp_path / "run", signed_by=signed_by),
    ):
        with pytest.raises(SignatureError, match="step-3 is not signed"):
            refuse(signed_by=PUBLIC)
    assert [each.number for each in checkpoint.steps(tmp_path / "run")] == [1, 2, 3]


def test_an_altered_step_is_skipped_as_a_damaged_one_is(tmp_path):
    with checkpoint.Run(tmp_path / "run") as run:
        for number in (1, 2):
            run.save(number, tree(number))
            run.wait()
            sign(tmp_path / "run", private_key=PRIVATE)
    data = next(
        file for file in (tmp_path / "run" / "step-2").glob("*.safetensors") if file.stat().st_nlink == 1
    )
    flipped = bytearray(data.read_bytes())
    flipped[-1] ^= 1
    data.write_bytes(flipped)
    found = checkpoint.Run(tmp_path / "run", signals=()).resume(signed_by=PUBLIC)
    assert found.step == 1
    assert "differs from its signature" in found.skipped[2]


def test_near_steps_are_not_signed(tmp_path):
    run = checkpoint.Run(tmp_path / "run", near=checkpoint.Near(tmp_path / "near", every=1), signals=())
    with pytest.raises(ValueError, match="near steps are not signed"):
        run.resume(signed_by=PUBLIC)


def test_retention_removes_a_signature_with_its_step(tmp_path):
    with checkpoint.Run(tmp_path / "run", keep=1) as run:
        for number in (1, 2):
            run.save(number, tree())
            run.wait()
            sign(tmp_path / "run", private_key=PRIVATE)
        run.save(3, tree())
    assert [each.name for each in (tmp_path / "run").glob("step*")] == ["step-3"]


def test_every_step_of_a_run_has_to_be_signed_if_all_are_checked(tmp_path):
    for number in (1, 2):
        save(tree(), tmp_path / f"step-{number}")
    sign(tmp_path, private_key=PRIVATE)
    (damage,) = verify(tmp_path, signed_by=PUBLIC).damages
    assert str(damage).startswith(f"step-1 fails the check of its signature: {tmp_path}/step-1 is not signed")
    report = verify(tmp_path, step=2, signed_by=PUBLIC)
    assert report.ok
    assert report.signed_by
    sign(tmp_path / "step-1", private_key=PRIVATE)
    assert verify(tmp_path, signed_by=PUBLIC).ok


def test_prune_removes_the_signature_of_a_file(tmp_path):
    for number in (1, 2):
        save(tree(), tmp_path / f"step-{number}.safetensors")
        sign(tmp_path / f"step-{number}.safetensors", private_key=PRIVATE)
    checkpoint.prune(tmp_path, keep=1, pattern="step-*.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "step-2.safetensors",
        "step-2.safetensors.eformer.sig",
    ]


# ------------------------------------------------------------------------------------------------ places


def test_a_bucket_is_signed_and_read_as_a_directory_is(tmp_path):
    url = "memory://signed/model"
    save(tree(), url)
    assert sign(url, private_key=PRIVATE) == f"{url}/eformer.sig"
    assert verify(url, signed_by=PUBLIC).ok
    assert same(load(url, signed_by=PUBLIC), tree())
    data = next(key for key in buckets.objects(url) if key.endswith(".safetensors"))
    buckets.overwrite(url, data, lambda found: flip(found, -1, 1))
    for cache in (False, tmp_path / "cache"):  # which keeps what it has fetched, and is asked again once
        with pytest.raises(AlteredError):
            load(url, signed_by=PUBLIC, options={"cache": cache})
    assert not verify(url, signed_by=PUBLIC).ok
    save(tree(1.0), url)
    with pytest.raises(SignatureError, match="is not signed"):
        load(url, signed_by=PUBLIC)


def test_what_other_programs_put_beside_a_model_does_not_count(directory):
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs")
    (directory / ".cache" / "huggingface").mkdir(parents=True)
    (directory / ".cache" / "huggingface" / "x.lock").write_text("")
    assert verify(directory, signed_by=PUBLIC).ok
    assert same(load(directory, signed_by=PUBLIC), tree())


def test_links_are_not_signed_and_added_ones_are_found(directory, tmp_path):
    (tmp_path / "outside.json").write_text("{}")
    (directory / "config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ValueError, match=r"links, which cannot be signed: config\.json"):
        sign(directory, private_key=PRIVATE)
    with pytest.raises(AlteredError, match=r"config\.json was added"):
        load(directory, signed_by=PUBLIC)


def test_a_snapshot_in_a_cache_of_hugging_face_is_read(tmp_path):
    hugging_face(tmp_path / "made")
    sign(tmp_path / "made", private_key=PRIVATE)
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, each in enumerate(sorted((tmp_path / "made").iterdir())):
        shutil.copy(each, blobs / str(number))
        (snapshot / each.name).symlink_to(f"../../blobs/{number}")
    assert same(load(snapshot, signed_by=PUBLIC), load(snapshot))
    assert verify(snapshot, signed_by=PUBLIC).ok


def test_one_of_several_files_is_not_a_checkpoint_to_sign(tmp_path):
    hugging_face(tmp_path / "made")
    with pytest.raises(ValueError, match="sign the directory"):
        sign(tmp_path / "made" / "model-00001-of-00002.safetensors", private_key=PRIVATE)


def test_a_file_of_a_signed_directory_leads_to_the_signed_checkpoint(directory):
    assert same(load(directory / "manifest.json", signed_by=PUBLIC), tree())


def test_something_else_of_that_name_is_not_replaced(path):
    name = "eformer.sig" if path.is_dir() else f"{path.name}.eformer.sig"
    mine = (path if path.is_dir() else path.parent) / name
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match="remove it to sign the checkpoint"):
        sign(path, private_key=PRIVATE)
    assert mine.read_text() == "mine"


def test_where_nothing_is_nothing_is_signed(tmp_path):
    for refuse in (lambda path: sign(path, private_key=PRIVATE), lambda path: load(path, signed_by=PUBLIC)):
        with pytest.raises(NotFoundError):
            refuse(tmp_path / "nothing" / "here")


def test_a_signed_step_inside_of_an_unsigned_checkpoint_does_not_stand_for_it(directory, tmp_path):
    save(tree(1.0), tmp_path / "unsigned")
    shutil.copytree(directory, tmp_path / "unsigned" / "step-1")
    with pytest.raises(SignatureError, match="unsigned is not signed"):
        load(tmp_path / "unsigned", signed_by=PUBLIC)


def test_a_link_that_the_caller_names_leads_to_the_signed_file(tmp_path):
    save(tree(), tmp_path / "model.safetensors")
    sign(tmp_path / "model.safetensors", private_key=PRIVATE)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "best.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert same(load(tmp_path / "links" / "best.safetensors", signed_by=PUBLIC), tree())
    (tmp_path / "model.safetensors.eformer.sig").unlink()
    with pytest.raises(SignatureError, match=r"model\.safetensors is not signed"):
        load(tmp_path / "links" / "best.safetensors", signed_by=PUBLIC)


def test_a_step_that_is_held_is_signed_as_the_step_is(tmp_path):
    step(tmp_path / "run")
    sign(tmp_path / "run", private_key=PRIVATE)
    (only,) = checkpoint.steps(tmp_path / "run")
    with only.hold() as path:
        assert same(load(path, signed_by=PUBLIC), tree())


def test_retention_removes_a_signature_from_a_bucket(tmp_path):
    url = "memory://signed-run/run"
    with checkpoint.Run(url, keep=1) as run:
        for number in (1, 2):
            run.save(number, tree())
            run.wait()
            sign(f"{url}/step-{number}", private_key=PRIVATE)
        run.save(3, tree())
    assert not [key for key in buckets.objects(url) if "step-3" not in key and "step" in key]


@pytest.mark.parametrize("name", ["v0_standard", "v1"])
def test_a_checkpoint_of_orbax_in_a_bucket_is_signed(name):
    url = f"memory://signed-orbax-{name}/model"
    buckets.upload(ORBAX / name, url)
    sign(url, private_key=PRIVATE)
    assert same(load(url, signed_by=PUBLIC), load(url))
    assert verify(url, signed_by=PUBLIC).ok
