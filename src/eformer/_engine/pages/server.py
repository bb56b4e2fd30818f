"""Speak HTTP with browsers: limit the bytes and the time of requests, and set the headers of every answer.

This is `http.server` of the standard library, because the pages need GET alone, for a handful of users on loopback: a
framework would bring more code, and its limits would have to be set as well. This module adds the limits that
`http.server` lacks: on the time of a whole request, on its length, and on the number of connections.
"""

from __future__ import annotations

import gc
import gzip
import io
import logging
import secrets
import select
import socket
import socketserver
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eformer._engine.pages.addresses import Pages
from eformer._engine.pages.requests import RefusedError, Site, admitted, as_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eformer._engine.pages.requests import Answer, HttpRequest
    from eformer._engine.record.policies import Keep

logger = logging.getLogger("eformer.serve")

MOST_CONNECTIONS = 64  # each has a thread
MOST_REQUEST = 32 * 2**10  # bytes of a request line and its headers
REQUEST_SECONDS = 20.0  # to send a request, counted from the end of the last answer
ANSWER_SECONDS = 30.0  # to take an answer
_COMPRESSED = 2**18  # bytes of an answer that is compressed: the columns of large trees, on slow networks

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    rules: Sequence[Keep] = (),
    ready: Callable[[Site], None],
) -> None:
    """Serve pages about the run or the checkpoint at `path` to every client that has the address. Write nothing.

    The address has a random token. `ready` gets it before the first request is answered. Return on Ctrl-C.
    """
    # The leaves of a checkpoint are many small, long-lived objects: the collector would take half of the time.
    gc.set_threshold(200_000, 20, 50)
    with closing(Pages(path, rules)) as pages, Server(host, port, secrets.token_urlsafe(24), pages) as server:
        ready(server.site)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answer requests until it is closed. Call `answer` with each request, in the thread of its connection."""

    daemon_threads = True  # so that Ctrl-C ends the program without waiting for clients
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, token: str, answer: Callable[[HttpRequest], Answer]) -> None:
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.answer = answer
        try:
            found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family, _, _, _, address = found
            super().__init__(address, _Connection)
        except OSError as error:
            raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}") from error
        self.site = Site(host, self.server_address[1], token)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError: the client has gone, or is too slow
            logger.exception("a connection has failed")


class _TooLongError(Exception):
    """A request that is longer than the limit."""


class _Input(io.RawIOBase):
    """The bytes of a client, up to a number of bytes and a time. Each request renews both limits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.renew()

    def renew(self) -> None:
        self._left, self._until = MOST_REQUEST, time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        if not self._left:
            raise _TooLongError
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        nbytes = self._connection.recv_into(memoryview(memory)[: self._left])
        self._left -= nbytes
        return nbytes


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self._input = _Input(self.connection)
        self.rfile = io.BufferedReader(self._input, MOST_REQUEST)

    def handle_one_request(self) -> None:
        self._input.renew()
        try:
            super().handle_one_request()
        except _TooLongError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def do_GET(self) -> None:
        try:
            request = admitted(self.server.site, self.path, self.headers.items())
            self._send(self._answer(replace(request, has_gone=self._has_gone)))
        except RefusedError as error:
            self.close_connection = True
            self._send(as_error(error.status, str(error)))

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, request: HttpRequest) -> Answer:
        try:
            answer = self.server.answer(request)
        except RefusedError:
            raise
        except Exception:
            logger.exception("the answer has failed")
            return as_error(500, "this page has failed; the terminal of `eformer serve` says why")
        return (
            replace(answer, status=304, body=b"") if answer.etag and answer.etag == request.known else answer
        )

    def _has_gone(self) -> bool:
        """Tell whether the client has closed the connection. Leave bytes of its next request unread."""
        events = select.poll()  # not select.select, which fails for descriptors above 1023
        events.register(self.connection, select.POLLIN)
        return bool(events.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def _send(self, answer: Answer) -> None:
        body, headers = answer.body, dict(_HEADERS)
        if len(body) > _COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        headers |= {
            "Content-Type": f"{answer.kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Date": self.date_time_string(),
            "Connection": "close" if self.close_connection else "keep-alive",
        }
        if answer.etag:
            headers |= {"ETag": answer.etag, "Cache-Control": "no-cache, private"}
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        if answer.status == HTTPStatus.PERMANENT_REDIRECT:
            headers["Location"] = f"{urlsplit(self.path).path}/"
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        self.connection.settimeout(ANSWER_SECONDS)  # for the whole answer
        self.connection.sendall(head if self.command == "HEAD" else head + body)
        logger.debug("%s %s", self.command, answer.status)  # the path has the token, and must not be logged

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error that `http.server` has found."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered"
        self.command = getattr(self, "command", None) or ""
        self._send(as_error(code, message or HTTPStatus(code).phrase))

    def log_message(self, *_: Any) -> None:
        """Log nothing, because the path of a request has the token."""
