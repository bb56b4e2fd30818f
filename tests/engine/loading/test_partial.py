"""Loads that take a part of a checkpoint, or change it on the way."""

import ast
import functools
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.loading.sources import TreeReader
from eformer.checkpoint import LoadReport, load, save
from eformer.errors import CorruptionError, LeafError, MismatchError, StructureError
from support.meshes import meshes
from support.trees import assert_same


@pytest.fixture(params=["safetensors", "tensorstore"])
def pretrained(tmp_path, request):
    tree = {"enc": {"w": np.arange(12.0, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)},
            "head": np.full((3, 2), 5, np.float32), "step": 7}  # fmt: skip
    save(tree, tmp_path / "pretrained", format=request.param)
    return tmp_path / "pretrained", tree


# --------------------------------------------------------------------------------------------- partial


def test_what_the_checkpoint_lacks_stays_and_what_like_lacks_is_left_out(pretrained):
    path, tree = pretrained
    like = {"enc": {"w": jnp.zeros((4, 3)), "b": np.zeros(3, np.float32)}, "new": jnp.full(2, 9.0), "n": 4}
    found, report = load(path, like=like, partial=True, return_report=True)
    assert found["new"] is like["new"]
    assert found["n"] == 4
    assert_same(found["enc"], {"b": tree["enc"]["b"], "w": jnp.asarray(tree["enc"]["w"])})
    assert report == LoadReport(loaded=("enc.b", "enc.w"), kept=("n", "new"), left_out=("head", "step"))
    assert (
        str(report)
        == "2 leaves loaded, 2 kept as they were (n; new), 2 of the checkpoint left out (head; step)"
    )


def test_without_a_report_one_line_is_logged(pretrained, caplog):
    path, _ = pretrained
    with caplog.at_level(logging.WARNING, "eformer"):
        load(path, like={"step": 0, "new": 1}, partial=True)
    (line,) = caplog.messages
    assert (
        line
        == f"{path}: 1 leaf loaded, 1 kept as they were (new), 3 of the checkpoint left out (enc.b; enc.w; head)"
    )
    caplog.clear()
    load(path, like={"step": 0, "new": 1}, partial=True, return_report=True)
    load(path, like=load(path), partial=True)  # nothing to tell
    assert caplog.messages == []


def test_a_leaf_without_a_value_is_an_error_that_names_it(pretrained):
    path, _ = pretrained
    like = {
        "step": 0,
        "new": jax.ShapeDtypeStruct((2,), jnp.float32),
        "placed": NamedSharding(meshes()[1], P()),
    }
    with pytest.raises(MismatchError) as error:
        load(path, like=like, partial=True)
    assert error.value.problems == (
        "missing leaf 'new': the checkpoint does not have it, and `like` has a ShapeDtypeStruct, not a value",
        "missing leaf 'placed': the checkpoint does not have it, and `like` has a NamedSharding, not a value",
    )


def test_shapes_and_dtypes_still_have_to_fit(pretrained):
    path, _ = pretrained
    like = {"head": jnp.zeros((3, 4)), "enc": {"b": jnp.zeros(3, jnp.int32)}, "new": 0}
    with pytest.raises(MismatchError) as error:
        load(path, like=like, partial=True)
    assert error.value.problems == (
        "leaf 'enc.b': expected int32[3], found float32[3]",
        "leaf 'head': expected float32[3, 4], found float32[3, 2]; resize= changes shapes, rename={'head': None} leaves it out",
    )


def test_a_donated_array_cannot_stay(pretrained):
    path, _ = pretrained
    gone = jnp.zeros(2)
    gone.delete()
    with pytest.raises(MismatchError, match=r"missing leaf 'new': .* `into` has an array that was deleted"):
        load(path, into={"step": 0, "new": gone}, partial=True)


