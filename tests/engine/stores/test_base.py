"""The effect of a commit, as data."""

from types import SimpleNamespace

from eformer._engine.record.manifest import Manifest, TreeEntry
from eformer._engine.stores.base import Change, NoIndex, Replaced


def manifest_of(**roots):
    """A manifest whose trees are in these directories."""
    trees = {
        prefix: TreeEntry(save_id="", saved_at="", written_by="", block=1, files=(), raw_root=root)
        for prefix, root in roots.items()
    }
    return Manifest(format="tensorstore", trees=trees)


def test_names_that_the_next_index_leaves_out_and_replaced_directories_are_gone():
    before = SimpleNamespace(manifest=manifest_of(a="a.1", b="b.1"))
    change = Change(
        manifest=manifest_of(a="a.1", b="b.2"), replaced=[Replaced("c", "0" * 16), Replaced("of others", "")]
    )
    assert change.gone(before) == {"b.1", "c"}


def test_nothing_is_gone_if_an_index_is_not_known():
    assert Change().gone(SimpleNamespace(manifest=manifest_of(a="a.1"))) == set()
    assert Change(manifest=manifest_of(a="a.1")).gone(NoIndex()) == set()
