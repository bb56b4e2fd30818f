"""Fold trees for display: repeated modules are shown once, and nothing is lost."""

from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.names import escape, join_name
from eformer._engine.record.outline import LeafLine, OutlineNode, outline, tree_rows
from eformer._engine.record.text import bar, count, shortened, size
from support.columns import paths_of
from support.trees import keys


def leaves(node):
    """Count the leaves that a node stands for."""
    return node.count * (1 if node.line else sum(map(leaves, node.children)))


def labels(node: OutlineNode):
    return [(child.label, child.count, labels(child)) for child in node.children]


def lines(*names, what="f32[2]"):
    return [LeafLine(name, what, 8) for name in names]


def test_layers_that_are_alike_are_one():
    names = [f"layers.{i}.{part}" for i in range(12) for part in ("attn.q", "attn.k", "norm")]
    root = outline(lines("embed", *names))
    layer = [("attn", 1, [("q", 1, []), ("k", 1, [])]), ("norm", 1, [])]
    assert labels(root) == [("embed", 1, []), ("layers", 1, [("0-11", 12, layer)])]
    assert leaves(root) == 37
    assert root.nbytes == 37 * 8


def test_the_order_of_shards_does_not_matter():
    parts = ("attn.q", "attn.k", "mlp.experts.0", "mlp.experts.1", "norm")
    names = [f"layers.{i}.{part}" for i in range(12) for part in parts]
    first, second = names[1::2], [*reversed(names[::2])]  # every layer is in both files
    (layers,) = outline(lines(*first, *second)).children
    assert [(child.label, child.count) for child in layers.children] == [("0-11", 12)]
    assert leaves(layers) == len(names)
    assert {label for label, *_ in labels(layers.children[0])} == {"attn", "mlp.experts", "norm"}


def test_layers_that_differ_are_not():
    different = [*lines("layers.0.w", "layers.1.w"), LeafLine("layers.2.w", "f32[3]", 12)]
    (layers,) = outline(different).children
    assert [(child.label, child.count) for child in layers.children] == [("0-1.w", 2), ("2.w", 1)]


def test_numbers_that_do_not_follow_each_other_are_not():
    (layers,) = outline(lines("layers.0.w", "layers.2.w")).children
    assert [child.count for child in layers.children] == [1, 1]


def test_a_number_inside_of_a_name_counts():
    assert [(c.label, c.count) for c in outline(lines("block_0", "block_1", "block_2")).children] == [
        ("block_0-2", 3)
    ]


def test_numbers_are_in_their_own_order_and_not_in_that_of_the_alphabet():
    root = outline(lines("a", *sorted(f"block_{i}.w" for i in range(25)), "z"))
    assert labels(root) == [("a", 1, []), ("block_0-24.w", 25, []), ("z", 1, [])]


def test_a_leaf_without_a_name_is_shown():
    root = outline([LeafLine("", "f32[2]", 8)])
    assert root.line
    assert root.nbytes == 8


names = st.lists(
    st.lists(
        st.sampled_from(["a", "b", "0", "1", "2", "x_1", "x_2", "9" * 5000]), min_size=1, max_size=4
    ).map(tuple),
    unique=True,
    max_size=30,
).filter(lambda found: not any(a != b and b[: len(a)] == a for a in found for b in found))


@given(names)
def test_nothing_is_lost(found):
    root = outline([LeafLine(".".join(parts), "x", 3) for parts in found])
    assert leaves(root) == len(found)
    assert root.nbytes == 3 * len(found)


def shown(names):
    rows = tree_rows([(name, "f4") for name in names])
    return [path for path, _ in paths_of([row.depth for row in rows], [row.part for row in rows])]


