"""A pytree as {escaped name: leaf} plus its structure in JSON, and back exactly.

The structure, by kind of node (`docs/format/structure.md` has the whole grammar):

    "layers.0.w"                                    a leaf, by its name
    null                                            None
    {"dict": {"a": ..., "b": ...}}                  a dict of string keys; other keys: [[key, child], ...]
    {"list": [...]}  {"tuple": [...]}
    {"OrderedDict": [[key, child], ...]}
    {"defaultdict": [[key, child], ...], "factory": "list"}
    {"namedtuple": "module:Class", "children": {"mu": ..., "nu": ...}}
    {"dataclass": "module:Class", "static": {"name": value}, "children": {"w": ...}}
    {"node": "module:Class", "aux": value, "children": [...]}
"""

from eformer.checkpoint._tree._flatten import flatten
from eformer.checkpoint._tree._paths import is_array_like, join_key, leaf_key_paths
from eformer.checkpoint._tree._unflatten import unflatten, unflatten_like

__all__ = ["flatten", "is_array_like", "join_key", "leaf_key_paths", "unflatten", "unflatten_like"]
