"""The kinds of faults, in the order of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinds import (
    damage,
    leaks,
    masked,
    power,
    python_calls,
    random_kills,
    readers,
    stopped,
    suites,
    system_calls,
)

if TYPE_CHECKING:
    from kinds.kind import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        damage.Flips(),
        damage.Edits(),
        system_calls.Kills(),
        python_calls.Kills(),
        system_calls.Errors(),
        python_calls.Errors(),
        python_calls.Cancels(),
        random_kills.RandomKills(),
        power.Power(),
        power.Blocks(),
        readers.Readers(),
        stopped.Stopped(),
        leaks.Leaks(),
        *suites.SUITES,
        *masked.MASKED,
    )
}
