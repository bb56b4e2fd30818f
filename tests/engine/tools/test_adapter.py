"""Convert trees with LoRA leaves to PEFT adapters, and back."""

import enum
import json
import os

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from eformer._engine.tools.adapter import is_lora, parse_adapter_name, target_modules
from eformer.checkpoint import convert, load, save, verify
from eformer.errors import CorruptionError, MismatchError
from support import lora, programs
from support.trees import assert_same

Q0 = "base_model.model.model.layers.0.q_proj"

BACK = [
    r"base_model\.model\.(.*)\.layers\.(\d+)\.(.*)\.lora_A\.weight -> \1.layers.\2.\3.lora_a | transpose",
    r"base_model\.model\.(.*)\.layers\.(\d+)\.(.*)\.lora_B\.weight -> \1.layers.\2.\3.lora_b | transpose",
]


@pytest.fixture
def source(tmp_path):
    save(lora.state(), tmp_path / "lora", metadata={"run": 1})
    return tmp_path / "lora"


def to_peft(tree, tmp_path, **arguments):
    """Save a tree, convert it to an adapter, and return the adapter's tensors and configuration."""
    save(tree, tmp_path / "tree")
    convert(tmp_path / "tree", tmp_path / "adapter", to="peft", **{"config": {"lora_alpha": 4}} | arguments)
    return contents(tmp_path / "adapter")


def contents(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    return safetensors.numpy.load_file(adapter / "adapter_model.safetensors"), config


# -------------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("name", "expected", "is_transposed"),
    [
        ("q.lora_a", "base_model.model.q.lora_A.weight", True),
        ("h.0.q.lora_b.value", "base_model.model.h.0.q.lora_B.weight", True),
        ("q.lora.lora_a", "base_model.model.q.lora_A.weight", True),
        ("q.w_lora_b", "base_model.model.q.lora_B.weight", True),
        ("q.lora_A.kernel", "base_model.model.q.lora_A.weight", True),
        ("q.lora_a.w", "base_model.model.q.lora_A.weight", True),
        ("q.lora_a.weight", "base_model.model.q.lora_A.weight", False),
        ("q.lora_B.weight", "base_model.model.q.lora_B.weight", False),
        ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_A.weight", False),
        ("base_model.model.e.lora_embedding_A", "base_model.model.e.lora_embedding_A", False),
        ("base_model.model.q.lora_magnitude_vector", "base_model.model.q.lora_magnitude_vector", False),
    ],
)
def test_names_of_jax_and_of_peft(name, expected, is_transposed):
    parsed = parse_adapter_name(name)
    assert (str(parsed), parsed.is_transposed) == (expected, is_transposed)


@pytest.mark.parametrize("name", ["q.kernel", "lora_alpha", "q.lora_alpha", "flora_c", "lora_base.kernel"])
def test_other_leaves_are_not_of_a_lora(name):
    assert not is_lora(name)


def test_lora_leaves_are_transposed_and_the_rest_is_left_out(source, tmp_path):
    done = convert(source, tmp_path / "adapter", to="peft", config={"lora_alpha": 4})
    tensors, _ = contents(tmp_path / "adapter")
    assert sorted(tensors) == [
        f"base_model.model.model.layers.{i}.q_proj.lora_{half}.weight" for i in range(2) for half in "AB"
    ]
    for i in range(2):
        pair = lora.pair(i)
        for half in "ab":
            name = f"base_model.model.model.layers.{i}.q_proj.lora_{half.upper()}.weight"
            np.testing.assert_array_equal(tensors[name], pair[f"lora_{half}"].T)
    assert any(
        "left out 5 names that are not of a LoRA: model.layers.0.norm; " in note for note in done.notes
    )
    assert str(done.leaves[""][0]).endswith(f"-> {Q0}.lora_A.weight: float32[2, 4] (transpose)")


def test_the_keys_of_a_flat_dict_are_names(tmp_path):
    flat = {f"layers.0.q_proj.{name}": array for name, array in lora.pair().items()}
    tensors, config = to_peft(flat, tmp_path)
    assert sorted(tensors) == [f"base_model.model.layers.0.q_proj.lora_{half}.weight" for half in "AB"]
    assert config["target_modules"] == ["q_proj"]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.LoRALinear(4, 6, lora_rank=2, rngs=rngs)
        self.v_proj = nnx.LoRA(4, 2, 6, base_module=nnx.Linear(4, 6, rngs=rngs), rngs=rngs)


def test_a_model_of_nnx_needs_no_rules(tmp_path):
    model = Model(nnx.Rngs(0))
    tensors, config = to_peft(nnx.to_pure_dict(nnx.state(model)), tmp_path)
    assert len(tensors) == 4
    given = np.asarray(model.q_proj.lora.lora_a[...])
    np.testing.assert_array_equal(tensors["base_model.model.q_proj.lora_A.weight"], given.T)
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "v_proj"])


