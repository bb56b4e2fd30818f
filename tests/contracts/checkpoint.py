"""What every layout of every format does. A layout inherits the class and says where it is saved."""

from __future__ import annotations

from contracts.damage import Damage
from contracts.like import Like
from contracts.on_disk import OnDisk
from contracts.prefixes import Prefixes
from contracts.replacing import Replacing
from contracts.round_trips import RoundTrips
from contracts.shardings import Shardings
from support.meshes import layouts, meshes
from support.states import model

__all__ = ["CheckpointContract", "DirectoryContract", "OnDisk", "layouts", "meshes", "model"]


class CheckpointContract(RoundTrips, Like, Shardings, Replacing, Damage):
    """Of one tree, wherever it is."""


class DirectoryContract(Prefixes, CheckpointContract):
    """Of as many trees as there are prefixes."""
