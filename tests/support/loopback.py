"""Keep the tests on this machine: every other address is refused, and noted.

Sockets of Python are checked when they connect. Clients that are not written in Python are led to a proxy on loopback,
which answers nothing and notes what was asked for. Cloud clients ask the metadata service of a virtual machine if they
have no credentials, which is switched off as far as they can be told.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from typing import Any

_OFF = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "GCE_METADATA_ROOT": "127.0.0.1:1",
    "GCE_METADATA_HOST": "127.0.0.1:1",
    "GCE_METADATA_IP": "127.0.0.1:1",
    "NO_GCE_CHECK": "true",
    "AZURE_USE_AZURE_CLI": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost,::1",
    "no_proxy": "127.0.0.1,localhost,::1",
}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")

_asked: set[str] = set()


def keep() -> None:
    """Refuse and note all other addresses from now on, in this process and those that it starts."""
    os.environ.update(_OFF)
    if "EFORMER_TESTS_PROXY" not in os.environ:
        os.environ["EFORMER_TESTS_PROXY"] = _start_proxy()
    for name in _PROXIES:
        os.environ[name] = os.environ["EFORMER_TESTS_PROXY"]
    socket.socket.connect = _checked(socket.socket.connect)  # type: ignore[method-assign]
    socket.socket.connect_ex = _checked(socket.socket.connect_ex)  # type: ignore[method-assign]


def asked_for() -> set[str]:
    """Return what was asked for beyond loopback."""
    return set(_asked)


def _checked(connect: Any) -> Any:
    def checked(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            _asked.add(str(address[0]))
            raise PermissionError(f"tests stay on loopback, and {address[0]} is not")
        return connect(self, address)

    return checked


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _start_proxy() -> str:
    """Start a proxy that refuses everything, and return its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                _asked.add(connection.recv(4096).split(b"\r\n")[0].decode(errors="replace"))
                connection.sendall(
                    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}"
