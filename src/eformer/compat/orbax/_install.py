"""Put the door into the place of `orbax.checkpoint`, for programs that import it by name.

Tests: tests/compat_orbax/test_install.py.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DOOR, ORBAX = "eformer.compat.orbax", "orbax.checkpoint"

# Modules of Orbax by their names, and the modules of the door in their places.
_ELSEWHERE = {
    "checkpoint_args": "args",
    "abstract_checkpoint_manager": "checkpoint_manager",
    "experimental.v1": "v1",
    "_src.checkpoint_managers.preservation_policy": "checkpoint_managers",
    "_src.checkpoint_managers.save_decision_policy": "checkpoint_managers",
    "_src.checkpointers.checkpointer": "checkpointers",
    "_src.checkpointers.async_checkpointer": "checkpointers",
    "_src.checkpointers.standard_checkpointer": "checkpointers",
    "_src.handlers.checkpoint_handler": "handlers",
    "_src.handlers.async_checkpoint_handler": "handlers",
    "_src.handlers.composite_checkpoint_handler": "handlers",
    "_src.handlers.json_checkpoint_handler": "handlers",
    "_src.handlers.pytree_checkpoint_handler": "handlers",
    "_src.handlers.standard_checkpoint_handler": "handlers",
    "_src.handlers.handler_registration": "handlers",
    "_src.metadata.value": "metadata",
    "_src.metadata.tree": "metadata",
    "_src.multihost.multihost": "multihost",
    "_src.path.step": "step",
    "_src.serialization.type_handlers": "type_handlers",
    "_src.tree.utils": "tree",
}
_EMPTY: tuple[str, ...] = (
    "experimental",
    "_src",
    "_src.checkpoint_managers",
    "_src.checkpointers",
    "_src.handlers",
)
_EMPTY = (*_EMPTY, "_src.metadata", "_src.multihost", "_src.path", "_src.serialization", "_src.tree")


class _Finder(MetaPathFinder, Loader):
    """Finds modules of the door by the names that Orbax's modules have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != ORBAX and not name.startswith(f"{ORBAX}."):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        below = spec.name.removeprefix(ORBAX).removeprefix(".")
        if below in _EMPTY:
            return ModuleType(spec.name)
        try:
            return importlib.import_module(".".join(filter(None, [DOOR, _ELSEWHERE.get(below, below)])))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{spec.name} has no counterpart in {DOOR}, which stands in its place; import the name from "
                f"{ORBAX} itself, or run the program without the door",
                name=spec.name,
            ) from error

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module of the door has been executed. Its own name stays."""


def install() -> None:
    """Let `import orbax.checkpoint` import the door, in this program.

    Call it before anything imports `orbax.checkpoint`; afterwards it raises RuntimeError.
    """
    if any(isinstance(one, _Finder) for one in sys.meta_path):
        return
    if ORBAX in sys.modules:
        users = sorted(
            name
            for name, module in list(sys.modules.items())
            if not name.startswith("orbax") and _uses(module)
        )
        raise RuntimeError(
            f"{ORBAX} was imported before install(), by {', '.join(users[:5]) or 'this program'}: call "
            "eformer.compat.orbax.install() first"
        )
    sys.meta_path.insert(0, _Finder())
    door = importlib.import_module(DOOR)
    sys.modules[ORBAX] = door
    parent = sys.modules.setdefault("orbax", _package())
    parent.checkpoint = door  # type: ignore[attr-defined]


def _package() -> ModuleType:
    """Return the package `orbax`, which may have other parts, or an empty one."""
    try:
        return importlib.import_module("orbax")
    except ModuleNotFoundError:
        package = ModuleType("orbax")
        package.__path__ = []
        return package


def _uses(module: Any) -> bool:
    theirs = sys.modules[ORBAX]
    try:
        return any(value is theirs for value in vars(module).values())
    except (TypeError, RuntimeError):
        return False
