"""A proxy that makes a server compare ETags as Ceph up to version 16 does: without their quotes.

A write on the condition of a quoted ETag is always refused there, and the ETag of an object that was uploaded in parts
is not told.
"""

from __future__ import annotations

import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_OF_A_CONNECTION = {"connection", "transfer-encoding", "content-length", "date", "server", "keep-alive"}


def server(endpoint: str) -> ThreadingHTTPServer:
    """Return a server before another one."""
    return _Server(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"behind": endpoint.removeprefix("http://")})
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    behind: str

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the name is http.server's
        """Nobody reads it."""

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        expected = headers.get("if-match")
        if self.command == "PUT" and expected is not None:
            if '"' in expected:
                self._answer(412, [], b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            headers["if-match"] = f'"{expected}"'
        connection = http.client.HTTPConnection(self.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        told = {name.lower(): value for name, value in headers}
        for name, value in told.items():
            if name not in _OF_A_CONNECTION:
                self.send_header(name, value)
        nbytes = told.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", nbytes)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
