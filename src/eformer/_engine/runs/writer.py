"""Make sure that a run has one writer: the job that began last."""

from __future__ import annotations

import datetime as dt
import os
import socket
from typing import TYPE_CHECKING

import jax
import msgspec

from eformer._engine.record.values import json_decoder
from eformer._engine.stores.base import read_whole
from eformer.errors import SupersededError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store

RUN_FILE = "run.json"


class _Claim(msgspec.Struct):
    """Who writes a run: an id that no other job has, and where it runs, for people who look."""

    id: str
    host: str = ""
    pid: int = 0
    since: str = ""


class Writer:
    """The writer of a run. The first process writes its id to `run.json`; every commit looks whether it still stands
    there."""

    def __init__(self, store: Store, own_id: str) -> None:
        self._store, self._id = store, own_id
        self._has_claimed = False

    def claim(self) -> None:
        """Become the writer, before the first step is loaded or saved."""
        if self._has_claimed or jax.process_index() != 0:
            return
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        data = msgspec.json.encode(_Claim(self._id, socket.gethostname(), os.getpid(), now))
        self._store.make()
        upload = self._store.begin()
        try:
            with upload.exclusive():
                upload.sweep(None)
                upload.swap(RUN_FILE, data, None)
        finally:
            upload.close()
        self._has_claimed = True

    def check(self) -> None:
        """Raise a SupersededError if another job has become the writer."""
        claim = json_decoder(_Claim).decode(read_whole(self._store, RUN_FILE)[0])
        if claim.id != self._id:
            raise SupersededError(
                f"{self._store.url} is written by another job since {claim.since}: process {claim.pid} on "
                f"{claim.host}. This one saves nothing any more"
            )
