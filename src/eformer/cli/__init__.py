"""The command `eformer`: inspect, verify, compare, convert and prune checkpoints, without jax."""

from eformer import _install  # noqa: F401  which warns of another package of this name
