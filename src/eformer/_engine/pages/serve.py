"""Serve the pages of a run or a checkpoint until it is stopped."""

from __future__ import annotations

import gc
import secrets
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from eformer._engine.pages.addresses import Pages
from eformer._engine.pages.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eformer._engine.pages.requests import Site
    from eformer._engine.record.policies import Keep


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    rules: Sequence[Keep] = (),
    ready: Callable[[Site], None],
) -> None:
    """Serve pages about the run or the checkpoint at `path` to everybody who has the address. Nothing is ever written.

    The address has a random token, and is given to `ready` before the first request is answered. Returns when it is
    interrupted.
    """
    # The leaves of a checkpoint are many small objects that live long: looking through them takes half of the time.
    gc.set_threshold(200_000, 20, 50)
    with closing(Pages(path, rules)) as pages, Server(host, port, secrets.token_urlsafe(24), pages) as server:
        ready(server.site)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
