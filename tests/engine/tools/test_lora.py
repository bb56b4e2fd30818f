"""A LoRA added to its base: equal to numpy bit for bit, of every kind that PEFT has, or refused by name."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer.checkpoint import inspect, load, merge, save
from eformer.errors import MismatchError

BF16 = ml_dtypes.bfloat16
BASE = "base_model.model."
Q, V = "layers.0.q_proj", "layers.0.v_proj"


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def product(rows, columns):
    """Multiply matrices in float32, adding up in the order of the rank."""
    total = np.zeros((rows.shape[0], columns.shape[1]), np.float32)
    for k in range(rows.shape[1]):
        total += rows[:, k, None].astype(np.float32) * columns[k].astype(np.float32)
    return total


def added(weight, scale, delta):
    return (weight.astype(np.float32) + np.float32(scale) * delta).astype(weight.dtype)


@pytest.fixture
def base(tmp_path):
    leaves = {
        f"{Q}.weight": normal(0, 6, 4, dtype=BF16),
        f"{V}.weight": normal(1, 6, 4),
        "embed.weight": normal(2, 9, 4),
        "head.weight": normal(3, 9, 4),
        "head.bias": normal(4, 9),
        "count": np.arange(3),
    }
    safetensors.numpy.save_file(leaves, tmp_path / "base.safetensors")
    return leaves


def write_adapter(tmp_path, leaves, **config):
    folder = tmp_path / "adapter"
    folder.mkdir()
    named = {f"{BASE}{name}": leaf for name, leaf in leaves.items()}
    safetensors.numpy.save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6} | config)
    )
    return folder


def pair(module, seed=5, rank=2):
    return {
        f"{module}.lora_A.weight": normal(seed, rank, 4),
        f"{module}.lora_B.weight": normal(seed + 1, 6, rank),
    }


def merged(tmp_path, **more):
    merge(tmp_path / "base.safetensors", tmp_path / "m.safetensors", lora=tmp_path / "adapter", **more)
    return safetensors.numpy.load_file(tmp_path / "m.safetensors")


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert (found[name].dtype, found[name].tobytes()) == (leaf.dtype, leaf.tobytes()), name


def delta(leaves, module):
    return product(leaves[f"{module}.lora_B.weight"], leaves[f"{module}.lora_A.weight"])


def test_a_lora_of_peft_is_added_as_numpy_adds_it(base, tmp_path):
    leaves = pair(Q) | pair(V, 7)
    write_adapter(tmp_path, leaves)
    wanted = {f"{m}.weight": added(base[f"{m}.weight"], 3, delta(leaves, m)) for m in (Q, V)}
    assert_same(merged(tmp_path), base | wanted)


def test_a_product_is_added_up_in_the_order_of_the_rank(base, tmp_path):
    leaves = pair(V, rank=20)
    write_adapter(tmp_path, leaves, r=20, lora_alpha=20)
    found = merged(tmp_path)[f"{V}.weight"]
    assert found.tobytes() == added(base[f"{V}.weight"], 1, delta(leaves, V)).tobytes()


def test_scales_follow_patterns_of_ranks_and_alphas_and_rslora(base, tmp_path):
    leaves = pair(Q, rank=3) | pair(V, 7)
    write_adapter(
        tmp_path, leaves, rank_pattern={"q_proj": 3}, alpha_pattern={"layers.0.v_proj": 5}, use_rslora=True
    )
    scales = {Q: 6 / math.sqrt(3), V: 5 / math.sqrt(2)}
    wanted = {f"{m}.weight": added(base[f"{m}.weight"], s, delta(leaves, m)) for m, s in scales.items()}
    assert_same(merged(tmp_path), base | wanted)


def test_fan_in_fan_out_adds_the_transposed_product(base, tmp_path):
    leaves = {f"{Q}.lora_A.weight": normal(5, 2, 6), f"{Q}.lora_B.weight": normal(6, 4, 2)}
    write_adapter(tmp_path, leaves, fan_in_fan_out=True)
    down, up = leaves[f"{Q}.lora_A.weight"], leaves[f"{Q}.lora_B.weight"]
    wanted = added(base[f"{Q}.weight"], 3, product(down.T, up.T))
    assert_same(merged(tmp_path), base | {f"{Q}.weight": wanted})


def test_a_lora_of_an_embedding_is_added(base, tmp_path):
    leaves = {"embed.lora_embedding_A": normal(5, 2, 9), "embed.lora_embedding_B": normal(6, 4, 2)}
    write_adapter(tmp_path, leaves)
    down, up = leaves.values()
    wanted = added(base["embed.weight"], 3, product(down.T, up.T))
    assert_same(merged(tmp_path), base | {"embed.weight": wanted})


def test_leaves_that_peft_saved_whole_replace_those_of_the_base(base, tmp_path):
    head = normal(9, 9, 4, dtype=BF16)
    write_adapter(tmp_path, pair(Q) | {"head.weight": head})
    assert merged(tmp_path)["head.weight"].tolist() == head.astype(np.float32).tolist()


def test_a_lora_is_added_to_the_embedding_that_peft_saved_beside_it(base, tmp_path):
    own = normal(9, 9, 4)
    leaves = {"embed.lora_embedding_A": normal(5, 2, 9), "embed.lora_embedding_B": normal(6, 4, 2)}
    write_adapter(tmp_path, leaves | {"embed.base_layer.weight": own})
    down, up = leaves.values()
    wanted = added(own, 3, product(down.T, up.T))
    assert_same(merged(tmp_path), base | {"embed.weight": wanted})


def test_a_lora_of_a_jax_program_is_added_to_its_kernels(tmp_path):
    kernel, down, up = normal(0, 4, 6, dtype=BF16), normal(1, 4, 2), normal(2, 2, 6)
    save({"layer": [{"q": {"kernel": kernel}}], "step": 3}, tmp_path / "base")
    save({"layer": [{"q": {"lora_a": down, "lora_b": up}}]}, tmp_path / "lora", format="zarr")
    merge(
        tmp_path / "base",
        tmp_path / "m",
        lora=tmp_path / "lora",
        lora_config={"lora_alpha": 1},
        to="safetensors",
    )
    tree = load(tmp_path / "m")
    assert tree["step"] == 3
    assert (
        np.asarray(tree["layer"][0]["q"]["kernel"]).tobytes()
        == added(kernel, 0.5, product(down, up)).tobytes()
    )


def test_rules_give_the_leaves_of_a_lora_the_names_of_peft(base, tmp_path):
    leaves = pair(Q)
    save(
        {"q": {"down": leaves[f"{Q}.lora_A.weight"], "up": leaves[f"{Q}.lora_B.weight"]}},
        tmp_path / "adapter",
    )
    rules = {r"q\.down": f"{BASE}{Q}.lora_A.weight", r"q\.up": f"{BASE}{Q}.lora_B.weight"}
    wanted = added(base[f"{Q}.weight"], 3, delta(leaves, Q))
    found = merged(tmp_path, rename=rules, lora_config={"lora_alpha": 6})
    assert_same(found, base | {f"{Q}.weight": wanted})


def test_the_result_says_where_a_lora_went_and_records_both_parents(base, tmp_path):
    write_adapter(tmp_path, pair(Q))
    plan = merge(tmp_path / "base.safetensors", tmp_path / "m", lora=tmp_path / "adapter", to="safetensors")
    assert "layers.0.q_proj.weight: bfloat16[6, 4] (LoRA added, times 3)" in str(plan)
    assert "a LoRA is added to 1 leaf" in plan.notes
    parents = inspect(tmp_path / "m").trees[""].origin["parents"]
    assert [parent["path"] for parent in parents] == [
        str(tmp_path / "base.safetensors"),
        str(tmp_path / "adapter"),
    ]
    assert parents[1]["as"] == "lora"


def test_one_error_lists_all_leaves_that_do_not_fit(base, tmp_path):
    leaves = pair(Q) | pair("layers.9.q_proj") | {f"{V}.lora_A.weight": normal(1, 2, 4)}
    leaves |= {"embed.lora_A.weight": normal(1, 2, 4), "embed.lora_B.weight": normal(1, 8, 2)}
    write_adapter(tmp_path, leaves | {"other.weight": normal(1, 2)}, rank_pattern={"q_proj": 4})
    with pytest.raises(MismatchError, match="the LoRA cannot be added to the weights") as caught:
        merged(tmp_path)
    assert sorted(caught.value.problems) == sorted(
        [
            "leaf 'embed.weight' has the shape [9, 4], and its LoRA [8, 4]",
            "leaf 'base_model.model.other.weight' has no leaf 'other.weight' in the base",
            "module 'layers.0.q_proj' has the rank 2, and adapter_config.json r=4",
            "module 'layers.0.v_proj' has one of two matrices; lora_B is missing",
            "module 'layers.9.q_proj' has no weight in the base; is it 'layers.0.q_proj.weight'? rename= gives the "
            "leaves of the LoRA other names",
        ]
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True: DoRA also scales the columns of the sum; merge it with PEFT"),
        ({"peft_type": "LOHA"}, "has the peft_type 'LOHA'; only LORA can be added"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base before training"),
        ({"lora_alpha": None}, "the scale of the LoRA is unknown; pass lora_alpha with lora_config="),
    ],
)
def test_kinds_that_cannot_be_added_are_refused_by_name(base, tmp_path, config, message):
    write_adapter(tmp_path, pair(Q), **config)
    with pytest.raises(MismatchError, match=message):
        merged(tmp_path)
    assert not (tmp_path / "m.safetensors").exists()


def test_leaves_of_dora_are_refused_without_a_configuration(base, tmp_path):
    write_adapter(tmp_path, pair(Q) | {f"{Q}.lora_magnitude_vector": normal(1, 6)})
    with pytest.raises(MismatchError, match="belongs to DoRA, which cannot be added"):
        merged(tmp_path)


def test_a_checkpoint_without_a_lora_is_an_error(base, tmp_path):
    save({"w": np.ones(2)}, tmp_path / "adapter")
    with pytest.raises(MismatchError, match="no LoRA leaf among 1 name: w"):
        merged(tmp_path)
