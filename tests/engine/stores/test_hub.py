"""Models of the Hugging Face Hub, read from a double of it: one commit at a time, and no more of it than is needed."""

import io
import json
import os
import subprocess
import sys
import traceback

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores import hub as hubs
from eformer.checkpoint import load, save
from eformer.errors import AlteredError, FormatError, NotFoundError, QuantizedError, SignatureError
from support.keys import PRIVATE, PUBLIC
from support.trees import assert_same

st = pytest.importorskip("safetensors.numpy")
library = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

MIB = 2**20
URL = "hf://org/model"


def tensors(seed, rows=4096):
    random = np.random.default_rng(seed)
    return {
        "bias": random.standard_normal(256, np.float32),
        "embed": random.standard_normal((rows, 256), np.float32),
    }


@pytest.fixture
def model(hub):
    """A model of one file."""
    found = tensors(0)
    hub.commit("org/model", {"model.safetensors": st.save(found), "config.json": b"{}", "README.md": b"#"})
    return found


@pytest.fixture
def sharded(hub):
    """A model of two files, in a directory."""
    first, second = {"a": np.arange(4 * MIB, dtype=np.float32)}, {"b": np.ones(MIB, np.float32)}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    files = {
        names[0]: st.save(first),
        names[1]: st.save(second),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    hub.commit("org/model", {f"sub/{name}": data for name, data in files.items()})
    return {**first, **second}


def assert_loaded(found, expected):
    assert_same({name: np.asarray(array) for name, array in found.items()}, expected)


# ------------------------------------------------------------------------------------------------ reading


def test_a_model_is_loaded(hub, model):
    assert_loaded(load(URL), model)


@pytest.mark.thorough
def test_a_sharded_model_in_a_directory_is_loaded(hub, sharded):
    assert_loaded(load(f"{URL}/sub"), sharded)
    assert_loaded(load(f"{URL}@main/sub/model-00002-of-00002.safetensors"), sharded)


def test_a_quantised_model_is_refused_by_its_configuration(hub):
    config = json.dumps({"quantization_config": {"quant_method": "aqlm"}}).encode()
    hub.commit(
        "org/model", {"model.safetensors": st.save({"a": np.ones(4, np.int16)}), "config.json": config}
    )
    with pytest.raises(QuantizedError, match=r"hf://org/model.* is quantised: aqlm \(config.json\)"):
        load(URL)
    hub.commit("org/model", {"model.safetensors": st.save({"a": np.ones(4, np.int16)})})
    assert_loaded(load(URL), {"a": np.ones(4, np.int16)})


def test_whole_files_come_through_the_cache_of_the_hub(hub, model, tmp_path):
    load(URL)
    assert list((tmp_path / "hub").rglob("snapshots/*/model.safetensors"))
    hub.asked.clear()
    assert_loaded(load(URL), model)
    assert hub.data_sent() == 0


def test_a_model_is_mapped_from_the_cache_of_the_hub(hub, model):
    loaded = load(URL, mmap=True)
    assert_loaded(loaded, model)
    assert hub.data_sent() < 2 * loaded["embed"].nbytes


def test_only_headers_are_read_to_inspect_a_model(hub, model, sharded):
    record = checkpoint.inspect(f"{URL}/sub")
    assert record.trees[""].leaves["a"].shape == (4 * MIB,)
    assert hub.data_sent("cdn") < 2**20
    assert hub.data_sent() < 2 * 2**20


def test_a_few_rows_are_a_ranged_request(hub):
    found = tensors(0, rows=2**16)
    hub.commit("org/model", {"model.safetensors": st.save(found)})
    with checkpoint.open(URL) as view:
        hub.asked.clear()
        np.testing.assert_array_equal(view["embed"][100:110], found["embed"][100:110])
    assert hub.data_sent() <= 2 * MIB


@pytest.mark.thorough
def test_a_server_that_ignores_ranges_is_read_only_as_far_as_needed(hub):
    found = tensors(0, rows=2**16)
    hub.commit("org/model", {"model.safetensors": st.save(found)})
    hub.ranges = False
    with checkpoint.open(URL) as view:
        np.testing.assert_array_equal(view["embed"][100:110], found["embed"][100:110])


def test_tools_read_models(hub, model, tmp_path):
    save(model, tmp_path / "local")
    assert not checkpoint.diff(URL, tmp_path / "local").changed
    checkpoint.convert(URL, tmp_path / "converted", to="tensorstore")
    assert_loaded(load(tmp_path / "converted"), model)
    assert checkpoint.verify(URL).ok


# --------------------------------------------------------------------------------------------- revisions


def test_revisions_are_told_apart(hub, model):
    other = tensors(1)
    sha = hub.commit("org/model", {"model.safetensors": st.save(other)}, "refs/pr/1")
    assert_loaded(load(URL), model)
    assert_loaded(load(f"{URL}@refs/pr/1"), other)
    assert_loaded(load(f"{URL}@{sha}"), other)


def test_a_view_stays_at_its_commit(hub, model):
    with checkpoint.open(URL) as view:
        hub.commit("org/model", {"model.safetensors": st.save(tensors(1))})
        assert_same(view["embed"][...], model["embed"])
        assert_same(view["bias"][...], model["bias"])
    assert_loaded(load(URL), tensors(1))


def test_a_load_reads_one_commit_while_another_arrives(hub, sharded, monkeypatch):
    """The revision moves between the two files of a model."""
    fetch, downloads = hubs._Model.download, []

    def download(self, name):
        if not downloads:
            hub.commit("org/model", {"sub/a.safetensors": b"other"})
        downloads.append(name)
        return fetch(self, name)

    monkeypatch.setattr(hubs._Model, "download", download)
    assert_loaded(load(f"{URL}/sub"), sharded)
    assert len(downloads) >= 2


# ------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(
    "url", ["hf://", "hf://model", "hf:///x/y", "hf://org/model@", "hf://datasets/org/name"]
)
def test_a_url_that_names_no_model_is_refused(url):
    with pytest.raises(ValueError, match=r"expected hf://org/model\[@revision\]\[/directory\]"):
        load(url)


