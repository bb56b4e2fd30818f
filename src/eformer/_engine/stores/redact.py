"""Keep secrets out of messages.

Tests: tests/engine/stores/test_secrets.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LEAST = 6  # characters; shorter values are no secrets, and occur in other words
_SECRET_NAME = re.compile(
    r"key|secret|token|sas|password|signature|connection_string|headers|proxy_url", re.IGNORECASE
)
_PLAIN_NAME = re.compile(
    r"_(file|path|uri|enabled)$|(?<!proxy)_url$|(?<!key)_id$|skip_signature", re.IGNORECASE
)

_PATTERNS = (
    (re.compile(r"\?[^\s\"'<>]*"), "?..."),  # the query of a URL may carry a signature
    (re.compile(r"//[^\s/@\"'<>]+@"), "//...@"),  # a user name and a password
    (re.compile(r"\b(Bearer|Basic)\s+[^\s\"'<>]+", re.IGNORECASE), r"\1 ..."),
    (re.compile(r"\b(x-amz-security-token|sig|signature)\s*[:=]\s*[^\s,&\"'<>]+", re.IGNORECASE), r"\1=..."),
    # Servers repeat the text that they have compared with a signature, which holds tokens.
    (
        re.compile(
            r"<(\w*(?:StringToSign|CanonicalRequest|AccessKeyId|Signature|Authentication|Token)\w*)>.*?</\1>",
            re.DOTALL,
        ),
        r"<\1>...</\1>",
    ),
)


def secrets_among(settings: Mapping[str, object]) -> set[str]:
    """Return the values of settings or variables with names of secrets."""
    return {
        str(text)
        for name, value in settings.items()
        if _SECRET_NAME.search(name) and not _PLAIN_NAME.search(name)
        for text in (value.values() if isinstance(value, dict) else [value])
    }


class Redactor:
    """Replaces known secrets, and text that looks like a secret."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spelled = {form for secret in secrets for form in _spellings(secret) if len(form) >= _LEAST}
        longest_first = sorted(map(re.escape, spelled), key=len, reverse=True)
        self._known = re.compile("|".join(longest_first)) if longest_first else None

    def __call__(self, text: str) -> str:
        if self._known:
            text = self._known.sub("...", text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text


def _spellings(secret: str) -> set[str]:
    """Return how a secret may appear: as it is, encoded for a URL, and the values of a query or connection string."""
    inner = [part.partition("=")[2] for part in secret.split(";")] if ";" in secret else []
    signatures = re.findall(r"(?<![\w])sig=([^&;\s]+)", secret)
    every = {secret, *inner, *signatures, *map(unquote, signatures)}
    return every | {quote(one, safe="") for one in every} | {quote(one) for one in every}
