"""Books for MaxText give bit for bit what MaxText's own mapping and hooks give, scanned and not."""

import numpy as np
import pytest

from eformer import checkpoint
from support import maxtext_oracle as maxtext
from support.states import flat
from support.tiny_models import MODELS, config_of, leaves_of

CASES = [(name, layout) for name in maxtext.MODELS for layout in ("maxtext-unscanned", "maxtext")]


def name_for_maxtext(name, leaf):
    """MaxText reads Gemma 3 by the names that transformers has in memory."""
    return "model." + leaf.replace("language_model.model.", "language_model.") if name == "gemma3" else leaf


def theirs(name, shapes, *, scan):
    leaves = {name_for_maxtext(name, n): array.astype(np.float32) for n, array in leaves_of(name).items()}
    return maxtext.converted(name, config_of(name), leaves, shapes, scan=scan)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_book_gives_what_maxtext_gives(name, layout):
    ours = flat(checkpoint.load(MODELS / name, rename=layout, dtype=np.float32))
    expected = theirs(name, {leaf: a.shape for leaf, a in ours.items()}, scan=layout == "maxtext")
    assert ours.keys() == expected.keys()
    worst = 0.0
    for leaf, array in expected.items():
        assert ours[leaf].shape == array.shape, leaf
        worst = max(worst, float(np.abs(ours[leaf] - array).max()))
    assert worst == 0, f"{name}/{layout}: the largest difference is {worst:.1e}"