@given(st.sets(st.lists(keys, min_size=1, max_size=4).map(lambda parts: join_name(map(escape, parts)))))
def test_every_leaf_has_one_row_with_its_own_path(names):
    names = sorted(names)
    rows = tree_rows([(name, "f4") for name in names])
    paths = paths_of([row.depth for row in rows], [row.part for row in rows])
    leaves = [(row.leaf, path) for row, (path, is_leaf) in zip(rows, paths, strict=True) if is_leaf]
    assert sorted(leaves) == list(enumerate(names))
    assert all(is_leaf == (row.leaf >= 0) for row, (_, is_leaf) in zip(rows, paths, strict=True))


def test_layers_that_are_alike_come_below_one_row_in_the_order_of_their_numbers():
    names = [f"layers.{n}.{part}" for n in (10, 9, 8, 11) for part in ("a", "b")]
    assert shown(names)[1:4] == ["layers.%*8-11", "layers.%*8-11.8", "layers.8.a"]


def test_layers_of_other_kinds_stay_apart():
    kinds = {
        "h.0.a": "f4[2]",
        "h.0.b": "f4",
        "h.1.a": "f4[3]",
        "h.1.b": "f4",
        "h.2.a": "f4[2]",
        "h.2.b": "f4",
    }
    rows = tree_rows(list(kinds.items()))
    assert not any(row.part.startswith("%*") for row in rows)


def test_a_leaf_that_is_also_a_module_is_shown_in_it():
    assert shown(["a", "a.b"]) == ["", "a", "a", "a.b"]


def test_chains_are_one_row():
    assert shown(["a.b.c.w", "a.b.c.v"]) == ["", "a.b.c", "a.b.c.w", "a.b.c.v"]


def test_a_bare_leaf_and_deep_names_are_rows():
    assert shown(["%"]) == ["", "%"]
    deep = ".".join("x" * 300)
    assert shown([deep])[-1] == deep


def test_a_number_beside_an_escape_counts_and_one_that_is_an_escape_does_not():
    names = [f"layer%20{n}.{part}" for n in range(3) for part in "ab"]
    assert shown(names)[1] == "%*layer%200-2"
    assert [child.label for child in outline(lines(*names)).children] == ["layer 0-2"]
    escapes = ("a%2E.x", "a%2E.y", "a%2F.x", "a%2F.y", "a%30.x", "a%30.y")
    assert not any("%*" in path for path in shown(escapes))


def test_a_leaf_that_is_also_a_module_is_a_line_of_its_own():
    (module,) = outline(lines("a", "a.b")).children
    assert labels(module) == [("(itself)", 1, []), ("b", 1, [])]
    assert module.nbytes == 16


def test_folds_inside_of_folds_keep_their_counts():
    names = [f"block.{n}.experts.{m}.w" for n in range(3) for m in range(4)]
    (block,) = outline(lines(*names)).children
    assert labels(block) == [("0-2.experts", 3, [("0-3.w", 4, [])])]
    assert leaves(block) == 12


@given(st.integers(0, 10**18))
def test_sizes_have_three_digits_and_a_unit(nbytes):
    number, unit = size(nbytes).split()
    assert unit in ("B", "kB", "MB", "GB", "TB", "PB")
    assert 0 <= float(number) < 1000 or unit == "PB"
    factor = 1000 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert abs(float(number) * factor - nbytes) <= 0.006 * nbytes


def test_words_for_numbers():
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 999_600, 2_500_000_000)] == [
        "0 B", "999 B", "1 kB", "1.23 MB", "1 MB", "2.5 GB",
    ]  # fmt: skip
    assert (count(1, "array"), count(12_000, "array")) == ("1 array", "12,000 arrays")


@given(st.floats(0, 1), st.integers(1, 40))
def test_bars_are_as_long_as_they_should_be(part, width):
    drawn = bar(part, width)
    assert len(drawn) <= width
    assert bool(drawn) == (part > 0)


@given(st.text(max_size=60), st.integers(3, 40))
def test_a_shortened_text_keeps_its_ends(text, width):
    short = shortened(text, width)
    assert len(short) <= width or short == text
    assert short == text or (text.startswith(short.partition("…")[0]))
