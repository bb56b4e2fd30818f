"""Name checkpoints and models of TensorFlow, which eformer does not read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection

    from eformer._engine.formats.read_format import Place

_DATA = re.compile(r"(.*)\.data-\d{5}-of-\d{5}")
_MODELS = ("saved_model.pb", "saved_model.pbtxt")
ADVICE = (
    "read its variables with tf.train.load_checkpoint and write them with numpy.savez, or save the model of Keras as "
    ".weights.h5"
)


def name_file(name: str) -> str | None:
    """Name a file of TensorFlow, with what to do; return None for other names."""
    if _DATA.fullmatch(name) or name.endswith(".index"):
        return f"a part of a TensorFlow checkpoint; {ADVICE}"
    if name in _MODELS:
        return f"the graph of a TensorFlow SavedModel; {ADVICE}"
    return None


def name_prefix(name: str, there: Collection[str]) -> str | None:
    """Name the TensorFlow checkpoint whose files begin with a name that is not a file itself."""
    if f"{name}.index" not in there:
        return None
    return f"the files {name}.* are a TensorFlow checkpoint, which eformer does not read; {ADVICE}"


def refuse(place: Place) -> None:
    """Refuse a directory that TensorFlow wrote."""
    names = set(place.names)
    data = [match[1] for name in names if (match := _DATA.fullmatch(name))]
    if any(f"{prefix}.index" in names for prefix in data):
        what = "a TensorFlow checkpoint"
    elif names & set(_MODELS):
        what = "a SavedModel of TensorFlow"
    else:
        return
    raise FormatError(f"{place.store.url} holds {what}, which eformer does not read; {ADVICE}")
