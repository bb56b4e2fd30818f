"""Where leaves go: what wins over what, and what cannot be."""

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading.request import PlacementRequest
from eformer._engine.loading.rules import PlaceableLeaf, by_name, place, warn_of_idle_rules
from eformer._engine.record.manifest import RecordedSharding
from eformer.errors import MismatchError
from support.meshes import meshes


def line():
    return meshes()[0]


def grid():
    return meshes()[1]


def recorded(*spec):
    return RecordedSharding(spec, {"x": 8})


def specs(leaves, *, prefix=None, ignored=(), **request):
    placed, _ = place(leaves, PlacementRequest(**request), prefix=prefix, ignored=ignored)
    return {name: sharding.spec for name, sharding in placed.items()}


MATRIX = PlaceableLeaf((8, 8))


def test_rules_are_pairs_or_a_dict_in_its_order():
    rules = {"w": P("x"), ".": P(None, "x")}
    expected = {"w": P("x"), "v": P(None, "x")}
    for given in (rules, list(rules.items()), iter(rules.items())):
        assert specs({"w": MATRIX, "v": MATRIX}, mesh=line(), rules=given) == expected


def test_shardings_win_over_rules_over_like_over_the_record():
    leaf = PlaceableLeaf((8, 8), like=P(None, "x"), recorded=recorded("x", None))
    mesh = line()
    assert specs({"w": leaf}, mesh=mesh) == {"w": P(None, "x")}
    assert specs({"w": leaf}, mesh=mesh, rules=[("w", P("x"))]) == {"w": P("x")}
    assert specs({"w": leaf}, mesh=mesh, rules=[("w", P("x"))], shardings={"w": P()}) == {"w": P()}
    without_like = PlaceableLeaf((8, 8), recorded=recorded("x", None))
    assert specs({"w": without_like}, mesh=mesh) == {"w": P("x", None)}


def test_without_a_mesh_only_shardings_and_like_place_leaves():
    there = NamedSharding(line(), P("x"))
    leaves = {
        "a": MATRIX,
        "b": PlaceableLeaf((8,), like=there),
        "c": PlaceableLeaf((8,), recorded=recorded("x")),
    }
    placed, _ = place(leaves, PlacementRequest(shardings={"a": there}))
    assert placed == {"a": there, "b": there}


def test_equal_shardings_become_one_object_for_leaves_of_all_shapes():
    def own(rows):  # as every array of a tree has its own
        return PlaceableLeaf((rows, 2), like=NamedSharding(line(), P("x")))

    leaves = {"a": own(8), "b": own(8), "c": own(16), "d": PlaceableLeaf((8,), recorded=recorded("x"))}
    placed, _ = place(leaves, PlacementRequest(mesh=line()))
    assert placed.keys() == leaves.keys()
    assert len({id(sharding) for sharding in placed.values()}) == 1


def test_the_first_rule_that_is_found_in_the_name_counts_and_scalars_are_replicated():
    leaves = {"block.kernel": MATRIX, "block.step": PlaceableLeaf(()), "other": MATRIX}
    rules = [("block/kernel", P("x", "y")), ("block", P("y")), ("kernel", P())]
    assert specs(leaves, mesh=grid(), rules=rules) == {
        "block.kernel": P("x", "y"),
        "block.step": P(),
        "other": P(),
    }


def test_names_in_rules_are_not_escaped():
    assert specs({"a%2Eb": MATRIX}, mesh=line(), rules=[(r"^a\.b$", P("x"))]) == {"a%2Eb": P("x")}


def test_numpy_arrays_stay_unless_a_rule_or_a_sharding_moves_them():
    leaves = {
        "n": PlaceableLeaf((8,), is_numpy=True),
        "wide": PlaceableLeaf((8,), is_numpy=True, is_host_only=True),
    }
    assert specs(leaves, mesh=line()) == {}
    assert specs(leaves, mesh=line(), rules=[]) == {"n": P()}
    assert specs(leaves, mesh=line(), shardings=P("x")) == {"n": P("x"), "wide": P("x")}


