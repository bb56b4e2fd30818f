"""Several checkpoints are loaded into one tree: every leaf from the one that has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import load, save
from eformer.errors import MismatchError, QuantizedError, StructureError
from support.meshes import meshes
from support.trees import assert_same

BASE = {"layers": [{"w": jnp.arange(8.0)}, {"w": jnp.ones(8)}], "step": 3}
LORA = {"layers": [{"lora_a": np.full(2, 0.5)}, {"lora_a": np.zeros(2)}]}
BOTH = {
    "layers": [
        {"lora_a": np.full(2, 0.5), "w": jnp.arange(8.0)},
        {"lora_a": np.zeros(2), "w": jnp.ones(8)},
    ],
    "step": 3,
}


@pytest.fixture
def paths(tmp_path):
    save(BASE, tmp_path / "base")
    save(LORA, tmp_path / "lora", format="tensorstore")
    return [tmp_path / "base", tmp_path / "lora"]


def test_a_base_and_an_adapter_are_loaded_into_an_abstract_tree(paths):
    place = NamedSharding(meshes()[0], P("x"))
    kinds = [
        {"lora_a": np.zeros(2), "w": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=place)}
        for _ in range(2)
    ]
    found = load(paths, like={"layers": kinds, "step": 0}, dtype="like")
    expected = jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), place)
    assert_same(found["layers"][0], {"lora_a": LORA["layers"][0]["lora_a"], "w": expected})
    assert found["step"] == 3


def test_a_base_and_an_adapter_are_loaded_into_an_abstract_model_of_nnx(tmp_path):
    def make():
        return nnx.LoRALinear(4, 8, lora_rank=2, rngs=nnx.Rngs(0))

    trained = make()
    save(nnx.Linear(4, 8, rngs=nnx.Rngs(1)), tmp_path / "base")
    save(nnx.state(trained, nnx.LoRAParam), tmp_path / "lora")
    model = load([tmp_path / "base", tmp_path / "lora"], like=nnx.eval_shape(make))
    assert_same(model.lora.lora_a[...], trained.lora.lora_a[...])
    assert_same(model.kernel[...], nnx.Linear(4, 8, rngs=nnx.Rngs(1)).kernel[...])
    assert model(jnp.ones((1, 4))).shape == (1, 8)


def test_every_leaf_must_be_in_one_of_them_and_all_problems_are_listed(paths):
    like = {"layers": [{"lora_a": np.zeros(3), "w": jnp.zeros(8), "new": 1}, BOTH["layers"][1]], "step": 0}
    with pytest.raises(MismatchError) as caught:
        load(paths, like=like)
    assert caught.value.problems == (
        "missing leaf 'layers.0.new' (nearest is 'layers.0.w'): `like` has it, the checkpoint does not",
        "leaf 'layers.0.lora_a': expected float64[3], found float64[2]; resize= changes shapes",
    )


def test_an_abstract_leaf_that_one_checkpoint_lacks_is_looked_for_in_another(paths):
    like = jax.eval_shape(lambda: {"layers": [dict.fromkeys(("lora_a", "w"), jnp.zeros(8))] * 2, "step": 0})
    with pytest.raises(MismatchError, match="like` has a ShapeDtypeStruct, not a value") as caught:
        load(paths[0], like=like, partial=True)
    advice = "a list of paths, such as [base, adapter], takes them from several checkpoints"
    assert caught.value.advice == advice


def test_leaves_that_none_of_them_has_stay_in_a_partial_load(paths):
    like = {**BOTH, "head": jnp.ones(2)}
    found, report = load(paths, like={**like, "step": 0}, partial=True, return_report=True)
    assert_same(found, dict(sorted(like.items())))
    assert (len(report.loaded), report.kept, report.left_out) == (5, ("head",), ())


def test_a_leaf_in_two_of_them_is_refused_with_both_paths(paths, tmp_path):
    other = tmp_path / "other"
    save({"layers": [{"w": jnp.zeros(8)}], "step": 4}, other)
    for arguments in ({"like": BOTH}, {"keys": "*"}, {}):
        with pytest.raises(MismatchError) as caught:
            load([*paths, other], **arguments)
        assert sorted(caught.value.problems) == [
            f"leaf 'layers.0.w' is in {paths[0]} and in {other}",
            f"leaf 'step' is in {paths[0]} and in {other}",
        ]
        assert caught.value.advice == 'duplicates="last" takes each from the last checkpoint that has it'


def test_the_last_one_wins_if_that_is_asked_for(paths, tmp_path):
    save({"layers": [{"w": jnp.zeros(8)}], "step": jnp.int32(4)}, tmp_path / "other")
    found = load([*paths, tmp_path / "other"], like=BOTH, duplicates="last")
    assert_same(found["layers"][0]["w"], jnp.zeros(8))
    assert_same(found["layers"][1], BOTH["layers"][1])
    assert found["step"] == 4
    with pytest.raises(ValueError, match="duplicates='first': expected 'last', or None"):
        load(paths, duplicates="first")


def test_a_leaf_that_is_not_asked_for_may_be_in_both(tmp_path):
    save({"w": 1, "step": 3}, tmp_path / "a")
    save({"v": 2, "step": 4}, tmp_path / "b")
    both = [tmp_path / "a", tmp_path / "b"]
    assert load(both, like={"v": 0, "w": 0}, partial=True) == {"v": 2, "w": 1}
    assert load(both, keys=["v", "w"]) == {"w": 1, "v": 2}
    assert load(both, rename={"step": None}) == {"v": 2, "w": 1}


@pytest.fixture
def spellings(tmp_path):
    """Two checkpoints that spell the name of one leaf differently: nested, and with dots in the keys of a flat dict."""
    nested = {f"m.{name}.weight": np.ones(2, np.float32) for name in "ab"}
    safetensors.numpy.save_file(nested, tmp_path / "model.safetensors")
    save({"m.a.weight": np.full(2, 9.0), "m.c.weight": np.full(2, 7.0)}, tmp_path / "flat")
    return [tmp_path / "model.safetensors", tmp_path / "flat"]


@pytest.mark.parametrize(
    "arguments", [{}, {"keys": "m.a.weight"}, {"keys": "m"}, {"root": "m"}, {"rename": {"x": "y"}}]
)
def test_a_leaf_in_two_of_them_is_refused_however_they_spell_its_name(spellings, arguments):
    name = "a.weight" if "root" in arguments else "m.a.weight"
    with pytest.raises(MismatchError) as caught:
        load(spellings, **arguments)
    assert caught.value.problems == (f"leaf {name!r} is in {spellings[0]} and in {spellings[1]}",)


def test_the_last_one_wins_under_the_name_that_the_first_has(spellings):
    found = load(spellings, duplicates="last")
    assert_same(found["m"]["a"]["weight"], np.full(2, 9.0))
    assert found.keys() == {"m", "m.c.weight"}
    assert_same(load(spellings, duplicates="last", keys="m.a.weight"), {"m.a.weight": np.full(2, 9.0)})
    assert_same(load(spellings[::-1], duplicates="last", keys="m.a.weight")["m%2Ea%2Eweight"], jnp.ones(2))


def test_keys_of_a_subtree_find_its_leaves_in_every_spelling(spellings):
    found = load(spellings, duplicates="last", keys="m")
    assert found.keys() == {"m.a.weight", "m.b.weight", "m%2Ec%2Eweight"}


def test_a_leaf_in_a_box_is_the_leaf_that_another_has_without_the_box(tmp_path):
    save({"a": np.zeros(2)}, tmp_path / "plain")
    save({"a": {"value": np.ones(2)}}, tmp_path / "boxed")
    both = [tmp_path / "plain", tmp_path / "boxed"]
    with pytest.raises(MismatchError, match=r"leaf 'a' is in .*plain and in .*boxed"):
        load(both)
    assert_same(load(both, duplicates="last"), {"a": np.ones(2)})
    assert_same(load(both[::-1], duplicates="last"), {"a": {"value": np.zeros(2)}})


def test_leaves_of_one_of_them_that_read_the_same_stay_two(tmp_path):
    save({"a": {"b": 1}, "a.b": 2}, tmp_path / "two")
    save({"a": {"b": 3}}, tmp_path / "one")
    both = [tmp_path / "two", tmp_path / "one"]
    assert load(both, duplicates="last") == {"a": {"b": 3}, "a.b": 2}
    assert load(both[::-1], duplicates="last") == {"a": {"b": 1}, "a.b": 2}
    assert load(both, duplicates="last", like={"a": {"b": 0}, "a.b": 0}) == {"a": {"b": 3}, "a.b": 2}


def test_functions_are_left_to_the_code_whichever_has_them(tmp_path):
    save({"act": jax.nn.relu, "w": jnp.ones(2)}, tmp_path / "a")
    save({"act": jax.nn.relu, "v": jnp.ones(3)}, tmp_path / "b")
    like = {"act": jax.nn.relu, "v": jnp.zeros(3), "w": jnp.zeros(2)}
    found = load([tmp_path / "a", tmp_path / "b"], like=like)
    assert (found["act"], float(found["v"].sum()), float(found["w"].sum())) == (jax.nn.relu, 3, 2)


def test_without_like_the_result_is_nested_dicts_by_name(paths):
    found = load(paths)
    assert_same(found["layers"]["0"], BOTH["layers"][0])
    assert found["step"] == 3
    assert list(load(paths, keys="layers.0")) == ["layers.0.w", "layers.0.lora_a"]
    assert load(paths, root="layers.1").keys() == {"w", "lora_a"}
    with pytest.raises(MismatchError, match="no leaf is named 'layer' or lies below it"):
        load(paths, root="layer")


def test_rules_apply_to_all_and_warn_only_if_none_has_the_leaf(paths, tmp_path, caplog):
    safetensors.numpy.save_file(
        {"base_model.model.layers.0.lora_A.weight": np.ones((2, 3), np.float32)},
        tmp_path / "adapter.safetensors",
    )
    rules = {r"base_model\.model\.(.*)\.lora_A\.weight": r"\1.lora_a | transpose", "nothing": "x"}
    found = load([paths[0], tmp_path / "adapter.safetensors"], rename=rules)
    assert_same(found["layers"]["0"], {"lora_a": jnp.ones((3, 2)), "w": BASE["layers"][0]["w"]})
    (warning,) = [record.message for record in caplog.records]
    assert warning == "rename= rules that match no leaf: line 2, nothing"


STACK = {r"l\.(\d+)": r"L | stack \1"}


def saved_layers(path, **layers):
    save({"l": {name.removeprefix("n"): np.full(2, value) for name, value in layers.items()}}, path)
    return path


def test_a_stack_of_some_layers_never_replaces_a_stack_of_all(tmp_path):
    base, adapter = (
        saved_layers(tmp_path / "base", n0=0.0, n1=1.0),
        saved_layers(tmp_path / "adapter", n0=7.0),
    )
    for arguments in ({"duplicates": "last"}, {}, {"duplicates": "last", "keys": "L"}):
        with pytest.raises(
            MismatchError, match="rename= stacks the leaves of each checkpoint alone"
        ) as caught:
            load([base, adapter], rename=STACK, **arguments)
        assert caught.value.problems == (
            f"leaf 'L' is made of 'l.0'; 'l.1' in {base} and of 'l.0' in {adapter}",
        )
        assert "load them without the rule, save the result, and load the result" in caught.value.advice
    save(load([base, adapter], duplicates="last"), tmp_path / "both")
    assert_same(load(tmp_path / "both", rename=STACK), {"L": np.array([[7.0, 7], [1, 1]])})


def test_a_stack_of_all_layers_is_taken_from_the_last(tmp_path):
    paths = [saved_layers(tmp_path / "a", n0=0.0, n1=1.0), saved_layers(tmp_path / "b", n0=7.0, n1=8.0)]
    found = load(paths, rename=STACK, duplicates="last")
    assert_same(found, {"L": np.array([[7.0, 7], [8, 8]])})


def test_a_stack_with_gaps_names_the_checkpoint_and_what_to_do(tmp_path):
    paths = [saved_layers(tmp_path / "a", n0=0.0), saved_layers(tmp_path / "b", n1=1.0)]
    with pytest.raises(
        MismatchError, match=r"rename, .*b: 'L', by line 1, .* needs the numbers \[0\]"
    ) as caught:
        load(paths, rename=STACK)
    assert "rules apply to each checkpoint of a list alone" in caught.value.advice


def test_a_mismatch_of_a_list_advises_neither_a_root_nor_a_list(tmp_path):
    save({"w": jnp.ones(2)}, tmp_path / "base")
    save({"model": {"lora": jnp.ones(2)}}, tmp_path / "lora")
    like = jax.eval_shape(lambda: {"w": jnp.ones(2), "lora": jnp.ones(2)})
    for partial in (False, True):
        with pytest.raises(MismatchError) as caught:
            load([tmp_path / "base", tmp_path / "lora"], like=like, partial=partial)
        assert caught.value.advice.startswith("rename= gives leaves of the checkpoint other names")
        assert "a list of paths" not in caught.value.advice


def test_a_single_array_is_refused_beside_a_tree_until_it_has_a_name(tmp_path):
    save(jnp.ones(2), tmp_path / "bare")
    save({"w": 1}, tmp_path / "tree")
    both = [tmp_path / "tree", tmp_path / "bare"]
    for arguments in ({}, {"like": {"w": 0}}):
        with pytest.raises(StructureError, match=r"bare holds a single array, which has no name"):
            load(both, **arguments)
    assert_same(load(both, rename={"%": "name"}), {"name": jnp.ones(2), "w": 1})
    assert_same(load([both[1]] * 2, duplicates="last"), jnp.ones(2))


def test_the_bytes_of_all_are_counted_and_mapped(paths):
    calls = []
    load(paths, like=BOTH, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (96, 96)
    assert_same(load(paths, like=BOTH, mmap=True, options={"batch": 1}), BOTH)


def test_one_that_is_quantised_is_refused_by_name(paths, tmp_path):
    leaves = {"a.qweight": np.ones((2, 2), np.int32), "a.scales": np.ones(2, np.float16)}
    safetensors.numpy.save_file(leaves, tmp_path / "gptq.safetensors")
    with pytest.raises(QuantizedError, match=r"gptq\.safetensors is quantised"):
        load([*paths, tmp_path / "gptq.safetensors"])


def test_files_without_names_are_refused(paths, tmp_path):
    with (tmp_path / "tree.eqx").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match=r"tree\.eqx has no names of leaves, which a load of several"):
        load([*paths, tmp_path / "tree.eqx"], like=BOTH)


@pytest.mark.parametrize(
    ("path", "problem"),
    [({"a", "b"}, "the path is of type set; expected a path, or a list of paths in an order"),
     (None, "the path is of type NoneType; expected a path"), (3, "the path is of type int; expected a path"),
     ([["a"], "b"], "an item of the list of paths is of type list; expected a path"), (["a", None], "NoneType")],
)  # fmt: skip
def test_only_paths_and_lists_of_paths_are_taken(path, problem):
    with pytest.raises(TypeError, match=problem):
        load(path)


def test_a_leaf_that_a_rule_drops_from_both_is_reported_once(tmp_path):
    for name in ("a", "b"):
        save({"w": jnp.ones(1), name: 1}, tmp_path / name)
    report = load([tmp_path / "a", tmp_path / "b"], rename={"w": None}, return_report=True)[1]
    assert report.left_out == ("w",)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="an empty list of paths"):
        load([])