def test_what_is_not_there_is_said(hub, model):
    with pytest.raises(NotFoundError, match=r"hf://org/other: the Hub has no such model; if it is private"):
        load("hf://org/other")
    with pytest.raises(NotFoundError, match="hf://org/model@v9: the model has no such revision"):
        load(f"{URL}@v9")
    with pytest.raises(NotFoundError, match=r"no checkpoint at hf://org/model@.*/nowhere"):
        load(f"{URL}/nowhere")


def test_names_do_not_lead_out(hub, model):
    with pytest.raises(FormatError, match="is not the name of a file"):
        hubs.hub_at(URL).read("../x")


def test_saving_is_refused(model, tmp_path):
    with pytest.raises(
        io.UnsupportedOperation,
        match=r"can only be read, or written by checkpoint\.export; save to a directory",
    ):
        save({"w": np.ones(3)}, URL)
    with pytest.raises(io.UnsupportedOperation, match="can only be read"):
        checkpoint.Run(URL).save(1, {"w": np.ones(3)})


def test_a_token_is_sent_to_the_hub_alone_and_never_shown(hub, model, monkeypatch):
    hub.gated.add("org/model")
    with pytest.raises(
        PermissionError, match="refuses to look it up; if it is private or gated, ask for access"
    ):
        load(URL)
    monkeypatch.setenv("HF_TOKEN", "hf_allowed")
    hub.asked.clear()
    assert_loaded(load(URL), model)
    tokens = {asked.path.startswith("/cdn/"): asked.token for asked in hub.asked}
    assert tokens == {False: "Bearer hf_allowed", True: None}


def test_no_secret_is_in_a_message(hub, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_allowed")
    hub.refuses = True
    with pytest.raises(
        OSError, match=r"hf://org/model@.*/model.safetensors: the request to read it on the Hub failed"
    ) as caught:
        load(URL)
    shown = "".join(traceback.format_exception(caught.value))
    assert "?..." in shown
    assert "hf_allowed" not in shown
    assert "Signature" not in shown


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'eformer-checkpoint\[hf\]'"):
        load(URL)


def test_offline_mode_is_said(hub, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        load(URL)


@pytest.mark.thorough
def test_the_command_line_inspects_a_model(hub, model, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "eformer", "inspect", URL], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "embed" in done.stdout


# ------------------------------------------------------------------------------------------------ signed


def test_a_signed_model_is_loaded_with_its_key_and_no_other(hub, tmp_path):
    save(tensors(3, 8), tmp_path / "made")
    checkpoint.sign(tmp_path / "made", private_key=PRIVATE)
    files = {each.name: each.read_bytes() for each in (tmp_path / "made").iterdir()}
    hub.commit("org/model", files | {".gitattributes": b"*.safetensors filter=lfs"})
    assert_loaded(load(URL, signed_by=PUBLIC), tensors(3, 8))
    assert checkpoint.verify(URL, signed_by=PUBLIC).ok
    data = bytearray(files["model.safetensors"])
    data[-1] ^= 1
    hub.commit("org/model", files | {"model.safetensors": bytes(data)})
    with pytest.raises(AlteredError, match="differs from its signature"):
        load(URL, signed_by=PUBLIC)
    hub.commit("org/model", {name: data for name, data in files.items() if name != "eformer.sig"})
    with pytest.raises(SignatureError, match="is not signed"):
        load(URL, signed_by=PUBLIC)
    with pytest.raises(io.UnsupportedOperation, match="can only be read"):
        checkpoint.sign(URL, private_key=PRIVATE)
