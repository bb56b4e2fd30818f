"""Orbax's abstract test classes that its wheels contain, for each of the classes that they are meant for.

The runner runs this file by name. It imports after the graft, so the names below are the door's then.
"""

from orbax.checkpoint import AsyncCheckpointer, Checkpointer
from orbax.checkpoint._src.checkpointers import checkpointer_test_utils

try:
    from orbax.checkpoint.experimental.v1._src.testing.compatibility import (
        manager_compatibility_test_base as managers,
    )
    from orbax.checkpoint.experimental.v1._src.training import checkpointer_test_base as training
except ImportError:  # an older Orbax has neither
    managers = training = None


class CheckpointerTest(checkpointer_test_utils.CheckpointerTestBase.Test):
    def checkpointer(self, handler, **kwargs):
        return Checkpointer(handler, **kwargs)


class AsyncCheckpointerTest(checkpointer_test_utils.CheckpointerTestBase.Test):
    def checkpointer(self, handler, **kwargs):
        return AsyncCheckpointer(handler, **kwargs)


if training:

    class TrainingTest(training.CheckpointerTestBase.Test):
        pass

    class TrainingNamesTest(training.CheckpointerTestBase.DeprecationsTest):
        pass

    class CompatibilityTest(managers.ManagerCompatibilityTestBase):
        pass