def test_rules_come_first_and_may_give_pefts_names(tmp_path):
    layers = {name: np.stack([lora.pair(i)[name] for i in range(3)]) for name in ("lora_a", "lora_b")}
    rules = [
        r"params\.(\w+)\.lora_a -> base_model.model.h.{}.\1.lora_A.weight | unstack | transpose",
        r"params\.(\w+)\.lora_b -> h.{}.\1.lora_b | unstack",
        r"mu\..* ->",
    ]
    tree = {"params": {"q": layers, "head": np.ones(3)}, "mu": {"q": layers}}
    tensors, config = to_peft(tree, tmp_path, rename=rules)
    assert sorted(tensors) == [
        f"base_model.model.h.{i}.q.lora_{half}.weight" for i in range(3) for half in "AB"
    ]
    np.testing.assert_array_equal(tensors["base_model.model.h.2.q.lora_A.weight"], lora.pair(2)["lora_a"].T)
    np.testing.assert_array_equal(tensors["base_model.model.h.1.q.lora_B.weight"], lora.pair(1)["lora_b"].T)
    assert config["target_modules"] == ["q"]


def test_leaves_that_the_configuration_asks_for_go_along(tmp_path):
    theirs = {
        "base_model.model.q.lora_A.weight": np.ones((2, 4)),
        "base_model.model.q.lora_B.weight": np.ones((6, 2)),
        "base_model.model.q.bias": np.ones(6),
        "base_model.model.q.base_layer.bias": np.ones(6),
        "base_model.model.score.weight": np.ones((3, 6)),
        "base_model.model.other.weight": np.ones((3, 6)),
    }
    config = {"lora_alpha": 4, "bias": "lora_only", "modules_to_save": ["score"]}
    tensors, _ = to_peft(theirs, tmp_path, config=config)
    assert theirs.keys() - tensors.keys() == {
        "base_model.model.other.weight",
        "base_model.model.q.base_layer.bias",
    }


# --------------------------------------------------------------------------------------------- config


def test_the_configuration_is_completed_from_the_leaves(tmp_path):
    _, config = to_peft(lora.state(), tmp_path, config={"lora_alpha": 4, "use_rslora": True})
    assert config == {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 4,
        "use_rslora": True,
        "r": 2,
        "target_modules": ["q_proj"],
    }


def test_a_configuration_as_peft_has_it_in_memory(tmp_path):
    kind = enum.Enum("PeftType", {"LORA": "LORA"}, type=str)
    given = {"peft_type": kind.LORA, "r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}}
    _, config = to_peft(lora.state(), tmp_path, config=given)
    assert (config["peft_type"], config["target_modules"]) == ("LORA", ["q_proj"])


def test_several_ranks_in_a_pattern(tmp_path):
    tree = {"h": [{"q": lora.pair(), "v": lora.pair(rank=3)} for _ in range(2)]}
    _, config = to_peft(tree, tmp_path, config={"lora_alpha": 4, "rank_pattern": {"v": 3}})
    assert config["r"] == 2


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["h.0.q", "h.0.v", "h.1.q", "h.1.v"], ["q", "v"]),
        (["h.0.q", "h.1.q", "h.1.v"], ["h.1.v", "q"]),
        (["h.2.q"], ["h.2.q"]),
        (["encoder.0.q", "decoder.0.q", "decoder.1.q"], ["q"]),
        (["h.0.to_out.0", "h.1.to_out.0"], ["h.0.to_out.0", "h.1.to_out.0"]),
        (["seq.0", "lm_head"], ["lm_head", "seq.0"]),
    ],
)
def test_target_modules_are_last_parts_unless_these_would_mean_others(modules, expected):
    assert target_modules(modules) == expected


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "config", "problem"),
    [
        ({}, {}, "lora_alpha is unknown, and does not follow from the leaves; pass it with config="),
        (
            {},
            {"r": 3},
            r"leaf 'q.lora_a' has the rank 2, not r=3: lora_A.weight would have the shape \[2, 4\]",
        ),
        ({"lora_b": np.ones((3, 6))}, {}, "leaf 'q.lora_b' has the rank 3, not r=2"),
        (
            {"lora_b": None},
            {},
            "'q.lora_a' is one of two matrices, and the other, .*lora_B.weight, is missing",
        ),
        ({"lora_a": np.ones((5, 4, 2))}, {}, r"leaf 'q.lora_a' has the shape \[5, 4, 2\].*unstack layers"),
        (
            {"w_lora_a": np.ones((4, 2))},
            {},
            "leaves q.lora_a; q.w_lora_a would have the same name, base_model",
        ),
        ({"lora_a": {"x": np.ones(2)}}, {}, "leaf 'q.lora_a.x' does not have the name of a LoRA leaf"),
        ({}, {"target_modules": ["v"]}, r"target_modules=\['v'\] in config= do not match q"),
        ({}, {"target_modules": "v.*"}, r"target_modules='v.\*' in config= do not match q"),
        ({}, {"modules_to_save": ["score"]}, "modules_to_save in config= has 'score', and no leaf is called"),
        ({}, {"modules_to_save": "score"}, r"is 'score'; expected a list, such as \[\"score\"\]"),
        ({}, {"target_modules": "q("}, "config= has 'q\\(', which is not a regular expression"),
        ({}, {"rank_pattern": {"q(": 2}}, "which is not a regular expression"),
        ({}, {"peft_type": "IA3"}, "peft_type 'IA3'; only LORA can be written"),
        ({}, {"lora_alpha": object()}, "config= cannot be written to adapter_config.json"),
    ],
)
def test_problems_are_errors_before_anything_is_written(tmp_path, change, config, problem):
    save({"q": lora.pair() | change}, tmp_path / "tree")
    config = {"lora_alpha": 4} | config if config or change else {}
    with pytest.raises(ValueError, match=problem):
        convert(tmp_path / "tree", tmp_path / "adapter", to="peft", config=config)
    assert os.listdir(tmp_path) == ["tree"]


