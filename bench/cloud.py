"""Saves to and loads from a bucket, beside the client alone, on a server that does nothing with the bytes.

python bench/cloud.py [--out bench/results] [--megabytes 1024]

The server is `discard_server.py` on loopback, so the network costs little and the client is what is measured: seconds,
and the client's own seconds of CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20
PART = 16 * MIB
ROUNDS = 5
SERVER = Path(__file__).with_name("discard_server.py")


@contextmanager
def server(file: Path) -> Iterator[str]:
    """Start the server; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port), file])
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def client(endpoint: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        "bucket",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
    )


def by_sockets(endpoint: str, nbytes: int, threads: int = 8) -> None:
    """Read by plain sockets into fresh memory: what the machine can do."""
    memory = memoryview(bytearray(nbytes))
    host, port = endpoint.removeprefix("http://").split(":")

    def work(number: int) -> None:
        with socket.create_connection((host, int(port))) as connection:
            for start in range(number * PART, nbytes, threads * PART):
                stop = min(start + PART, nbytes)
                connection.sendall(
                    f"GET /bucket/key HTTP/1.1\r\nRange: bytes={start}-{stop - 1}\r\n\r\n".encode()
                )
                _, _, body = _head(connection)
                memory[start : start + len(body)] = body
                at = start + len(body)
                while at < stop:
                    at += connection.recv_into(memory[at:stop])

    _in_threads(work, threads)


def _head(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(4096)
    return data.partition(b"\r\n\r\n")


def by_client(store: Any, nbytes: int, threads: int = 8) -> None:
    """Read by the client's own ranged requests into fresh memory, without checking anything."""
    import obstore

    memory = np.empty(nbytes, np.uint8)

    def work(number: int) -> None:
        for start in range(number * PART, nbytes, threads * PART):
            data = obstore.get_range(store, "key", start=start, length=min(PART, nbytes - start))
            memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

    _in_threads(work, threads)


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """Return the fastest seconds of each call, and its least seconds of CPU, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    used: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began, before = time.perf_counter(), cpu()
            call()
            seconds[name].append(time.perf_counter() - began)
            used[name].append(cpu() - before)
    return {name: (min(seconds[name]), min(used[name])) for name in calls}


def table(title: str, found: dict[str, tuple[float, float]], nbytes: int, beside: str) -> list[str]:
    gib = nbytes / 2**30
    first_seconds, first_cpu = found[beside]
    lines = [
        f"## {title}",
        "",
        "| | GiB/s | of the client's | CPU s/GiB | of the client's |",
        "|---|---|---|---|---|",
    ]
    for name, (seconds, used) in found.items():
        rates = (gib / seconds, first_seconds / seconds, used / gib, used / first_cpu)
        lines.append(f"| {name} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a directory for cloud.md")
    parser.add_argument("--megabytes", type=int, default=1024)
    arguments = parser.parse_args()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true",
        AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as place:
        file = Path(place) / "key.safetensors"
        lines = run(file, arguments.megabytes)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "cloud.md").write_text(text)


def run(file: Path, megabytes: int) -> list[str]:
    import obstore

    from eformer.checkpoint import load, save

    memory = np.random.default_rng(0).integers(0, 255, megabytes * MIB, np.uint8)
    leaves = np.split(memory, 16)
    tree = {f"leaf {number}": leaf.view(np.float32).reshape(-1, 1024) for number, leaf in enumerate(leaves)}
    save(tree, file)
    nbytes = file.stat().st_size
    numbers = iter(range(10_000))
    with server(file) as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        store = client(endpoint)
        up = measure(
            {
                "obstore, one buffer": lambda: obstore.put(
                    store, "key", memory, chunk_size=PART, max_concurrency=8
                ),
                "`save`, a directory": lambda: save(tree, f"s3://bucket/new-{next(numbers)}"),
                "`save`, one file": lambda: save(
                    tree, f"s3://bucket/{next(numbers)}.safetensors", overwrite=True
                ),
            }
        )
        down = measure(
            {
                "obstore, ranges": lambda: by_client(store, nbytes),
                "sockets": lambda: by_sockets(endpoint, nbytes),
                "`load`": lambda: load("s3://bucket/key.safetensors"),
                "`load(verify=False)`": lambda: load("s3://bucket/key.safetensors", verify=False),
            }
        )
    return [
        "# Buckets",
        "",
        f"{megabytes} MiB of float32 in 16 leaves, loopback, the fastest of {ROUNDS} rounds taken in turns. Every byte "
        "is digested by `save` and checked by `load`.",
        "",
        *table("Up", up, nbytes, "obstore, one buffer"),
        *table("Down", down, nbytes, "obstore, ranges"),
    ]


if __name__ == "__main__":
    main()
