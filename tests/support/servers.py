"""Start real object stores on loopback, each on a free port with an empty bucket, and end them by their process ids.

Programs are looked for beside the interpreter, in the directories of EFORMER_CLOUD_BIN, and on the PATH.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.server import ThreadingHTTPServer

REGION = "us-east-1"
_PATIENCE = 90.0  # seconds; Ceph takes a quarter of a minute on an idle machine


class CannotStartError(Exception):
    """A server is not installed, or died at once."""


class Server(NamedTuple):
    """A server that answers: where tests put their checkpoints, and the environment by which clients find it."""

    name: str
    url: str  # of a bucket that is empty
    environment: dict[str, str]
    endpoint: str


# --------------------------------------------------------------------------------------------- the list


@contextmanager
def running(name: str) -> Iterator[Server]:
    """Start a server, and end it. Raise CannotStartError with the reason if there is none."""
    with (
        tempfile.TemporaryDirectory(prefix=f"eformer-{name}-") as folder,
        _STARTED[name](Path(folder)) as server,
    ):
        yield server


@contextmanager
def _ministack(folder: Path) -> Iterator[Server]:
    port = _free_port()
    environment = {
        "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "LOG_LEVEL": "ERROR",
        "S3_DATA_DIR": str(folder / "data"),
    }  # fmt: skip
    with _process([_program("ministack")], port, folder, environment):
        yield _s3("ministack", port)


@contextmanager
def _moto(folder: Path) -> Iterator[Server]:
    port = _free_port()
    with _process([_program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], port, folder):
        yield _s3("moto", port)


@contextmanager
def _seaweedfs(folder: Path) -> Iterator[Server]:
    key, secret = _keys()
    ports = {name: _free_port() for name in ("s3", "master", "volume", "filer", "admin")}
    grpc = {f"{name}.port.grpc": _free_port() for name in ports}
    options = {
        "dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false", "webdav": "false",
        "s3.port.iceberg": 0, "s3.port.lance": 0, "filer.localSocket": folder / "filer", "s3.localSocket": folder / "s3",
        **{f"{name}.port": port for name, port in ports.items()}, **grpc,
    }  # fmt: skip
    command = [_program("weed"), "mini", *(f"-{name}={value}" for name, value in options.items())]
    environment = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    with _process(command, ports["s3"], folder, environment):
        yield _s3("seaweedfs", ports["s3"], key, secret)


@contextmanager
def _s3rver(folder: Path) -> Iterator[Server]:
    port = _free_port()
    command = [_program("s3rver"), "-a", "127.0.0.1", "-p", str(port), "-d", str(folder), "-s"]
    with _process(command, port, folder):
        yield _s3("s3rver", port, "S3RVER", "S3RVER")


@contextmanager
def _ceph(folder: Path) -> Iterator[Server]:
    port, (key, secret) = _free_port(), _keys()
    for needed in ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "monmaptool", "ceph"):
        _program(needed)
    script = Path(__file__).with_name("ceph.sh")
    environment = {
        "CEPH_PORT": str(port), "CEPH_MON_PORT": str(_free_port()), "CEPH_KEY": key, "CEPH_SECRET": secret,
        "CEPH_DIR": str(folder),
    }  # fmt: skip
    with _process(["bash", str(script)], port, folder, environment, ready=folder / "ready"):
        yield _s3("ceph", port, key, secret)


@contextmanager
def _azurite(folder: Path) -> Iterator[Server]:
    port, account = _free_port(), "eformertests"
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    command = [
        _program("azurite-blob"), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        "--blobHost", "127.0.0.1", "--blobPort", str(port),
    ]  # fmt: skip
    with _process(command, port, folder, {"AZURITE_ACCOUNTS": f"{account}:{key}"}):
        endpoint = f"http://127.0.0.1:{port}/{account}"
        _make_container(endpoint, account, key, "eformer-azurite")
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": key,
            "AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_ALLOW_HTTP": "true", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        yield Server("azurite", "az://eformer-azurite", environment, endpoint)


@contextmanager
def _google(folder: Path) -> Iterator[Server]:
    from support import google

    token = secrets.token_hex(10)
    with serving(google.server("eformer-google", token)) as endpoint:
        environment = {
            "GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": token, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        yield Server("google", "gs://eformer-google", environment, endpoint)


@contextmanager
def _unquoted(folder: Path) -> Iterator[Server]:
    from support import unquoted

    with _ministack(folder) as behind, serving(unquoted.server(behind.endpoint)) as endpoint:
        yield _s3("unquoted", int(endpoint.rpartition(":")[2]))


_STARTED: Mapping[str, Callable[[Path], Any]] = {
    "ministack": _ministack,
    "moto": _moto,
    "seaweedfs": _seaweedfs,
    "s3rver": _s3rver,
    "ceph": _ceph,
    "azurite": _azurite,
    "google": _google,
    "unquoted": _unquoted,
}


# --------------------------------------------------------------------------------------------- processes


def _program(name: str) -> str:
    beside = [os.path.dirname(sys.executable), *os.environ.get("EFORMER_CLOUD_BIN", "").split(os.pathsep)]
    found = shutil.which(name, path=os.pathsep.join([*filter(None, beside), os.environ["PATH"]]))
    if found is None:
        raise CannotStartError(f"the program {name} is not installed")
    return found


@contextmanager
def _process(
    command: list[str],
    port: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ready: Path | None = None,
) -> Iterator[None]:
    """Run a server until the block ends. It is ready when its port answers HTTP, or when it has made a file."""
    if setpriv := shutil.which("setpriv"):  # ends the server with this process, however that ends
        command = [setpriv, "--pdeathsig", "TERM", *command]
    log = folder / "server.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait(process, log, ready.exists if ready else lambda: _answers(port))
        yield
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], log: Path, is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not is_ready():
        if process.poll() is not None or time.monotonic() > until:
            why = "has not answered" if process.poll() is None else f"ended with {process.returncode}"
            raise CannotStartError(f"the server {why}: {log.read_text(errors='replace')[-500:].strip()}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of processes that was started under this id."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)  # nothing that it holds is worth more


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Answer requests in a thread of this process; yield the address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with _opener().open(f"http://127.0.0.1:{port}/", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


# ---------------------------------------------------------------------------------------------- buckets


def _keys() -> tuple[str, str]:
    return secrets.token_hex(10).upper(), secrets.token_hex(20)


def _s3(name: str, port: int, key: str = "", secret: str = "") -> Server:
    """Make a bucket. Without keys, the server takes any."""
    bucket, endpoint = f"eformer-{name}", f"http://127.0.0.1:{port}"
    _send(_signed(bucket, endpoint, key, secret) if key else f"{endpoint}/{bucket}", {})
    environment = {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": key or "any", "AWS_SECRET_ACCESS_KEY": secret or "any",
    }  # fmt: skip
    return Server(name, f"s3://{bucket}", environment, endpoint)


def _signed(bucket: str, endpoint: str, key: str, secret: str) -> str:
    """Return a URL that makes a bucket: obstore signs requests that it cannot send itself."""
    import obstore
    from obstore.store import S3Store

    client = S3Store(
        bucket, endpoint=endpoint, region=REGION, access_key_id=key, secret_access_key=secret,
        client_options={"allow_http": True},
    )  # fmt: skip
    return obstore.sign(client, "PUT", "", dt.timedelta(minutes=1))


def _make_container(endpoint: str, account: str, key: str, name: str) -> None:
    """Make a container of Azure's, by a request that is signed as its documentation says."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    said = "\n".join(f"{header}:{value}" for header, value in headers.items())
    lines = ["PUT", *[""] * 11, said, f"/{account}/{account}/{name}", "restype:container"]
    digest = hmac.digest(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256)
    signature = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    _send(f"{endpoint}/{name}?restype=container", {**headers, "Authorization": signature})


def _send(url: str, headers: Mapping[str, str]) -> None:
    request = urllib.request.Request(url, method="PUT", headers={"Content-Length": "0", **headers})
    try:
        with _opener().open(request, timeout=30):
            pass
    except urllib.error.HTTPError as error:
        raise CannotStartError(
            f"the server makes no bucket: {error.read().decode(errors='replace')}"
        ) from None
