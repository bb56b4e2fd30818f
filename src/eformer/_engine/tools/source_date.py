"""The time that a tool records: now, or SOURCE_DATE_EPOCH, with which equal conversions have equal bytes.

Tests: tests/engine/tools/test_parts.py.
"""

from __future__ import annotations

import datetime as dt
import os
import re

VARIABLE = "SOURCE_DATE_EPOCH"


def recorded_now() -> dt.datetime:
    """Return the time to record. Raise ValueError if the variable is no number of seconds since 1970."""
    text = os.environ.get(VARIABLE)
    if not text:
        return dt.datetime.now(dt.UTC)
    if not re.fullmatch(r"[0-9]{1,11}", text):
        raise ValueError(f"{VARIABLE}={text!r}: expected seconds since 1970; correct or unset it")
    return dt.datetime.fromtimestamp(int(text), dt.UTC)
