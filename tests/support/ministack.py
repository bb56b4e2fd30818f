"""Start an S3 server on loopback, and a proxy before it that loses answers.

The program is looked for beside the interpreter, in the directories of EFORMER_CLOUD_BIN, and on the PATH.
"""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from eformer._engine.stores import clouds
from eformer._engine.stores.bucket import BucketStore
from eformer._engine.stores.objects import Objects

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "bkt"
MODES = ("dropped", "500", "hang", "never sent", "mixed")


def program() -> str | None:
    places = [
        str(Path(sys.executable).parent),
        os.environ.get("EFORMER_CLOUD_BIN", ""),
        os.environ.get("PATH", ""),
    ]
    return shutil.which("ministack", path=os.pathsep.join(filter(None, places)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: str) -> Iterator[int]:
    """Run the server with an empty bucket. Yield its port."""
    port = free_port()
    environment = {
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "SERVICES": "s3",
        "LOG_LEVEL": "ERROR",
    }
    server = subprocess.Popen(
        [command], env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _make_bucket(port)
        yield port
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def _make_bucket(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError), closing(connection):
            connection.request("PUT", f"/{BUCKET}")
            if connection.getresponse().status == 200:
                return
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.05)


def client(port: int, *, timeout: float = 20.0, retries: int = 3, limit: float = 60.0) -> Objects:
    from obstore.store import S3Store

    store: Any = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timedelta(seconds=timeout)},
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=timeout * 4),
            "backoff": {
                "init_backoff": timedelta(milliseconds=20),
                "max_backoff": timedelta(milliseconds=200),
                "base": 2,
            },
        },
    )
    return Objects(store, f"s3://{BUCKET}", limit)


@contextmanager
def s3(objects: Objects) -> Iterator[None]:
    """Let all s3:// URLs name the bucket of a server; or that of `own.objects`, in a thread that has set it."""
    at = clouds.bucket_at

    def bucket_at(url: str, *args: Any, **more: Any) -> BucketStore:
        if not url.startswith("s3://"):
            return at(url, *args, **more)
        return BucketStore(getattr(own, "objects", objects), url.removeprefix("s3://").partition("/")[2])

    with mock.patch.object(clouds, "bucket_at", bucket_at):
        yield


own = threading.local()


# ---------------------------------------------------------------------------------------------- proxy


@contextmanager
def lossy(
    upstream: int, mode: str, share: float, *, ends: tuple[str, ...] = ("manifest.json",)
) -> Iterator[int]:
    """Run a proxy that loses the answers to some puts of an index. Yield its port."""
    rng = random.Random(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_index = self.command == "PUT" and self.path.partition("?")[0].endswith(ends)
            how = mode if is_index and rng.random() < share else ""
            how = rng.choice(MODES[:-1]) if how == "mixed" else how
            if how == "never sent":
                self.close()
                return
            status, headers, data = self.ask(body)
            if how == "hang":
                time.sleep(1.5)
            if how in ("hang", "dropped"):
                self.close()
                return
            self.send_response(500 if how == "500" else status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            nbytes = lengths[0] if self.command == "HEAD" and lengths else str(len(data))
            self.send_header("Content-Length", "0" if how == "500" else nbytes)
            self.end_headers()
            if self.command != "HEAD" and how != "500":
                self.wfile.write(data)

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), data

        def close(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_: Any) -> None:
            """A client that has given up is what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hanging() -> Iterator[int]:
    """Run a server that takes everything and never answers. Yield its port."""
    server = socket.create_server(("127.0.0.1", 0), backlog=256)
    connections: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                threading.Thread(target=_swallow, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        for one in (server, *connections):
            one.close()


def _swallow(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(2**20):
            pass