def test_one_error_lists_all_problems(source, tmp_path):
    with pytest.raises(MismatchError) as raised:
        convert(source, tmp_path / "adapter", to="peft", config={"r": 3}, dry_run=True)
    assert len(raised.value.problems) == 5


def test_without_lora_leaves_the_error_names_what_there_is(tmp_path):
    save({"dense": {"kernel": np.ones((2, 3))}, "step": 1}, tmp_path / "tree")
    with pytest.raises(
        MismatchError, match=r"no LoRA leaf among 2 names: dense.kernel; step\. .*rename= can"
    ):
        convert(tmp_path / "tree", tmp_path / "adapter", to="peft", config={"lora_alpha": 1})


def test_lora_leaves_that_no_rule_mentions_are_an_error(tmp_path):
    """Moments of an optimizer have the names of the weights, and must not become modules of the adapter."""
    save({"params": {"q": lora.pair()}, "mu": {"q": lora.pair()}}, tmp_path / "tree")
    arguments = {"to": "peft", "config": {"lora_alpha": 4}, "rename": [r"params\.(.*) -> \1"]}
    with pytest.raises(MismatchError, match=r"leaf 'mu\.q\.lora_a' is matched by no rule"):
        convert(tmp_path / "tree", tmp_path / "adapter", **arguments)


def test_an_adapter_holds_one_tree(tmp_path):
    for prefix in ("a", "b"):
        save(lora.state(), tmp_path / "tree", prefix=prefix)
    with pytest.raises(ValueError, match=r"one adapter holds one tree, and the source has \['a', 'b'\]"):
        convert(tmp_path / "tree", tmp_path / "adapter", to="peft", config={"lora_alpha": 4})
    convert(tmp_path / "tree", tmp_path / "adapter", to="peft", prefix="b", config={"lora_alpha": 4})
    assert len(contents(tmp_path / "adapter")[0]) == 4


def test_a_configuration_is_for_adapters_alone(source, tmp_path):
    with pytest.raises(
        ValueError, match="config= is for to='peft' and for the rules of rename=, and the target is npz"
    ):
        convert(source, tmp_path / "new.npz", config={"lora_alpha": 4})


# ------------------------------------------------------------------------------------------ the whole


def test_there_and_back_again(source, tmp_path):
    convert(source, tmp_path / "adapter", to="peft", config={"lora_alpha": 4})
    assert verify(tmp_path / "adapter").has_digests
    convert(tmp_path / "adapter", tmp_path / "back", to="tensorstore", rename=BACK)
    expected = {str(i): {"q_proj": lora.pair(i)} for i in range(2)}
    assert_same(load(tmp_path / "back"), {"model": {"layers": expected}})
    # The configuration went along as metadata, so nothing has to be said again.
    convert(tmp_path / "back", tmp_path / "again", to="peft")
    ours, theirs = contents(tmp_path / "adapter"), contents(tmp_path / "again")
    assert_same(ours[0], theirs[0])
    assert ours[1] == theirs[1]


def test_casts_go_with_it(tmp_path):
    tensors, _ = to_peft(lora.state(), tmp_path, dtype="float16")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"float16"}


def test_damage_in_the_source_leaves_no_adapter(source, tmp_path):
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(b"\xff" * 300)
    with pytest.raises(CorruptionError, match="lora_"):
        convert(source, tmp_path / "adapter", to="peft", config={"lora_alpha": 4})
    assert os.listdir(tmp_path) == ["lora"]


_KILLED = """
import os, sys
from eformer.checkpoint import convert

def die(done, total):
    if done == total:
        os._exit(9)

convert(sys.argv[1], sys.argv[2], to="peft", config={"lora_alpha": 4}, progress=die)
"""


def test_killed_between_its_two_files_it_leaves_neither(source, tmp_path):
    assert programs.run(_KILLED, source, tmp_path / "adapter").returncode == 9
    assert not (tmp_path / "adapter").exists()
    convert(source, tmp_path / "adapter", to="peft", config={"lora_alpha": 4})
    assert sorted(os.listdir(tmp_path)) == ["adapter", "lora"]
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