def test_nothing_in_common_is_an_error(pretrained):
    path, _ = pretrained
    with pytest.raises(MismatchError, match="no leaf has the same name in both") as error:
        load(path, like={"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}, partial=True)
    assert error.value.advice == "root='enc' would find 2 of the 2 missing leaves"


@pytest.mark.parametrize(
    ("like", "advice"),
    [({"w": 0, "b": 0, "x": 0}, "root='enc' would find 2 of the 3 missing leaves"),
     ({"params": {"w": 0, "b": 0}, "step": 0},
      r"rename={'enc\\.(.*)': 'params.\\1'} would find 2 of the 2 missing leaves; "
      "partial=True would keep 2 of `like` as they are and leave 3 of the checkpoint out"),
     ({"params": {"v": 0}, "step": 0}, "rename= gives leaves of the checkpoint other names; "
      "partial=True would keep 1 of `like` as they are and leave 3 of the checkpoint out"),
     ({"step": 0}, "partial=True would leave 3 of the checkpoint out")],
)  # fmt: skip
def test_a_mismatch_says_which_argument_would_help(pretrained, like, advice):
    path, _ = pretrained
    with pytest.raises(MismatchError) as error:
        load(path, like=like)
    assert error.value.advice == advice
    assert str(error.value).endswith(advice)


@pytest.mark.parametrize(
    ("saved", "like", "rename"),
    [
        ({"a": {"x": 0, "y": 0}}, {"a": {"x": 0}, "b": {"y": 0}}, None),  # the rule would take a.x away
        ({"a": {"z": 0, "w": 0}, "b": {"z": 0}}, {"b": {"z": 0, "w": 0}}, None),  # two leaves would be b.z
        ({"q": {"x": 0}}, {"b": {"x": 0}}, {r"q\.(.*)": r"a.\1"}),  # the rule would replace this one
        ({"a": {"x": 0}}, {"b | transpose": {"x": 0}}, None),
        ({"a": {"x": 0}}, {" b": {"x": 0}}, None),
    ],
    ids=["leaves on both sides", "names in use", "with rules", "a step", "a space"],
)
def test_no_rule_is_advised_that_would_not_help(tmp_path, saved, like, rename):
    save(saved, tmp_path / "x")
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "x", like=like, rename=rename)
    assert "rename= gives leaves of the checkpoint other names" in error.value.advice
    assert "would find" not in error.value.advice


def test_the_hint_of_a_mismatch_is_a_leaf_that_has_no_counterpart_either(tmp_path):
    layers = {str(n): {"kernel": 0} for n in range(4)}
    save({"layers": layers}, tmp_path / "x")
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "x", like={"layers": layers | {"0": {"kernal": 0}}})
    missing, unexpected = error.value.problems
    assert "'layers.0.kernal' (nearest is 'layers.0.kernel')" in missing
    assert "'layers.0.kernel' (nearest is 'layers.0.kernal')" in unexpected


