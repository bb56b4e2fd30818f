"""Take the state out of modules, such as flax NNX models, and put loaded state back.

Frameworks whose modules are plain pytrees (flax linen, Equinox, Haiku) need none of this.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import jax

from eformer._engine.trees.keras import Keras
from eformer._engine.trees.nnx import Nnx
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_MAX_DEPTH = 50  # of modules in the states of other modules


class Framework(Protocol):
    """The modules of one framework. A framework is used only if the caller has imported it."""

    def is_imported(self) -> bool:
        """Tell whether the caller can have modules of this framework at all."""
        ...

    def owns(self, kind: type) -> bool:
        """Tell whether objects of this type are modules of this framework."""
        ...

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        """Return the state of each module as a tree of plain containers. The first module has the state that several
        share."""
        ...

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        """Return the modules with these states: the same objects, or new objects that leave the old ones unchanged."""
        ...

    def transient(self, module: Any) -> Sequence[str]:
        """Name the parts of the state that the module makes and resets by itself when it is used."""
        ...


class _Registered:
    """Classes of the caller's own, with the functions that `register_module` was given."""

    def __init__(self) -> None:
        self.functions: dict[type, tuple[_Take, _Update | None, _Build | None]] = {}

    def is_imported(self) -> bool:
        return bool(self.functions)

    def owns(self, kind: type) -> bool:
        return any(base in self.functions for base in kind.__mro__)

    def take(self, modules: Sequence[Any]) -> Sequence[Any]:
        return [self._functions_of(module)[0](module) for module in modules]

    def put(self, modules: Sequence[Any], states: Sequence[Any], *, in_place: bool) -> Sequence[Any]:
        return [self._put(module, state, in_place) for module, state in zip(modules, states, strict=True)]

    def transient(self, module: Any) -> Sequence[str]:
        return ()

    def _put(self, module: Any, state: Any, in_place: bool) -> Any:
        _, update, build = self._functions_of(module)
        name = type(module).__qualname__
        if in_place and update:
            update(module, state)
            return module
        if build is None:
            raise StructureError(
                f"a {name} is registered without build=, and can only be updated in place: pass into= instead of like="
            )
        return build(module, state)

    def _functions_of(self, module: Any) -> tuple[_Take, _Update | None, _Build | None]:
        return next(self.functions[base] for base in type(module).__mro__ if base in self.functions)


_registered = _Registered()
_FRAMEWORKS: tuple[Framework, ...] = (_registered, Nnx(), Keras())

if TYPE_CHECKING:
    _Take = Callable[[Any], Any]
    _Update = Callable[[Any, Any], None]
    _Build = Callable[[Any, Any], Any]


def register_module(
    kind: type,
    *,
    state: Callable[[Any], Any],
    update: Callable[[Any, Any], None] | None = None,
    build: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Allow objects of your own class in the trees that are saved and loaded, or as the whole tree.

    kind      the class
    state     function of an object that returns its state, a tree of arrays
    update    function of an object and a loaded state that changes the object; for `load(..., into=)`
    build     function of an object and a loaded state that returns a new object; for `load(..., like=)`, and for
              `into` if there is no `update`

    Example:

        >>> checkpoint.register_module(Ema, state=lambda ema: ema.average, update=Ema.set_average)
        >>> checkpoint.save({"params": params, "ema": ema}, "run/100")
        >>> tree = checkpoint.load("run/100", into={"params": params, "ema": ema})
    """
    if update is None and build is None:
        raise ValueError("register_module needs update=, build=, or both")
    _registered.functions[kind] = state, update, build
    _framework_of.cache_clear()


def states_of(modules: Sequence[Any], depth: int = 0) -> list[Any]:
    """Return the state of each module, as a tree without modules."""
    if depth > _MAX_DEPTH:
        raise StructureError(f"the state of a {type(modules[0]).__qualname__} contains itself")
    taken = _taken(modules)
    nodes, treedef, inner = _modules_in(taken)
    if not inner:
        return taken
    states = iter(states_of(inner, depth + 1))
    plain: list[Any] = treedef.unflatten([next(states) if is_module(node) else node for node in nodes])
    return plain


def transient_of(module: Any) -> Sequence[str]:
    """Name the parts of the state of a module that it makes and resets by itself when it is used."""
    kind: Any = type(module)
    framework = _framework_of(kind)
    return framework.transient(module) if framework else ()


def with_leaves(tree: Any, leaves: Sequence[Any], *, in_place: bool) -> Any:
    """Return a tree with other leaves. `in_place` updates the modules in it where their class allows that."""
    nodes, treedef, modules = _modules_in(tree)
    if not modules:
        return treedef.unflatten(leaves)
    counts = [len(jax.tree.leaves(state)) for state in states_of(modules)]
    remaining, sizes = iter(leaves), iter(counts)
    of_modules: list[Any] = []
    others = []
    for node in nodes:
        if is_module(node):
            of_modules += itertools.islice(remaining, next(sizes))
        else:
            others.append(next(remaining))
    filled, plain = iter(_with_states(modules, of_modules, in_place)), iter(others)
    return treedef.unflatten([next(filled if is_module(node) else plain) for node in nodes])


def _with_states(modules: Sequence[Any], leaves: Sequence[Any], in_place: bool) -> list[Any]:
    """Return the modules with states of these leaves."""
    states = with_leaves(_taken(modules), leaves, in_place=in_place)

    def put(framework: Framework, positions: list[int]) -> Sequence[Any]:
        mine, theirs = [modules[n] for n in positions], [states[n] for n in positions]
        return framework.put(mine, theirs, in_place=in_place)

    return _by_framework(modules, put)


def _taken(modules: Sequence[Any]) -> list[Any]:
    """Return the state of each module as its framework gives it, which may contain modules."""
    return _by_framework(
        modules, lambda framework, positions: framework.take([modules[n] for n in positions])
    )


def _modules_in(tree: Any) -> tuple[list[Any], Any, list[Any]]:
    """Return the leaves of a tree, where modules count as leaves; its structure; and the modules."""
    any_modules = any(framework.is_imported() for framework in _FRAMEWORKS)
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_module if any_modules else None)
    return nodes, treedef, [node for node in nodes if is_module(node)] if any_modules else []


def is_module(node: Any) -> bool:
    """Tell whether a node is a module, whose state is stored in its place."""
    kind: Any = type(node)
    return _framework_of(kind) is not None


@lru_cache(1024)
def _framework_of(kind: Any) -> Framework | None:
    imported = (framework for framework in _FRAMEWORKS if framework.is_imported())
    return next((framework for framework in imported if framework.owns(kind)), None)


def _by_framework(modules: Sequence[Any], call: Callable[[Framework, list[int]], Sequence[Any]]) -> list[Any]:
    """Call a function for each framework, with the positions of its modules; return the results by position."""
    found: dict[Framework, list[int]] = {}
    for position, module in enumerate(modules):
        kind: Any = type(module)
        framework = _framework_of(kind)
        assert framework is not None
        found.setdefault(framework, []).append(position)
    results: list[Any] = [None] * len(modules)
    for framework, positions in found.items():
        for position, result in zip(positions, call(framework, positions), strict=True):
            results[position] = result
    return results