def test_numpy_arrays_move_to_the_mesh_where_a_door_asks_for_it_and_jax_can_hold_them():
    leaves = {
        "n": PlaceableLeaf((8,), is_numpy=True),
        "wide": PlaceableLeaf((8,), is_numpy=True, is_host_only=True),
    }
    assert specs(leaves, mesh=line(), moves_numpy=True) == {"n": P()}
    with pytest.raises(MismatchError, match="leaf 'n': no sharding is given for it"):
        specs(leaves, mesh=grid(), moves_numpy=True)
    assert specs(leaves, moves_numpy=True) == {}


def test_a_current_mesh_places_leaves_and_refuses_none():
    leaves = {
        "saved": PlaceableLeaf((8, 8), recorded=recorded(None, "x")),
        "odd": PlaceableLeaf((7,), recorded=recorded("x")),
        "new": MATRIX,
        "wide": PlaceableLeaf((8,), is_host_only=True),
        "n": PlaceableLeaf((8,), is_numpy=True),
    }
    found = specs(leaves, mesh=grid(), is_current_mesh=True)
    assert found == {"saved": P(None, "x"), "odd": P(), "new": P()}


def test_a_sharding_on_an_abstract_mesh_means_the_same_axes_of_the_mesh():
    abstract = NamedSharding(grid().abstract_mesh, P("y"), memory_kind="pinned_host")
    expected = NamedSharding(grid(), P("y"), memory_kind="pinned_host")
    leaf = PlaceableLeaf((8, 8), like=abstract)
    assert place({"w": leaf}, PlacementRequest(mesh=grid()))[0] == {"w": expected}
    assert place({"w": MATRIX}, PlacementRequest(mesh=grid(), shardings=abstract))[0] == {"w": expected}
    with pytest.raises(MismatchError) as error:
        place({"w": leaf, "v": leaf}, PlacementRequest())
    assert error.value.problems == tuple(
        f"leaf {name!r} [8, 8]: {P('y')} is on an AbstractMesh, which has no devices; pass mesh=, or use jax.set_mesh"
        for name in "wv"
    )


def test_the_recorded_kind_of_memory_is_kept_where_the_devices_have_it():
    def kind(recorded):
        leaf = PlaceableLeaf((8,), recorded=recorded)
        (sharding,) = place({"w": leaf}, PlacementRequest(mesh=line()))[0].values()
        return sharding.memory_kind

    default = NamedSharding(line(), P()).memory_kind
    assert kind(RecordedSharding(("x",), {"x": 8}, "pinned_host")) == "pinned_host"
    assert kind(RecordedSharding((), {}, "pinned_host")) == "pinned_host"
    assert kind(RecordedSharding(("x",), {"x": 8}, "of another platform")) == default


def test_rules_that_match_no_name_are_listed_once(caplog):
    rules = [("a/w", P()), ("b", P()), (r"^w", P())]
    warn_of_idle_rules(["a.w", "a.v"], PlacementRequest(rules=rules))
    assert [record.getMessage() for record in caplog.records] == [
        "rules= that match no leaf: 'b'; '^w'; they are searched for in names such as 'a/w'"
    ]
    warn_of_idle_rules(["a.w"], PlacementRequest(rules=rules[:1]))
    warn_of_idle_rules(["a.w"], PlacementRequest())
    assert len(caplog.records) == 1


def test_a_record_that_does_not_fit_is_replaced_where_only_one_way_is_left():
    leaf = PlaceableLeaf((7,), recorded=recorded("x"))
    assert specs({"w": leaf}, mesh=line()) == {"w": P()}
    assert specs({"w": leaf}, mesh=grid(), replicate=True) == {"w": P()}
    assert specs({"s": PlaceableLeaf(())}, mesh=grid()) == {"s": P()}
    with pytest.raises(MismatchError) as error:
        specs({"w": leaf}, mesh=grid(), rules_name="partition_rules")
    assert error.value.problems == (
        f"leaf 'w': no sharding is given for it on a mesh with axes ('x', 'y'); it was saved as {P('x')}, "
        "which does not fit this mesh; pass partition_rules= or shardings=",
    )


