"""The command `eformer`: inspect, verify, sign, compare, convert, prune and show checkpoints, without jax."""

from eformer import _install  # noqa: F401  which warns of another package of this name
