"""Rules with blocks, groups, names, ones and dots, drawn by hypothesis, beside their leaves as numpy makes them."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

WORDS = ["w1", "w3", "w2", "x.y"]
PLUS, ONE, REST = "+", "1", "..."


@st.composite
def cuts(draw, items):
    """Cut a list into parts."""
    at = sorted(draw(st.sets(st.integers(1, len(items) - 1)))) if len(items) > 1 else []
    return [tuple(items[a:b]) for a, b in itertools.pairwise([0, *at, len(items)])] if items else []


def grouped(parts):
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


@st.composite
def holes(draw, named, sizes):
    """Return the placeholders of a name, and for each the function that fills it by the indices."""
    found = []
    for axes in draw(cuts(named)):
        if len(axes) == 1 and draw(st.booleans()):
            words = WORDS[: sizes[axes[0]]]
            found.append((f"{{{axes[0]}={'|'.join(words)}}}", lambda at, a=axes[0], w=words: w[at[a]]))
        else:
            start = draw(st.sampled_from([0, 3]))
            text = f"{{{start} + {grouped(axes)}}}" if start else f"{{{grouped(axes)}}}"
            found.append((text, lambda at, axes=axes, start=start: str(start + number(at, axes, sizes))))
    return found


def number(at, axes, sizes):
    return int(np.ravel_multi_index([at[a] for a in axes], [sizes[a] for a in axes]))


class DrawnLeaf:
    """One name on a side: the axes in its name and brackets, and the axes inside of each of its blocks."""

    def __init__(self, prefix, blocks, inner, named, groups, found, sizes, rest):
        self.prefix, self.blocks, self.inner, self.named = prefix, blocks, inner, named
        self.groups, self.holes, self.sizes, self.rest = groups, found, sizes, rest

    @property
    def text(self):
        plus = "+".join(grouped(axes) if axes else ONE for axes in self.inner)
        parts = [grouped([plus if token == PLUS else token for token in group]) for group in self.groups]
        return f"{'.'.join([self.prefix, *(text for text, _ in self.holes)])} [{' '.join(parts)}]"

    def arrays(self):
        for index in itertools.product(*(range(self.sizes[a]) for a in self.named)):
            at = dict(zip(self.named, index, strict=True))
            yield ".".join([self.prefix, *(fill(at) for _, fill in self.holes)]), self.array(at)

    def array(self, at):
        """Return the leaf at indices of the axes in its name."""
        tokens = [token for group in self.groups for token in group]
        order = [each for token in tokens for each in (range(len(self.rest)) if token == REST else [token])]
        blocks = zip(self.blocks, self.inner, strict=True)
        pieces = [self.piece(*block, inner, at, order) for block, inner in blocks]
        whole = np.concatenate(pieces, order.index(PLUS)) if PLUS in order else pieces[0]
        return whole.reshape([n for group in self.groups for n in self.size(group)])

    def size(self, group):
        each = {
            **self.sizes,
            ONE: 1,
            PLUS: sum(math.prod(self.sizes[a] for a in inner) for inner in self.inner),
        }
        return self.rest if group == (REST,) else [math.prod(each[token] for token in group)]

    def piece(self, names, array, inner, at, order):
        part = array[tuple(at.get(a, slice(None)) for a in names)]
        there = [*(a for a in names if a not in at), *range(len(self.rest))]
        axes = [a for token in order for a in (inner if token == PLUS else [] if token == ONE else [token])]
        sizes = (
            self.sizes | {ONE: 1, PLUS: math.prod(self.sizes[a] for a in inner)} | dict(enumerate(self.rest))
        )
        return part.transpose([there.index(a) for a in axes]).reshape([sizes[token] for token in order])


@st.composite
def leaves(draw, prefix, blocks, sizes, rest):
    """Draw one name that has some blocks."""
    common = sorted(set.intersection(*(set(names) for names, _ in blocks)))
    outside = list(draw(st.permutations(common)))[
        : len(common) if len(blocks) == 1 else draw(st.integers(0, 3))
    ]
    inner = [draw(st.permutations([a for a in names if a not in outside])) for names, _ in blocks]
    count = draw(st.integers(0, len(outside)))
    tokens = draw(st.permutations([*outside[count:], *([PLUS] if len(blocks) > 1 else [])]))
    groups = draw(cuts(tokens))
    for more in ([(ONE,)] if draw(st.booleans()) else []) + ([] if rest is None else [(REST,)]):
        groups.insert(draw(st.integers(0, len(groups))), more)
    found = draw(holes(outside[:count], sizes))
    return DrawnLeaf(prefix, blocks, inner, outside[:count], groups, found, sizes, rest or ())


@st.composite
def sides(draw, prefix, blocks, sizes, rest):
    """Draw one side of a rule: its text, and its arrays by name."""
    parts = enumerate(draw(cuts(blocks)))
    found = [draw(leaves(f"{prefix}{n}", part, sizes, rest)) for n, part in parts]
    return ", ".join(leaf.text for leaf in found), dict(pair for leaf in found for pair in leaf.arrays())


@st.composite
def rules(draw):
    """Draw a rule, its leaves on the left and its leaves on the right. All numbers in them differ."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in "abcdef"[: draw(st.integers(1, 6))]}
    rest = draw(st.none() | st.lists(st.integers(1, 3), max_size=2))
    blocks, count = [], 0
    for _ in range(draw(st.integers(1, 3))):
        names = sorted(draw(st.sets(st.sampled_from(sorted(sizes)), min_size=1, max_size=4)))
        shape = [*(sizes[a] for a in names), *(rest or ())]
        blocks.append((names, np.arange(count, count + math.prod(shape), dtype=np.int32).reshape(shape)))
        count += math.prod(shape)
    (left, old), (right, new) = (draw(sides(prefix, blocks, sizes, rest)) for prefix in ("old", "new"))
    lets = "".join(f"{axis} = {size}\n" for axis, size in sizes.items())
    return f"{lets}{left} <-> {right}", old, new