def test_functions_are_returned_and_not_called():
    leaves = {"a": MATRIX, "b": MATRIX}
    assert place(leaves, PlacementRequest(shardings={"a": np.asarray})) == ({}, {"a": np.asarray})
    assert place(leaves, PlacementRequest(shardings=np.asarray))[1] == dict.fromkeys(leaves, np.asarray)


def test_leaves_that_cannot_be_placed_are_listed_all_at_once():
    leaves = {"odd": PlaceableLeaf((7,)), "flat": PlaceableLeaf((8,)), "kernel": MATRIX}
    shardings = {"odd": P("x"), "flat": P("x", None), "kernel": 3, "kernal": P()}
    with pytest.raises(MismatchError, match="leaves cannot be placed as requested") as error:
        specs(leaves, mesh=line(), shardings=shardings)
    unknown, no_sharding, flat, odd = error.value.problems
    assert unknown == "shardings name 'kernal', which is not an array of the checkpoint (nearest is 'kernel')"
    assert no_sharding == "leaf 'kernel': 3 is not a Sharding, PartitionSpec or callable"
    assert odd.startswith(f"leaf 'odd' [7]: {P('x')} does not fit: ")
    assert flat == f"leaf 'flat' [8]: {P('x', None)} does not fit: it is for 2 axes, the leaf has 1"


def test_a_spec_needs_a_mesh_and_so_do_rules():
    with pytest.raises(MismatchError, match=r"leaf 'w' \[8, 8\]: P.*\('x',\) needs a mesh="):
        specs({"w": MATRIX}, shardings=P("x"))
    with pytest.raises(ValueError, match="partition_rules= need a mesh= to place leaves on"):
        specs({"w": MATRIX}, rules=[], rules_name="partition_rules")


def test_a_pattern_that_cannot_be_compiled_is_shown():
    with pytest.raises(ValueError, match=r"rules=: '\(' is not a regular expression: "):
        specs({"w": MATRIX}, mesh=line(), rules=[("(", P())])


def test_a_rule_of_axes_alone_is_no_spec():
    with pytest.raises(MismatchError, match=r"\('x',\) is not a PartitionSpec or a Sharding"):
        specs({"w": MATRIX}, mesh=line(), rules=[("w", ("x",))])


def test_every_leaf_has_to_be_named_if_that_is_asked_for():
    leaves = {"a": MATRIX, "b": MATRIX}
    assert set(specs(leaves, mesh=line(), every_leaf=True)) == {"a", "b"}
    assert set(specs(leaves, mesh=line(), every_leaf=True, shardings={"a": P(), "b": P()})) == {"a", "b"}
    with pytest.raises(KeyError, match=r"shardings= must name every leaf.*missing: 'b'"):
        specs(leaves, mesh=line(), every_leaf=True, shardings={"a": P()})


def test_shardings_of_ignored_leaves_are_accepted_and_left_out():
    assert specs({"a": MATRIX}, mesh=line(), shardings={"a": P("x"), "b": P()}, ignored=["b"]) == {
        "a": P("x")
    }


@pytest.mark.parametrize(
    "shardings",
    [{"a": {"w": 1}}, {"a.w": 1}, {"model": {"a": {"w": 1}}}, {"model.a.w": 1}],
    ids=["nested", "flat", "nested below the prefix", "flat below the prefix"],
)
def test_shardings_are_found_by_name(shardings):
    assert by_name(shardings, {"a.w"}, "model") == {"a.w": 1}


def test_a_name_with_dots_of_its_own_is_found_escaped():
    assert by_name({"a.b": 1}, {"a%2Eb"}) == {"a%2Eb": 1}
    assert by_name({"a.b": 1}, {"a.b"}) == {"a.b": 1}
