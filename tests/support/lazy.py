"""Lazy arrays in memory, which count the elements that are read, and rules applied to them."""

from dataclasses import replace

import numpy as np

from eformer._engine.record.boxes import Box
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.rename import rules_from


class InMemory(LazyArray):
    in_order = True

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.elements_read = 0

    def read(self, box):
        self.elements_read += box.size
        return self.array[box.slices]


def whole(array):
    return array.read(Box.whole(array.shape))


def in_memory(leaves):
    return {name: InMemory(np.asarray(leaf)) for name, leaf in leaves.items()}


def applied(rules, leaves, config=None, plain=(), *, back=False, **known):
    """Apply rules to numpy arrays; return the record of the new leaves."""
    parsed = replace(rules_from(rules), back=back)
    return parsed.apply(in_memory(leaves), list(plain), config, **known)


def arrays_of(renamed):
    return {name: whole(array) for name, array in renamed.arrays.items()}


def numbers(*shape, dtype=np.float32):
    """Return an array of different numbers."""
    return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) + 1
