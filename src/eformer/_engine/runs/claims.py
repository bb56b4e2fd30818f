"""Read and write `run.json`: which job writes a run, and which step it goes on from. No jax."""

from __future__ import annotations

import msgspec

from eformer._engine.formats.steps import RUN_FILE
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import Store, read_whole
from eformer.errors import FormatError


class Claim(msgspec.Struct, frozen=True):
    """The writer of a run: an id that no other job has, and where it runs, for people who look; and the step that it
    was resumed from."""

    id: str
    host: str = ""
    pid: int = 0
    since: str = ""
    resumed_from: int | None = None

    @classmethod
    def from_json(cls, data: bytes | None) -> Claim | None:
        """Return the claim; None for a file that is not there, or cannot be read."""
        try:
            return None if data is None else json_decoder(cls).decode(data)
        except MALFORMED_JSON:
            return None

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def claim_of(store: Store) -> Claim | None:
    """Return the claim of the job that writes a run; None if there is none, or it cannot be read."""
    try:
        return Claim.from_json(read_whole(store, RUN_FILE)[0])
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def resumed_from(store: Store) -> int | None:
    """Return the number of the step that a run was resumed from last, which always stays."""
    claim = claim_of(store)
    return claim.resumed_from if claim else None
