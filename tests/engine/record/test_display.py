"""Show checkpoints at a prompt and in a notebook."""

from html.parser import HTMLParser

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.display import TreeSummary, as_html, as_text
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry, encode_leaves
from eformer._engine.record.outline import LeafLine
from eformer.checkpoint import Inspection, save

TAGS = {"div", "style", "span", "b", "i", "details", "summary"}
VOID = {"br", "hr", "img"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shown") / "model"
    layers = [{"w": jnp.full((64, 64), i, jnp.bfloat16), "b": jnp.zeros(64)} for i in range(12)]
    save({"layers": layers, "step": 7, "embed": np.ones((100, 8))}, path)
    return path


class Page(HTMLParser):
    """Parse a snippet of HTML; every tag must be closed."""

    def __init__(self, snippet):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(snippet)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def manifest(entries, values=()):
    tree = TreeEntry(
        save_id="s",
        saved_at="today",
        written_by="somebody",
        block=2**20,
        files=(DataFile("f", 2**40),),
        raw_values=dict(values),
        raw_leaves=encode_leaves(entries),
    )
    return Inspection(format="safetensors", version=1, trees={"": tree})


def leaf(elements=2, **more):
    extent = Extent(0, 0, 4 * elements, "0" * 32)
    return msgspec.structs.replace(LeafEntry("float32", (elements,), (extent,)), **more)


def test_a_manifest_shows_its_trees(path):
    shown = repr(checkpoint.inspect(path))
    title, *lines = shown.split("\n")
    assert title == "checkpoint (safetensors)"
    for part in (
        "written by  eformer",
        "25 arrays, 50,720 parameters, 108 kB, 1 plain value",
        "bfloat16 98.3 kB",
    ):
        assert part in shown
    outlined = "\n".join(lines[3:])
    assert outlined == (
        "    embed  float64[100, 8]  6.4 kB\n"
        "    layers  101 kB\n"
        "      0-11 ×12  101 kB\n"
        "        b  float32[64]  256 B\n"
        "        w  bfloat16[64, 64]  8.19 kB\n"
        "    step  = 7"
    )


def test_a_view_says_where_it_is(path):
    with checkpoint.open(path) as view:
        pass
    assert repr(view).startswith(f"{path} (safetensors)\n  written by")  # closed or not
    assert repr(view).split("\n")[1:] == repr(checkpoint.inspect(path)).split("\n")[1:]
    assert str(path) in Page(view._repr_html_()).text


def test_a_tree_shows_its_leaves(path):
    tree = checkpoint.inspect(path).trees[""]
    assert repr(tree).startswith("tree\n  written by")
    assert "×12" in Page(tree._repr_html_()).text


def test_several_trees_are_shown_with_their_prefixes(tmp_path):
    for prefix in ("ema", "model"):
        save({"w": np.ones(2)}, tmp_path, prefix=prefix)
    shown = repr(checkpoint.inspect(tmp_path))
    assert shown.count("w  float64[2]") == 2
    assert "prefix      ema" in shown
    assert "prefix      ema" in repr(checkpoint.open(tmp_path, prefix="ema"))
    assert "prefix: model" in Page(checkpoint.inspect(tmp_path)._repr_html_()).text


def test_modules_fold_in_a_notebook(path):
    page = Page(checkpoint.inspect(path)._repr_html_())
    assert page.tags.count("details") == page.tags.count("summary") == 2
    assert set(page.tags) == TAGS
    assert "0-11 ×12" in page.text


def test_names_are_escaped_for_html_and_terminals(tmp_path):
    evil = "<script>alert(1)</script>"
    tree = {evil: {"a": np.ones(2), '"><b>': f"{evil}&amp;"}, "\x1b[31mred": np.ones(3), "new\nline": 1}
    save(tree, tmp_path / "<i>x", prefix=evil)
    for shown in (checkpoint.inspect(tmp_path / "<i>x"), checkpoint.open(tmp_path / "<i>x")):
        page = Page(shown._repr_html_())
        assert set(page.tags) <= TAGS
        assert evil in page.text
        assert "\x1b" not in page.text + repr(shown)
        assert "new\nline" not in repr(shown)


def test_very_many_leaves_are_counted_and_not_shown():
    found = manifest({f"{chr(97 + i % 26)}{i}.w": leaf(i + 1) for i in range(3_000)})
    assert "3,000 arrays" in repr(found)
    assert repr(found).count("\n") < 60
    assert "... and 2,960 more rows" in repr(found)
    shown = found._repr_html_()
    assert len(shown) < 200_000
    assert "... and 2,000 more rows" in Page(shown).text


def test_very_many_trees_are_counted_and_not_shown():
    trees = [
        TreeSummary(f"t{i}", lines=[LeafLine(f"w{j}x{j}", "x", 1) for j in range(9)], arrays=9)
        for i in range(500)
    ]
    shown = as_text("many", trees)
    assert shown.count("\n") < 100
    assert "... and 5 more rows" in shown
    assert shown.endswith("... and 492 more trees")
    assert "... and 492 more trees" in Page(as_html("many", trees)).text


def test_very_long_output_is_cut():
    found = manifest({"x" * 10_000: leaf(), ".".join("a" * 3000): leaf()}, {"y": "z" * 10_000})
    assert max(map(len, repr(found).split("\n"))) < 250
    assert len(found._repr_html_()) < 50_000


@pytest.mark.parametrize(
    "entry",
    [leaf(shape=(3,)), leaf(dtype="nonsense"), leaf(extents=()), leaf(shape=(2**62,))],
    ids=["shape", "dtype", "extents", "huge"],
)
def test_damage_is_shown(entry):
    found = manifest({"good": leaf(), "bad": entry})
    assert "cannot be read" in repr(found)
    assert "'bad' is invalid" in repr(found)
    assert "'bad' is invalid" in Page(found._repr_html_()).text
    assert "somebody" in repr(found.trees[""])


def test_malformed_leaves_are_shown():
    found = manifest({})
    tree = msgspec.structs.replace(found.trees[""], raw_leaves=msgspec.Raw(b'{"a": 1'))
    assert "list of leaves is invalid" in repr(tree)


def test_unreadable_values_are_shown():
    values = {"unknown": {"what": 1}, "opaque": {"opaque": "<lock>"}, "digits": {"int": hex(10**5000)}}
    shown = repr(manifest({"w": leaf()}, values))
    assert "unknown  not a recorded value" in shown
    assert "opaque  this value was not recorded" in shown
    assert "digits  Exceeds the limit" in shown
    assert "w  float32[2]" in shown


def test_a_leaf_without_a_name_is_shown(tmp_path):
    save(np.ones(3), tmp_path)
    assert "float64[3]  24 B" in repr(checkpoint.inspect(tmp_path))
    assert "float64[3]" in Page(checkpoint.inspect(tmp_path)._repr_html_()).text


def test_nothing_is_shown_as_nothing():
    assert repr(Inspection(format="safetensors", version=1, trees={})) == "checkpoint (safetensors)"
    assert "0 arrays, 0 parameters, 0 B" in repr(manifest({}))
    Page(manifest({})._repr_html_())
