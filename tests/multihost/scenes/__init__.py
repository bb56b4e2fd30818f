"""What the processes of a job do. Every function is called in all of them, with the same arguments, by its name here."""

from multihost.scenes.buckets import *  # noqa: F403
from multihost.scenes.checkpoints import *  # noqa: F403
from multihost.scenes.data import *  # noqa: F403
from multihost.scenes.doors import *  # noqa: F403
from multihost.scenes.export import *  # noqa: F403
from multihost.scenes.live import *  # noqa: F403
from multihost.scenes.mistakes import *  # noqa: F403
from multihost.scenes.near import *  # noqa: F403
from multihost.scenes.orbax_door import *  # noqa: F403
from multihost.scenes.runs import *  # noqa: F403
from multihost.scenes.state import *  # noqa: F403