@pytest.mark.parametrize("names", [("a.b", "b%"), ("a(", "b\\g"), ("a", "b{0}")])
def test_the_advised_rule_helps_names_with_any_characters(tmp_path, names):
    old, new = names
    save({old: {"x": 1, "y": 2}}, tmp_path / "x")
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "x", like={new: {"x": 0, "y": 0}})
    rule = ast.literal_eval(error.value.advice.partition("rename=")[2].partition(" would")[0])
    assert load(tmp_path / "x", like={new: {"x": 0, "y": 0}}, rename=rule) == {new: {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    "arguments", [{"partial": True}, {"resize": lambda array, leaf, name: array}, {"dtype": "like"}]
)
def test_arguments_about_like_need_one(pretrained, arguments):
    with pytest.raises(ValueError, match=r"(partial|resize|dtype=\"like\") needs like= or into="):
        load(pretrained[0], **arguments)


def test_like_and_into_are_one_or_the_other(pretrained):
    with pytest.raises(ValueError, match="like= or into=, not both"):
        load(pretrained[0], like={}, into={})


def test_the_result_of_into_is_complete_also_without_modules(pretrained):
    path, tree = pretrained
    assert_same(load(path, into=tree), jax.tree.map(lambda leaf: leaf, tree))
    with pytest.raises(MismatchError, match="does not fit `into`"):
        load(path, into={"step": 0})


# ---------------------------------------------------------------------------------------------- resize


def grown(array, leaf):
    return np.concatenate([array, np.asarray(leaf)[len(array) :]])


@pytest.mark.parametrize(
    "resize", [{"*.w": grown}, {"enc.w": grown}, lambda array, leaf, name: grown(array, leaf)]
)
def test_arrays_of_another_shape_are_resized(pretrained, resize):
    path, tree = pretrained
    like = {"enc": {"w": jnp.full((6, 3), -1.0), "b": jnp.zeros(3)}, "head": jnp.zeros((3, 2)), "step": 0}
    found, report = load(path, like=like, resize=resize, return_report=True)
    assert_same(found["enc"]["w"], jnp.concatenate([jnp.asarray(tree["enc"]["w"]), jnp.full((2, 3), -1.0)]))
    assert report.resized == ("enc.w",)


def test_a_resized_array_goes_where_like_has_it(pretrained):
    path, tree = pretrained
    sharding = NamedSharding(meshes()[1], P("x"))
    like = {"w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding), "b": jnp.zeros(3)}
    double = {"w": lambda array, leaf: np.tile(array, (leaf.shape[0] // len(array), 1))}
    found = load(path, like=like, root="enc", resize=double)["w"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, np.tile(tree["enc"]["w"], (2, 1)))
    as_numpy = load(
        path,
        like={"w": np.zeros((8, 3), np.float32), "b": np.zeros(3, np.float32)},
        root="enc",
        resize=double,
    )
    assert_same(as_numpy["w"], np.tile(tree["enc"]["w"], (2, 1)))


def test_the_memory_that_a_function_returns_is_its_own(tmp_path):
    save({"a": np.full((2, 2), 1, np.float32), "b": np.full((2, 2), 2, np.float32)}, tmp_path / "x")
    memory = np.zeros((4, 2), np.float32)

    def grow(array, leaf):
        memory[:2] = array
        return memory

    for zeros in (np.zeros, jnp.zeros):
        found = load(
            tmp_path / "x",
            like={"a": zeros((4, 2), np.float32), "b": zeros((4, 2), np.float32)},
            resize=[("*", grow)],
        )
        memory[:] = -1
        assert (found["a"][0, 0], found["b"][0, 0], found["b"][3, 1]) == (1, 2, 0)
        memory[:] = 0


def test_another_dtype_is_told_with_the_stored_shape(pretrained):
    with pytest.raises(MismatchError, match=r"leaf 'w': expected int32\[6, 3\], found float32\[4, 3\]"):
        load(
            pretrained[0],
            like={"w": jnp.zeros((6, 3), jnp.int32), "b": jnp.zeros(3)},
            root="enc",
            resize={"w": grown},
        )


@pytest.mark.parametrize("result", [np.zeros((5, 3), np.float32), np.zeros((6, 3)), "text"])
def test_a_function_that_returns_something_else_is_an_error(pretrained, result):
    like = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
    with pytest.raises(MismatchError, match=r"leaf 'w': resize= returned .*, expected float32\[6, 3\]"):
        load(pretrained[0], like=like, root="enc", resize=lambda array, leaf, name: result)


# ---------------------------------------------------------------------------------------------- rename


@pytest.fixture
def hugging_face(tmp_path):
    """Write a model of another program: layers with weights that are out x in."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    weights = {f"model.layers.{n}.proj.weight": rng.normal(size=(6, 4)).astype(np.float32) for n in range(4)}
    weights["model.embed.weight"] = rng.normal(size=(8, 4)).astype(np.float32)
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf", weights


RULES = r"""
model\.layers\.(\d+)\.proj\.weight -> layers.kernel | transpose | stack \1
model\.embed\.weight -> embed
"""


def expected(weights):
    kernels = [weights[f"model.layers.{n}.proj.weight"].T for n in range(4)]
    return {"layers": {"kernel": np.stack(kernels)}, "embed": weights["model.embed.weight"]}


def test_foreign_weights_land_renamed_transposed_and_stacked(hugging_face, tmp_path):
    path, weights = hugging_face
    (tmp_path / "rules").write_text(RULES)
    like = jax.tree.map(jnp.zeros_like, expected(weights))
    for rename in (
        RULES,
        tmp_path / "rules",
        {
            r"model\.layers\.(\d+)\.proj\.weight": r"layers.kernel | transpose | stack \1",
            r"model\.embed\.weight": "embed",
        },
    ):
        assert_same(load(path, like=like, rename=rename), jax.tree.map(jnp.asarray, expected(weights)))
    assert_same(load(path, rename=RULES, keys="layers", like={"layers": like["layers"]})["layers"]["kernel"],
                jnp.asarray(expected(weights)["layers"]["kernel"]))  # fmt: skip


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "x"), P(None, None, "x"), P(None, "y", "x"), P("x", ("y",))]
)
def test_on_a_mesh_every_device_gets_its_box(hugging_face, spec):
    path, weights = hugging_face
    mesh = meshes()[1]
    found = load(path, rename=RULES, mesh=mesh, rules={"kernel": spec, "embed": P()}, dtype="bf16")
    want = jnp.asarray(expected(weights)["layers"]["kernel"], jnp.bfloat16)
    assert found["layers"]["kernel"].sharding == NamedSharding(mesh, spec)
    np.testing.assert_array_equal(found["layers"]["kernel"], want)


def test_leaves_that_no_rule_renames_are_compared_with_like(hugging_face):
    path, weights = hugging_face
    with pytest.raises(MismatchError, match=r"unexpected leaf 'model.embed.weight'"):
        load(path, like={"layers": {"kernel": jnp.zeros((4, 4, 6))}}, rename=RULES.splitlines()[1:2])
    found, report = load(path, like={"layers": {"kernel": jnp.zeros((4, 4, 6))}}, rename=RULES.splitlines()[1:2],
                         partial=True, return_report=True)  # fmt: skip
    assert report.left_out == ("model.embed.weight",)
    np.testing.assert_array_equal(found["layers"]["kernel"], expected(weights)["layers"]["kernel"])


def test_leaves_that_a_rule_leaves_out_are_in_the_report(hugging_face):
    path, _ = hugging_face
    _, report = load(path, rename={r"model\.layers\..*": None}, return_report=True)
    assert report.left_out == tuple(f"model.layers.{n}.proj.weight" for n in range(4))


def test_rules_that_match_no_leaf_are_named(hugging_face, caplog):
    path, _ = hugging_face
    load(path, rename={r"modle\.embed\.weight": "embed"})
    assert caplog.messages == [
        r"rename= rules that match no leaf: line 1, modle\.embed\.weight (nearest is 'model.embed.weight')"
    ]
    assert_same(load(path, rename={}), load(path))


def test_two_leaves_never_get_one_name(tmp_path):
    save({"m/x": np.ones(2), "old": np.zeros(2)}, tmp_path / "x")
    with pytest.raises(MismatchError, match="leaves 'm%2Fx' and 'm/x' would both be called 'm%2Fx'"):
        load(tmp_path / "x", rename={"old": "m/x"})
    with pytest.raises(MismatchError, match="'old' keeps its name, which is the new name of another leaf"):
        load(tmp_path / "x", rename={"m/x": "old"})


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_in_large_compressed_chunks_are_stacked_by_several_threads(tmp_path, axis):
    layers = [np.full((1200, 2000), n, np.float32) for n in range(6)]
    tree = {f"l{n}": layer for n, layer in enumerate(layers)}
    save(
        tree,
        tmp_path / "x",
        format="tensorstore",
        options={"compression": "zstd", "max_chunk_bytes": 5_000_000},
    )
    for _ in range(3):
        found = load(tmp_path / "x", rename={r"l(\d)": rf"L | stack \1 {axis}"})["L"]
        assert (np.asarray(found) == np.stack(layers, axis)).all()


def test_damage_is_noticed_in_what_rules_compute(tmp_path):
    save({"w": np.arange(2**16, dtype=np.float32).reshape(256, 256)}, tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="leaf 'w'"):
        load(tmp_path / "x", rename={"w": "v | transpose"})
    assert load(tmp_path / "x", rename={"w": "v | transpose"}, verify=False)["v"].shape == (256, 256)


def test_a_file_that_is_rewritten_meanwhile_is_never_a_mixture(hugging_face, monkeypatch):
    """It is written in place, as some programs do, while the last of it is read."""
    path, weights = hugging_face
    later = {name: array + 1 for name, array in weights.items()}
    read, calls = TreeReader.read, []

    def rewriting(self, *arguments):
        array = read(self, *arguments)
        calls.append(array)
        if len(calls) == 4:
            with open(path / "model.safetensors", "r+b") as file:
                file.write(safetensors.numpy.save(later))
        return array

    monkeypatch.setattr(TreeReader, "read", rewriting)
    found = load(path, rename=RULES)
    assert len(calls) > 4  # it began again
    for name in ("layers", "embed"):
        assert_same(jax.tree.map(np.asarray, found[name]), expected(later)[name])


def test_progress_counts_what_rules_compute(hugging_face):
    path, weights = hugging_face
    seen = []
    load(path, rename=RULES, progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in weights.values())
    assert seen[-1] == (total, total)


def test_keys_of_random_generators_are_renamed_but_not_transposed(tmp_path):
    save({"k": jax.random.key(1), "w": np.ones(2)}, tmp_path / "x")
    assert_same(load(tmp_path / "x", rename={"k": "rng"}), {"rng": jax.random.key(1), "w": np.ones(2)})
    with pytest.raises(MismatchError, match="leaf 'k' holds PRNG keys"):
        load(tmp_path / "x", rename={"k": "rng | transpose"})


# ------------------------------------------------------------------------------------------- functions


def test_functions_are_left_to_the_code(tmp_path):
    tree = {"w": np.ones(2), "activation": jnp.tanh}
    save(tree, tmp_path / "x")
    assert "left to the code" in repr(checkpoint.inspect(tmp_path / "x"))
    found, report = load(tmp_path / "x", like=tree, return_report=True)
    assert found["activation"] is jnp.tanh
    assert report.code == ("activation",)
    assert load(tmp_path / "x", like={**tree, "activation": max})["activation"] is max
    with pytest.raises(StructureError, match="leaves to the code: activation"):
        load(tmp_path / "x")
    assert_same(load(tmp_path / "x", keys="w"), {"w": np.ones(2)})


def test_a_function_in_the_place_of_an_array_is_a_mismatch(tmp_path):
    save({"w": np.ones(2)}, tmp_path / "x")
    with pytest.raises(MismatchError, match="leaf 'w': expected"):
        load(tmp_path / "x", like={"w": jnp.tanh})
    save({"w": jnp.tanh}, tmp_path / "y")
    with pytest.raises(MismatchError, match="leaf 'w': expected float64"):
        load(tmp_path / "y", like={"w": np.ones(2)})
    assert load(tmp_path / "x", like={"w": np.ones(2), "f": time.time})["f"] is time.time


class Net:
    """An object that can be called and holds an array, which JAX does not know of."""

    def __init__(self, value):
        self.w = jnp.full(3, value)

    def __call__(self, x):
        return x @ self.w


@pytest.mark.parametrize(
    "leaf", [Net(1.0), Net(1.0).__call__, functools.partial(jnp.add, jnp.ones(2)), [1].append]
)
def test_what_can_be_called_and_may_hold_arrays_is_not_taken_for_a_function(tmp_path, leaf):
    with pytest.raises(LeafError, match=r"leaf 'f': .* cannot be stored"):
        save({"f": leaf, "step": 7}, tmp_path / "x")
    save({"step": 7}, tmp_path / "x")
    with pytest.raises(MismatchError, match="missing leaf 'f'"):
        load(tmp_path / "x", like={"f": leaf, "step": 0})


@pytest.mark.parametrize(
    "function",
    [len, np.add, jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.jit(jnp.sin), jax.vmap(jnp.sin), dict, lambda x: x,
     functools.partial(jnp.sum, axis=0), functools.lru_cache(len), jnp.add],

)  # fmt: skip
def test_functions_of_all_kinds_are_left_to_the_code(tmp_path, function):
    save({"f": function, "n": 1}, tmp_path / "x")
    found, report = load(tmp_path / "x", like={"f": function, "n": 0}, return_report=True)
    assert (found["f"], found["n"]) == (function, 1)
    assert str(report) == "1 leaf loaded, 1 left to the code (f)"
