"""Single files that flax, numpy and equinox wrote: known by their content, and noticed when they change."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress

import equinox as eqx
import flax.serialization
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import EformerError, FormatError
from support.commands import run
from support.samples import FORMATS

# ---------------------------------------------------------------------------------------- each of them


def test_inspect_and_verify_report_the_known_facts(sample):
    assert checkpoint.inspect(sample).format == FORMATS[sample.suffix]
    report = checkpoint.verify(sample)
    assert report.ok
    assert report.leaves
    assert not report.has_digests


def test_a_file_is_known_by_its_content_whatever_its_name(sample):
    renamed = sample.rename(sample.with_name("checkpoint_7"))
    link = sample.with_name("link")
    link.symlink_to(renamed)
    for path in (renamed, link):
        assert checkpoint.inspect(path).format == FORMATS[sample.suffix]


@pytest.mark.sample(3)
def test_the_command_line_shows_it(sample):
    assert FORMATS[sample.suffix] in run("inspect", sample).stdout
    leaves = json.loads(run("ls", sample, "--json").stdout)
    (tree,) = checkpoint.inspect(sample).trees.values()
    assert [leaf["name"] for leaf in leaves] == [*tree.leaves, *tree.values]
    expected = "every checksum matches" if sample.suffix == ".npz" else "complete"
    assert expected in run("verify", sample).stdout
    sample.write_bytes(sample.read_bytes()[:-20])
    assert sample.name in run("inspect", sample, code=1).stderr


def test_looking_at_them_needs_no_jax(samples):
    code = (
        "import sys; from eformer import checkpoint\n"
        "for path in sys.argv[1:]:\n"
        "    checkpoint.verify(path); checkpoint.inspect(path)\n"
        "    assert not {'jax', 'flax', 'equinox', 'tensorstore'} & set(sys.modules), path\n"
    )
    subprocess.run([sys.executable, "-c", code, *samples], check=True)


def test_a_replaced_file_is_noticed(sample):
    with checkpoint.open(sample) as view:
        held = {name: np.asarray(view[name]) for name in view if hasattr(view[name], "entry")}
    view = checkpoint.open(sample)
    view._files.close()  # as if there were too many to hold
    sample.with_name("new").write_bytes(sample.read_bytes())
    os.replace(sample.with_name("new"), sample)
    name = next(name for name in held if held[name].size)
    with pytest.raises(FileNotFoundError, match="was replaced"):
        view[name][...]


def test_a_save_does_not_mistake_it_for_ours(sample):
    checkpoint.save({"w": np.ones(2)}, sample.with_suffix(".safetensors"))
    assert checkpoint.inspect(sample).format == FORMATS[sample.suffix]


# ------------------------------------------------------------------------- written to while it is read


def rewrite(path, number):
    """As people do: the file is cut short first, and then filled."""
    tree = {f"l{i}": np.full(20_000, number, np.float32) for i in range(8)}
    with path.open("wb") as file:
        if path.suffix == ".msgpack":
            file.write(flax.serialization.to_bytes(tree))
        elif path.suffix == ".npz":
            np.savez(file, **tree)
        else:
            eqx.tree_serialise_leaves(file, tree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("suffix", [".msgpack", ".npz", ".eqx"])
def test_a_file_that_is_written_to_meanwhile_is_never_a_mixture(tmp_path, suffix):
    path, stop = tmp_path / f"model{suffix}", threading.Event()
    rewrite(path, 0)
    like = {f"l{i}": np.zeros(20_000, np.float32) for i in range(8)} if suffix == ".eqx" else None

    def keep_writing():
        number = 0
        while not stop.is_set():
            number += 1
            rewrite(path, number)
            stop.wait(0.02)

    def numbers():
        tree = checkpoint.load(path, like=like)
        return {float(x) for leaf in tree.values() for x in (leaf.min(), leaf.max())}

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(100):
            with suppress(EformerError):
                assert len(numbers()) == 1
    finally:
        stop.set()
        writer.join()
    assert len(numbers()) == 1


def test_a_view_notices_that_its_file_was_written_to(tmp_path):
    rewrite(tmp_path / "a.npz", 0)
    with checkpoint.open(tmp_path / "a.npz") as view:
        assert view["l0"][0] == 0
        time.sleep(0.02)  # the clock of files is coarse
        rewrite(tmp_path / "a.npz", 1)
        with pytest.raises(FileNotFoundError, match="has been written to since it was opened; open it again"):
            view["l0"][0]


def test_a_view_reads_on_when_its_file_is_replaced_as_a_whole(tmp_path):
    rewrite(tmp_path / "a.npz", 0)
    rewrite(tmp_path / "b.npz", 1)
    with checkpoint.open(tmp_path / "a.npz") as view:
        (tmp_path / "b.npz").replace(tmp_path / "a.npz")
        assert view["l0"][0] == 0


# -------------------------------------------------------------------------------------- other files


def test_a_file_of_no_known_format_is_an_error_that_names_the_known_formats(tmp_path):
    (tmp_path / "x.txt").write_text("hello, world")
    with pytest.raises(
        FormatError, match=r"x\.txt is not a checkpoint.*begins with b'hello, wo'.*npz.*msgpack"
    ):
        checkpoint.load(tmp_path / "x.txt")


def test_a_directory_of_such_files_names_them(tmp_path):
    np.savez(tmp_path / "weights.npz", a=np.ones(2))
    with pytest.raises(FileNotFoundError, match=r"Is it one of \['weights.npz'\]"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "but an empty file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "but a picture"),
        (b"\x1f\x8b\x08" + bytes(50), "compressed by gzip; unpack it first"),
        (
            pickle.dumps({"a": 1}),
            "but a pickle, which eformer never runs; of pickles by PyTorch, only files of torch.save are read",
        ),
    ],
)
def test_files_of_something_else_are_called_by_their_names(tmp_path, content, what):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        checkpoint.load(tmp_path / "model.bin")
    assert what in str(caught.value)


def test_a_damaged_file_of_pytorch_is_called_so(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"x")
        for number in range(50):
            archive.writestr(f"model/data/{number}", b"x")
    with pytest.raises(FormatError, match="is a file of PyTorch that cannot be read") as caught:
        checkpoint.load(tmp_path / "model.pt")
    assert len(str(caught.value)) < 400
