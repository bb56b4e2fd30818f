"""What every layout of every format does. A layout inherits the class and says where it is saved."""

from __future__ import annotations

from contracts.damage import Damage
from contracts.like import Like
from contracts.on_disk import OnDisk
from contracts.prefixes import Prefixes
from contracts.replacing import Replacing
from contracts.round_trips import RoundTrips
from contracts.shardings import Resharding, Shardings
from support.meshes import layouts, meshes
from support.states import model

__all__ = [
    "CheckpointContract",
    "DirectoryContract",
    "OnDisk",
    "TargetContract",
    "layouts",
    "meshes",
    "model",
]


class CheckpointContract(RoundTrips, Resharding, Replacing, Damage):
    """Of one tree, wherever it is."""


class TargetContract(Like, Shardings):
    """Of the tree that a load is asked for. It is decided above the formats: two layouts show it."""


class DirectoryContract(Prefixes, CheckpointContract):
    """Of as many trees as there are prefixes."""
