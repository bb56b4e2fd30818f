"""Requests and answers of the server: parse a request, and refuse requests of other sites. Pure."""

from __future__ import annotations

import hmac
import ipaddress
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST_PARAMETERS = 16

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_SAME_SITE = ("same-origin", "none")


@dataclass(frozen=True, slots=True)
class Site:
    """The address of the server, and the secret that every request begins with."""

    host: str
    port: int
    token: str = field(repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{self.token}/"

    @property
    def is_loopback(self) -> bool:
        """Tell whether only this machine reaches the address."""
        address = _address(self.host)
        return self.host == "localhost" if address is None else address.is_loopback

    def has_name(self, host: str) -> bool:
        """Tell whether a `Host` header names this site.

        An attacker may point a name of their own at this machine (DNS rebinding), so other names are refused. An
        address leads to one machine alone, so beyond loopback every address is accepted, and the given name.
        """
        name, port = _split(host.lower())
        if port != str(self.port):
            return False
        if self.is_loopback:
            return name in (*_LOOPBACK_NAMES, self.host.lower())
        return name == self.host.lower() or _address(name.strip("[]")) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _split(host: str) -> tuple[str, str]:
    """Split a `Host` header into name and port. Browsers leave out port 80."""
    name, colon, port = host.rpartition(":")
    return (name, port) if colon and not port.endswith("]") else (host, "80")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request: the parts of its path after the token, and its parameters."""

    parts: tuple[str, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    known: str = ""  # the ETag of the answer that the client has
    has_gone: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a request."""

    body: bytes = b""
    kind: str = "application/json"
    status: int = 200
    etag: str = ""


WITH_SLASH = Answer(
    status=308
)  # to the same address with a slash after it, which the relative links of the page need


class RefusedError(Exception):
    """A refused request, with the status and the reason to send."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def admitted(site: Site, target: str, headers: Sequence[tuple[str, str]]) -> HttpRequest:
    """Parse a GET or HEAD request; raise RefusedError if it is not allowed.

    The token is compared last: another site never learns from the answer whether it has guessed the token, because
    requests that its pages make are refused before.
    """
    given = {name.lower(): value for name, value in headers}
    names = [name.lower() for name, _ in headers]
    if names.count("host") != 1 or not site.has_name(given["host"]):
        raise RefusedError(421, "the Host header is not the address that is served here")
    if "transfer-encoding" in given or given.get("content-length", "0") != "0":
        raise RefusedError(413, "requests have no body here")
    if not _is_of_this_site(given):
        raise RefusedError(403, "requests of other sites are refused")
    parts, parameters = _parsed(target)
    if not parts or not hmac.compare_digest(parts[0].encode(errors="replace"), site.token.encode()):
        raise RefusedError(
            403, "the token is missing or wrong: open the address that `eformer serve` printed"
        )
    return HttpRequest(parts[1:], parameters, given.get("if-none-match", ""))


def _is_of_this_site(given: Mapping[str, str]) -> bool:
    """Tell whether a page of this site has sent the request, or the user has opened the page in a tab. A link on
    another site may open it, but no other site may show it in a frame."""
    if "origin" in given and given["origin"] != f"http://{given['host']}":
        return False
    is_opened = given.get("sec-fetch-mode") == "navigate" and given.get("sec-fetch-dest") == "document"
    return is_opened or given.get("sec-fetch-site", "none") in _SAME_SITE


def _parsed(target: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Split a path at its slashes, then decode each part: a slash that is encoded stays in its part."""
    if not target.startswith("/") or target.startswith("//"):
        raise RefusedError(400, "expected a path")
    try:
        found = urlsplit(target)
        pairs = parse_qsl(
            found.query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="strict"
        )
        parts = tuple(unquote(part, errors="strict") for part in found.path[1:].split("/"))
    except ValueError:
        raise RefusedError(400, "the path or its parameters cannot be read") from None
    return parts, dict(pairs)


def as_json(value: Any, *, status: int = 200, etag: str = "") -> Answer:
    """Return an answer in JSON. Numbers that JSON lacks must have been replaced."""
    return Answer(
        json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), status=status, etag=etag
    )


def as_error(status: int, reason: str) -> Answer:
    return as_json({"error": reason}, status=status)
