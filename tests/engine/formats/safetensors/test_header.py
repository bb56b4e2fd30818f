"""Headers of safetensors files that say something twice: refused wherever safetensors refuses them."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from eformer.checkpoint import load
from eformer.errors import FormatError
from support.safetensors_files import header

FIELDS = ['"dtype": "F32"', '"shape": [2]', '"data_offsets": [0, 8]']
A = f'"a": {{{", ".join(FIELDS)}}}'
DATA = np.array([1.5, 2.5], np.float32).tobytes()


def written(folder, text):
    (folder / "x.safetensors").write_bytes(header(text.encode(), DATA))
    return folder / "x.safetensors"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{{"__metadata__": {{}}, {A}, "__metadata__": {{}}}}', "has two __metadata__"),
        (f'{{"__metadata__": {{}}, {A}, "__meta\\u0064ata__": {{}}}}', "has two __metadata__"),
        (f"{{{A}, {A}}}", "has two tensors of the name 'a'"),
        (f"{{{A.replace('a', '', 1)}, {A.replace('a', '', 1)}}}", "has two tensors of the name ''"),
        *(
            (f'{{"a": {{{", ".join([*FIELDS, field])}}}}}', f"tensor 'a' has the field '{name}' twice")
            for field, name in zip(FIELDS, ["dtype", "shape", "data_offsets"], strict=True)
        ),
    ],
)
def test_repeated_fields_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(FormatError, match=message):
        load(written(tmp_path, text))


def test_colons_in_names_and_further_fields_are_not_taken_for_duplicates(tmp_path):
    text = (
        f'{{"__metadata__": {{"a:b": "c:d"}}, {A.replace("a", "layer:0", 1)[:-1]}, "note": 1, "note": 2}}}}'
    )
    np.testing.assert_array_equal(load(written(tmp_path, text))["layer:0"], [1.5, 2.5])


def members(**kinds):
    """Objects of JSON as text, whose members may occur more than once and in any order."""
    pairs = st.one_of(
        *(st.tuples(st.just(name.replace("META", "__metadata__")), kind) for name, kind in kinds.items())
    )
    return st.lists(pairs, max_size=6).map(
        lambda found: "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in found) + "}"
    )


plain = st.one_of(st.just('"F32"'), st.just("[2]"), st.just("[0, 8]"), st.just("{}"), st.just("null"))
tensor = members(
    dtype=st.just('"F32"'), shape=st.just("[2]"), data_offsets=st.just("[0, 8]"), extra=plain
) | st.permutations(FIELDS).map(lambda fields: "{" + ", ".join(fields) + "}")
headers = members(META=members(x=st.just('"y:z"'), y=st.just('""')), a=tensor, b=tensor)


@given(headers)
@example(f"{{{A}}}")
@example(f'{{"__metadata__": {{"x": "1", "x": "2"}}, {A}}}')
def test_whatever_safetensors_refuses_is_refused(tmp_path_factory, text):
    path = written(tmp_path_factory.mktemp("x"), text)
    try:
        found = {name: np.asarray(leaf).tobytes() for name, leaf in load(path).items()}
    except FormatError:
        found = None
    try:
        expected = {name: leaf.tobytes() for name, leaf in safetensors.numpy.load_file(path).items()}
    except safetensors.SafetensorError:
        expected = None
    has_two_tensors = max(text.count('"a":'), text.count('"b":')) > 1  # of which safetensors takes the last
    assert found == expected or (found is None and has_two_tensors)
