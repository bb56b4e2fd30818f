"""Rules that name axes, applied to leaves: forth and back, sizes, value steps, and errors."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from eformer._engine.record.boxes import Box
from eformer._engine.record.rename import rules_from
from eformer.errors import FormatError, MismatchError, NotFoundError
from support.lazy import applied, arrays_of, numbers

H, G, K, D, F = 4, 2, 3, 5, 7
HEADS = "h = heads\ng = 2\nk = head_dim or width / heads\n"
CONFIG = {"heads": H, "width": H * K}


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def layers(number, *shape, name="l.{}.w"):
    return {name.format(n): numbers(*shape) + 1000 * n for n in range(number)}


q, qkv, gate, heads = numbers(H * K, D), numbers((H + 2 * G) * K, D), numbers(2 * F, D), numbers(D, H, K)
D7 = numbers(7)
six, fourteen = layers(6, D), layers(14, D)
experts = {
    f"l.{i}.e.{e}.{n}": numbers(F, D) + 100 * i + 10 * e + len(n)
    for i in (0, 1)
    for e in (0, 1, 2)
    for n in ("w1", "w03")
}

CONSTRUCTS = {
    "a name": ("a.{l}.b <-> {l}.c", {"a.7.b": q}, {"7.c": q}),
    "transposed": ("a [o i] <-> b [i o]", {"a": q}, {"b": q.T}),
    "heads": ("a [(h k) d] <-> b [d h k]", {"a": q}, {"b": q.T.reshape(D, H, K)}),
    "merged heads": ("a [d h k] <-> b [(h k) d]", {"a": heads}, {"b": heads.reshape(D, H * K).T}),
    "stacked": ("l.{l}.w [d] <-> w [d l]", six, {"w": np.stack([*six.values()], 1)}),
    "stacked twice, with words": (
        "l.{l}.e.{e}.{c=w1|w03} [o i] <-> {c=wi|wo} [e l i o]",
        experts,
        {
            new: np.array([[experts[f"l.{i}.e.{e}.{old}"].T for i in (0, 1)] for e in (0, 1, 2)])
            for new, old in (("wi", "w1"), ("wo", "w03"))
        },
    ),
    "split along its only axis": ("p = 5\na [p+r] <-> b [p], c [r]", {"a": D7}, {"b": D7[:5], "c": D7[5:]}),
    "split in scalars": ("a [1+1] <-> b [1], c [1]", {"a": D7[:2]}, {"b": D7[:1], "c": D7[1:2]}),
    "every second": (
        "i = 2\nl.{(b i)}.w [d] <-> w_{i} [b d]",
        six,
        {f"w_{i}": np.stack([*six.values()][i::2]) for i in (0, 1)},
    ),
    "every second, in words": (
        "l.{(b i)}.w <-> {i=local|global}.{b}",
        six,
        {f"{('local', 'global')[n % 2]}.{n // 2}": a for n, a in enumerate(six.values())},
    ),
    "inner limits": (
        "i = 3\nl.{(b i<2)}.w [d] <-> local [d b i]\nl.{(b i=2)}.w [d] <-> global [b d]",
        six,
        {
            "local": np.stack([*six.values()]).reshape(2, 3, D)[:, :2].transpose(2, 0, 1),
            "global": np.stack([*six.values()])[2::3],
        },
    ),
    "bounded blocks and the rest": (
        "i = 4\nN = 14\nl.{(b i)<N - N % i}.w [d] <-> w_{i} [b d]\nl.{N - N % i + r}.w <-> rest_{r}",
        fourteen,
        {f"w_{i}": np.stack([fourteen[f"l.{b * 4 + i}.w"] for b in range(3)]) for i in range(4)}
        | {"rest_0": fourteen["l.12.w"], "rest_1": fourteen["l.13.w"]},
    ),
    "ragged blocks": (
        "i = 4\nl.{(b i)}.w [...] <-> w_{i} [b ...]",
        fourteen,
        {f"w_{i}": np.stack([*fourteen.values()][i::4]) for i in range(4)},
    ),
    "numbers below and from": (
        "N = 2\nl.{l<N}.w [d] <-> first [l d]\nl.{N + l}.w [d] <-> others [d l]",
        six,
        {"first": np.stack([*six.values()][:2]), "others": np.stack([*six.values()][2:], 1)},
    ),
    "halves": ("a [(c f) d] <-> {c=x|y} [d f]", {"a": gate}, {"x": gate[:F].T, "y": gate[F:].T}),
    "interleaved": ("a [d (f c)] <-> {c=x|y} [d f]", {"a": gate.T.copy()}, {"x": gate.T[:, ::2], "y": gate.T[:, 1::2]}),
    "members of an axis": (
        "{c=k|v} [(g k) d] <-> kv [c g d k]",
        {"k": numbers(G * K, D), "v": -numbers(G * K, D)},
        {"kv": np.stack([a.reshape(G, K, D).transpose(0, 2, 1) for a in (numbers(G * K, D), -numbers(G * K, D))])},
    ),
    "unequal parts": (
        "a [(h k)+(g k)+(g k) d] <-> x.q [d h k], x.k [d g k], x.v [d g k]",
        {"a": qkv},
        {
            "x.q": qkv[: H * K].T.reshape(D, H, K),
            "x.k": qkv[H * K : (H + G) * K].T.reshape(D, G, K),
            "x.v": qkv[(H + G) * K :].T.reshape(D, G, K),
        },
    ),
    "parts inside of heads": (
        "n = 2\na [(h n+r) d] <-> x [h d n], y [d h r]",
        {"a": q},
        {"x": q.reshape(H, K, D)[:, :2].transpose(0, 2, 1), "y": q.reshape(H, K, D)[:, 2:].transpose(2, 0, 1)},
    ),
    "rotary pairs": (
        "s = 2\na [(h s j) d] <-> b [d h (j s)]",
        {"a": numbers(16, D)},
        {"b": numbers(16, D).reshape(H, 2, -1, D).transpose(3, 0, 2, 1).reshape(D, H, -1)},
    ),
    "axes of one": ("a [p d] <-> b [1 p d]\nc [c 1 w] <-> d [w 1 c]", {"a": q, "c": numbers(4, 1, 3)}, {"b": q[None], "d": numbers(4, 1, 3).T}),
    "a scalar": ("a [] <-> b []\nl.{l} [] <-> s [l]", {"a": np.float32(3), "l.0": np.float32(1), "l.1": np.float32(2)}, {"b": np.array(3, np.float32), "s": np.array([1, 2], np.float32)}),
    "by the number of axes": (
        "{*p}.w [d] <-> {*p}.scale [d]\n{*p}.w [o i] <-> {*p}.kernel [i o]",
        {"a.b.w": q, "c.w": q[0]},
        {"a.b.kernel": q.T, "c.scale": q[0]},
    ),
    "stages": (
        "a.{l}.{c=x|y}.w [o i] <-> b.{l}.{c=p|q} [i o]\n--- scanned\nb.{l}.{*q} [a ...] <-> b.{*q} [a l ...]",
        {f"a.{i}.{c}.w": q + i + len(c) for i in (0, 1) for c in "xy"},
        {f"b.{c}": np.stack([(q + i + 1).T for i in (0, 1)], 1) for c in "pq"},
    ),
    "all other axes": ("l.{l}.w [a ...] <-> w [... l a]", {"l.0.w": numbers(2, 3, 4), "l.1.w": -numbers(2, 3, 4)}, {"w": np.stack([numbers(2, 3, 4), -numbers(2, 3, 4)]).transpose(2, 3, 0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_leaves_go_forth_as_numpy_does_it_and_come_back(construct):
    rules, leaves, expected = CONSTRUCTS[construct]
    there = arrays_of(applied(HEADS + rules, leaves, CONFIG))
    same(there, expected)
    same(arrays_of(applied(HEADS + rules, there, CONFIG, back=True)), leaves)


def test_an_array_that_stays_as_it_is_stays_a_stored_leaf():
    found = applied("a.{l} [v d] <-> b.{l} [v d]\nc [... d] <-> d [... d]", {"a.0": q, "c": q})
    assert {type(array).__name__ for array in found.arrays.values()} == {"InMemory"}


def test_plain_values_are_renamed_by_rules_without_axes():
    found = applied(
        "a.{l}.{*q} [d] <-> c.{*q}.{l} [d]\na.{l}.{*q} <-> b.{l}.{*q}",
        {"a.1.w": q[0]},
        plain=["a.1.step", "n"],
    )
    assert (list(found.arrays), found.plain, found.kept) == (
        ["c.w.1"],
        {"a.1.step": "b.1.step", "n": "n"},
        ["n"],
    )


def test_escaped_names_match_as_they_read():
    found = applied(
        "l.{l}.{*q} [d] <-> w.{*q} [l d]\nx.{*q} ->", {f"l%2E{n}%2Ea": q[n] for n in (0, 1)} | {"x%2Ey": q}
    )
    assert (list(found.arrays), found.left_out) == (["w.a"], ["x%2Ey"])


def test_a_number_beyond_its_limit_goes_on_to_the_next_rule():
    rules = "N = layers\nl.{N + m}.{*q} ->\nl.{l}.{*q} <-> b.{l}.{*q}"
    found = applied(rules, {"l.1.w": q, "l.2.w": q, "l.02.w": q}, {"layers": 2})
    assert (list(found.arrays), found.left_out, found.kept) == (["b.1.w", "l.02.w"], ["l.2.w"], ["l.02.w"])


def test_a_rule_with_a_condition_counts_if_its_number_is_there_and_not_zero():
    rules = "a <-> b if tied\na <-> c if 1 - tied\na <-> d if missing"
    assert list(applied(rules, {"a": q}, {"tied": True}).arrays) == ["b"]
    assert list(applied(rules, {"a": q}, {"tied": False}).arrays) == ["c"]


# --------------------------------------------------------------------------------------------- sizes


def test_sizes_come_from_like_and_nothing_has_to_be_declared():
    rules = "a.{l} [(h k)+(g k)+(g k) d] <-> q.{l} [d h k], k.{l} [d g k], v.{l} [d g k]"
    shapes = {"q.0": (D, H, K), "k.0": (D, G, K)}
    found = applied(rules, {"a.0": qkv}, shapes=shapes)
    assert {name: array.shape for name, array in found.arrays.items()} == shapes | {"v.0": (D, G, K)}


def test_sizes_come_back_from_the_shapes_of_the_other_leaves():
    leaves = {"x": numbers(3, D), "y": numbers(4, D)}
    back = applied("a [x+y d] <-> x [x d], y [y d]", leaves, back=True)
    np.testing.assert_array_equal(arrays_of(back)["a"], np.concatenate([*leaves.values()]))


@pytest.mark.parametrize(
    ("rules", "leaves", "problem"),
    [
        (
            "h = heads\na [(h k) d] <-> b [d h k]",
            {"a": numbers(13, 2)},
            "line 2: 13 rows of a are (h k), and h is 4 (heads): not divisible",
        ),
        (
            "h = 2\nk = 3\na [(h k) d] <-> b [d h k]",
            {"a": numbers(8, 2)},
            "line 3: 8 rows of a are (h k), and h is 2, k is 3: (h k) is 6",
        ),
        (
            "a [d (h k)] <-> b [d h k]",
            {"a": numbers(2, 8)},
            "line 1: (h k) of 8 cannot be divided, because neither h nor k is known. Write a line h = NUMBER",
        ),
        (
            "h = heads_of_it\nk = heads_of_it\na [(h k)] <-> b [h k]",
            {"a": numbers(8)},
            "config.json lacks heads_of_it, heads_of_it; pass config= or like=",
        ),
        (
            "i = 6\na [o i] <-> b [i o]",
            {"a": numbers(2, 16)},
            "i is 6 by line 1, and an axis of 16 in a; use another letter for one of them",
        ),
        (
            "a.{l}.e.{e} [o i] <-> w [e l i o]",
            {"a.0.e.0": q, "a.0.e.1": q, "a.1.e.1": q},
            "w [e l i o], by line 1: no source for e=0, l=1 (a.1.e.0 is missing)",
        ),
        (
            "a.{c=x|y|z} [d] <-> w [c d]",
            {"a.x": q[0], "a.y": q[0]},
            "w [c d], by line 1: no source for c=2 (a.z is missing)",
        ),
        ("a [d], b [e] <-> c [d+e]", {"a": q[0]}, "c [d+e], by line 1: no source (b is missing)"),
        ("a.{l} <-> w\nb <-> w".replace("a.{l}", "a"), {"a": q, "b": q}, "leaf 'b' would be renamed to 'w'"),
        ("a [o i] <-> w [i o]\nb [o i] <-> w [i o]", {"a": q, "b": q}, "w: written by line 1 and by line 2"),
        (
            "a.{l} [d] <-> w [l d]",
            {"a.0": q[0], "a.1": numbers(2)},
            "w, by line 1: d is 5 in a.0 [5], and 2 in a.1 [2]",
        ),
        (
            "a.{l} [d] <-> w [l d]",
            {"a.0": q[0], "a.1": q[0].astype(np.int32)},
            "w, by line 1: its sources must have one dtype, found float32 (a.0) and int32 (a.1)",
        ),
        ("a.{N + l} <-> b.{l}", {"a.0": q}, "line 1: N is unknown (config.json has no N)"),
        ("i = 1 / 2\na.{(b i)} <-> b.{b}.{i}", {"a.0": q}, "line 2: i is 0.5, expected a whole number"),
        (
            "a.{(b i)} <-> b.{b}.{i}",
            {"a.0": q},
            "line 1: the number of i is unknown; write a line i = NUMBER",
        ),
        (
            "a <-> b | add 1",
            {"a": np.ones(2, np.int32)},
            "line 1: `add 1` needs floating numbers, and b is int32",
        ),
        ("a <-> b | scale x0", {"a": q}, "line 1: x0 is unknown"),
        ("a <-> b | scale 1 - 1", {"a": q}, "line 1: `scale 1 - 1` is 0, and could not be undone"),
        (
            "a <-> b | cast int8",
            {"a": np.ones(2, np.int32)},
            "`cast int8` would cut the numbers of b, which is int32",
        ),
        ("a [v d] <-> b [v d] | pad v 3", {"a": q}, "`pad v 3` is 3, and b has 12 elements along v"),
        ("<-> b.{l} [d] | fill 1", {"a": q}, "line 1: the size of l and d is unknown; pass like="),
        (
            "l = 2\na.{l} [d] <-> w [l d]",
            {"a.0": q[0]},
            "w [l d], by line 2: no source for l=1 (a.1 is missing)",
        ),
        (
            "l = 1\na.{l} [d] <-> w [l d]",
            layers(2, D, name="a.{}"),
            "w, by line 2: l is 1 by line 1, and there is a.1",
        ),
    ],
)
def test_rules_that_do_not_fit_the_leaves_are_refused(rules, leaves, problem):
    with pytest.raises(MismatchError) as caught:
        applied(rules, leaves, {"heads": H})
    assert problem in str(caught.value)


def test_one_error_lists_all_problems():
    with pytest.raises(MismatchError) as caught:
        applied("a.{l} [d] <-> w [l d]\nb [(x y)] <-> c [x y]\nd -> c", {"a.1": q[0], "b": q[0], "d": q})
    assert len(caught.value.problems) == 2


def test_an_arrow_to_the_right_alone_cannot_be_read_backwards():
    with pytest.raises(MismatchError, match="line 1 has -> and cannot be read from right to left; write <->"):
        applied("a.{l} -> b.{l}", {"b.0": q}, back=True)
    with pytest.raises(
        MismatchError, match="line 1 has a regular expression and cannot be read from right to left"
    ):
        applied("b -> b", {"b": q}, back=True)
    assert list(applied("a.{l} -> b.{l}\nx.{l} ->\nc <-> d", {"d": q}, back=True).arrays) == ["c"]


# -------------------------------------------------------------------------------------- value steps


def test_arithmetic_is_done_in_float32_and_undone_bit_for_bit():
    norm = np.random.default_rng(0).normal(0, 0.05, 4096).astype(bfloat16)
    norm = norm[np.abs(norm) > 2**-15]
    rules = "a <-> b | add 1\nc <-> d | scale 1 / sqrt(128)"
    there = arrays_of(applied(rules, {"a": norm, "c": norm}))
    np.testing.assert_array_equal(there["b"], norm.astype(np.float32) + np.float32(1))
    np.testing.assert_array_equal(there["d"], norm.astype(np.float32) * np.float32(128**-0.5))
    back = arrays_of(applied(rules, there, {"dtype": "bfloat16"}, back=True))
    same(back, {"a": norm, "c": norm})


def test_the_result_of_arithmetic_has_the_dtype_of_like_and_a_note_if_it_is_short():
    found = applied("a <-> b | add 1\nc <-> d", {"a": q, "c": q}, dtypes={"b": "bfloat16", "d": "bfloat16"})
    assert [str(array.dtype) for array in found.arrays.values()] == ["float32", "bfloat16"]
    assert found.notes == ["b: computed in float32, stored as bfloat16; the way back is not exact"]


def test_rows_that_pad_adds_are_zero_and_cut_on_the_way_back():
    rules = "v = vocab\na [v d] <-> b [d v] | pad v 16 | scale 2"
    config = {"vocab": 12}
    there = arrays_of(applied(rules, {"a": q}, config))
    expected = np.pad(q.T * 2, ((0, 0), (0, 4)))
    same(there, {"b": expected})
    same(arrays_of(applied(rules, there, config, back=True)), {"a": q})
    same(arrays_of(applied(rules, there, back=True, shapes={"a": (12, D)})), {"a": q})
    with pytest.raises(MismatchError, match=r"the rows that `pad v 16` added to b are unknown, because v is"):
        applied(rules, there, back=True)
    with pytest.raises(MismatchError, match="b has 16 elements along v, fewer than 99"):
        applied(rules, there, {"vocab": 99}, back=True)


def test_padding_is_not_read():
    found = applied("a [v d] <-> b [v d] | pad v 100", {"a": q}).arrays["b"]
    assert not found.read(Box((50, 0), (100, D))).any()
    assert found.inners[0].elements_read == 0


def test_a_cast_wins_and_ends_on_the_way_back_in_the_dtype_of_the_other_side():
    rules = "a <-> b | cast f32"
    found = applied(rules, {"a": q.astype(bfloat16)}).arrays["b"]
    assert (str(found.dtype), found.keeps_dtype) == ("float32", True)
    there = {"b": q}
    assert str(applied(rules, there, {"torch_dtype": "bfloat16"}, back=True).arrays["a"].dtype) == "bfloat16"
    assert (
        str(
            applied(rules, there, {"dtype": "float16"}, back=True, dtypes={"a": "bfloat16"}).arrays["a"].dtype
        )
        == "bfloat16"
    )
    assert str(applied(rules, there, back=True).arrays["a"].dtype) == "float32"


def test_a_constant_leaf_is_made_and_left_out_on_the_way_back():
    rules = "n = 3\n<-> ones.{l<2} [n 1] | fill 1 / 2"
    there = arrays_of(applied(rules, {}))
    same(there, {f"ones.{i}": np.full((3, 1), 0.5, np.float32) for i in (0, 1)})
    assert applied(rules, there, back=True).left_out == ["ones.0", "ones.1"]
    like = {"shapes": {"ones.5": (3, 1), "b": (2,)}, "dtypes": {"ones.5": "bfloat16"}}
    same(
        arrays_of(applied("<-> ones.{l} [n m] | fill 0", {}, **like)), {"ones.5": np.zeros((3, 1), bfloat16)}
    )


@pytest.mark.parametrize(("number", "dtype"), [("3 / 2", "int32"), ("300", "int8"), ("-1", "uint8")])
def test_a_constant_that_the_dtype_of_like_does_not_hold_is_refused(number, dtype):
    with pytest.raises(
        MismatchError, match=f"line 1: b is {dtype}, which does not hold the number of `fill {number}`"
    ):
        applied(f"<-> b [d] | fill {number}", {}, shapes={"b": (3,)}, dtypes={"b": dtype})


@pytest.mark.parametrize(
    "rules",
    [
        "a.{l} [d] <-> b.{l} [d] | cast float32 | pad d 8",
        "a.{l} [d] <-> b.{l} [d] | cast float32\n---\nb.{l} [d] <-> b [l d]",
        "a.{l} <-> b.{l}\n<-> c [d] | fill 1 | cast float32",
    ],
)
def test_a_cast_wins_over_other_dtypes_behind_all_steps_and_stages(rules):
    found = applied(rules, layers(2, D, name="a.{}"), shapes={"c": (2,)} if "fill" in rules else {})
    name = next(name for name in ("c", "b", "b.0") if name in found.arrays)
    assert found.arrays[name].keeps_dtype
    assert found.arrays[name].dtype == np.float32


def test_tied_heads():
    rules = "e.w <-> e\nhead.w or e.w [v d] <-> head [d v]"
    same(arrays_of(applied(rules, {"e.w": q})), {"e": q, "head": q.T})
    same(arrays_of(applied(rules, {"e.w": q, "head.w": q + 1})), {"e": q, "head": q.T + 1})
    assert list(applied(rules, {"e.w": q}, shapes={"e": q.shape}).arrays) == ["e"]
    there = {"e": q, "head": q.T.copy()}
    same(arrays_of(applied(rules, there, back=True)), {"e.w": q, "head.w": q})
    tied = applied(rules, there, {"text_config": {"tie_word_embeddings": True}}, back=True)
    tied.require_tied()
    assert list(tied.arrays) == ["e.w"]


@pytest.mark.parametrize(
    "rules",
    [
        "e.w <-> e\nhead.w or e.w [v d] <-> head [v d]",
        "m.{*q} <-> {*q}\n---\ne.w <-> e\nhead.w or e.w [v d] <-> head [v d]",
    ],
    ids=["as it is", "renamed by another stage"],
)
def test_every_tied_head_is_compared_before_it_is_left_out(rules):
    tied = {"tie_word_embeddings": True, "dtype": "bfloat16"}
    x = numbers(F, D) / 3
    same_head, other_head = (
        applied(rules, {"e": x, "head": head}, tied, back=True) for head in (x.copy(), x + 0.5)
    )
    same_head.require_tied()
    assert [name.removeprefix("m.") for name in same_head.arrays] == ["e.w"]
    with pytest.raises(MismatchError, match="head is not the embedding"):
        other_head.require_tied()


def test_a_head_without_its_embedding_is_kept():
    rules = "e.w <-> e\nhead.w or e.w [v d] <-> head [d v]"
    found = applied(rules, {"head": q.T}, {"tie_word_embeddings": True}, back=True)
    same(arrays_of(found), {"head.w": q})


def test_tied_leaves_may_be_scalars_and_large_integers():
    rules = "a or b <-> c\nb <-> d"
    found = applied(
        rules, {"c": np.int64(2**24 + 1), "d": np.int64(2**24)}, {"tie_word_embeddings": 1}, back=True
    )
    with pytest.raises(MismatchError, match=r"c is not the embedding, b \(max difference 1\)"):
        found.require_tied()


def test_a_head_that_is_not_the_embedding_cannot_be_left_out():
    rules = "e.w <-> e\nhead.w or e.w [v d] <-> head [d v]"
    found = applied(rules, {"e": q, "head": q.T + 0.5}, {"tie_word_embeddings": True}, back=True)
    with pytest.raises(MismatchError) as caught:
        found.require_tied()
    assert "head is not the embedding, e.w (max difference 0.5); set tie_word_embeddings to false" in str(
        caught.value
    )


# ------------------------------------------------------------------------------------ texts and books


def test_files_and_texts_of_a_list_are_stages_and_lines_in_a_row_are_one(tmp_path):
    (tmp_path / "first.rules").write_text("h = 4\na.{l} [(h k)] <-> b.{l} [h k]\n")
    rules = [tmp_path / "first.rules", "h = 3", "b.{l} [h d] <-> c [l h d]", r"x -> y", ("z", "w")]
    leaves = {"a.0": numbers(12), "a.1": numbers(12)}
    with pytest.raises(MismatchError, match=r"h is 3 by line 1, and an axis of 4 in b\.0"):
        applied(rules, leaves)
    found = applied([rules[0], *rules[2:]], leaves | {"x": q, "z": q})
    assert {name: array.shape for name, array in found.arrays.items()} == {
        "y": q.shape,
        "w": q.shape,
        "c": (2, 4, 3),
    }
    assert found.transforms["c"] == "[(h k)] to [h k], [h d] to [l h d]"


def test_regular_expressions_and_axes_stand_side_by_side():
    rules = "a.{l} [o i] <-> b [l i o]\nc\\.(\\d) -> d | transpose | stack \\1\n.*bias ->"
    found = applied(rules, {"a.0": q, "c.0": q, "c.1": q, "x.bias": q})
    assert {name: array.shape for name, array in found.arrays.items()} == {"b": (1, D, 12), "d": (2, D, 12)}


def test_rules_that_match_no_leaf_and_leaves_that_no_rule_matches_have_hints():
    found = applied("model.{l}.weight [d] <-> w [l d]", {"model.x.weight": q})
    assert found.kept == ["model.x.weight (nearest is line 1, model.{l}.weight [d] <-> w [l d])"]
    assert list(found.unused_rules) == ["line 1"]


def test_a_leaf_that_a_book_does_not_know_is_refused():
    with pytest.raises(MismatchError) as caught:
        applied("llama/tunix", {"model.norm.weight": q[0], "lm_head.weight": numbers(2, 3, 4)}, CONFIG)
    assert "lm_head.weight: no rule of llama/tunix matches (llama/tunix, line" in str(caught.value)
    assert "would, but has 2 axes and the leaf has 3: [2, 3, 4])" in str(caught.value)


def test_a_layout_is_that_of_the_type_of_the_model():
    assert list(applied("tunix", {"model.norm.weight": q[0]}, {"model_type": "llama"}).arrays) == [
        "final_norm.w"
    ]
    with pytest.raises(NotFoundError, match="'tunix' is a layout of several families"):
        applied("tunix", {"model.norm.weight": q[0]})


def test_a_name_that_is_no_book_and_no_file_names_the_books_near_by():
    with pytest.raises(NotFoundError, match="no rules for the layout 'maxtex' of 'llama', which has flax"):
        rules_from("llama/maxtex")
    with pytest.raises(FileNotFoundError):
        rules_from("llama.rules")


@pytest.mark.parametrize(
    "text", ["{*a}x{*b}x{*c}y <-> {*a}.{*b}.{*c}", "{l}{c=9|99}{d=9|99}{e=9|99}y [] <-> {l}.{c}.{d}.{e} []"]
)
def test_hostile_names_do_not_take_long(text):
    found = applied(text, {"x" * 300: np.float32(1), "9" * 400: np.float32(1)})
    assert len(found.kept) == 2


@pytest.mark.parametrize(
    ("rules", "name", "shape", "problem"),
    [
        ("l.{l}.{e} [d] <-> w [l e d]", "l.9999999999.8888888888", (2,), "no source for l=0, e=0"),
        (
            "w [l d] <-> w.{l} [d]",
            "w",
            (10**9, 0),
            "makes at most 1,048,576 leaves of one, and l is 1,000,000,000",
        ),
        ("<-> w.{l<10000000000} [] | fill 1", "w", (), "makes at most 1,048,576 leaves of one"),
        ("i = 0\nl.{(b i)} <-> w.{b}.{i}", "l.1", (), "the number of i is unknown"),
    ],
)
def test_huge_numbers_are_refused_soon(rules, name, shape, problem):
    with pytest.raises(MismatchError, match=problem):
        applied(rules, {name: np.empty(shape, np.float32)})


def test_a_text_with_a_zero_byte_is_no_rule():
    with pytest.raises(FormatError):
        rules_from("a{\0} <-> b")


def test_a_rule_that_stacks_fewer_leaves_than_beside_them_is_noted():
    rule = "{*p}.{l}.{*q} [...] <-> {*p}.{*q} [l ...]"
    leaves = layers(3, D, name="dec.{}.a") | layers(2, D, name="dec.{}.b") | layers(2, D, name="enc.{}.a")
    (note,) = applied(rule, leaves).notes
    assert note == "line 1 stacks different numbers of leaves: dec.b of 2; dec.a of 3; some may be missing"
    assert not applied(rule, {name: leaf for name, leaf in leaves.items() if name[-1] == "a"}).notes
