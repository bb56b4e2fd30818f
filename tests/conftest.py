"""Eight virtual devices. Hypothesis: a quick run by default; HYPOTHESIS_PROFILE=thorough looks much longer."""

import os

import jax
import pytest
from hypothesis import HealthCheck, settings

collect_ignore = ["frameworks"]  # they need torch and more: `make frameworks` runs them

settings.register_profile(
    "quick", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
if not os.access(".", os.W_OK):  # a checkout of somebody else's: failures are not remembered
    settings.register_profile("quick", parent=settings.get_profile("quick"), database=None)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices, before any backend starts


@pytest.fixture(scope="session")
def trusted():
    """Lets checkpoints build the namedtuples of the test trees."""
    from eformer.checkpoint import register_node
    from support.trees import Empty, Moments

    register_node(Moments)
    register_node(Empty)
