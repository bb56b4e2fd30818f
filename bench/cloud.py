"""Saves to and loads from a bucket, beside the client alone, on a server that does nothing with the bytes.

python bench/cloud.py [--out bench/results] [--megabytes 1024]

The server is `discard_server.py` on loopback, so the network costs little and the client is what is measured: seconds,
and the client's own seconds of CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from run import make_environment

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
    parser.add_argument("--peers-python", help="an interpreter that has requirements-peers.txt installed")
    parser.add_argument("--peak", choices=["save", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--call", choices=["save", "load"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(arguments.peak, arguments.megabytes))
        return
    if arguments.peer:
        print(run_peer(arguments.peer, arguments.call))
        return
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true",
        AWS_EC2_METADATA_DISABLED="true", AWS_REQUEST_CHECKSUM_CALCULATION="when_required",
    )  # fmt: skip
    shared = Path("/dev/shm")
    peers = arguments.peers_python or make_environment("peers")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as place:
        lines = run(Path(place) / "key.safetensors", arguments.megabytes, peers)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "cloud.md").write_text(text)


def run(file: Path, megabytes: int, peers: str) -> list[str]:
    from eformer.checkpoint import save

    memory = np.random.default_rng(0).integers(0, 255, megabytes * MIB, np.uint8)
    leaves = np.split(memory, 16)
    tree = {f"leaf {number}": leaf.view(np.float32).reshape(-1, 1024) for number, leaf in enumerate(leaves)}
    save(tree, file)
    with server(file) as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        return [
            "# Buckets",
            "",
            f"{megabytes} MiB of float32 in 16 leaves, loopback, {len(os.sched_getaffinity(0))} cores for client "
            f"and server, the fastest of {ROUNDS} rounds taken in turns. Every byte is digested by `save` and checked "
            "by `load`. The server forgets what is sent to it, and sends one file.",
            "",
            *large(endpoint, file, tree, memory),
            *memory_of(megabytes),
            *small(endpoint),
            *beside_peers(peers),
        ]


def large(endpoint: str, file: Path, tree: Any, memory: Any) -> list[str]:
    """Measure saves and loads beside the client."""
    import obstore

    from eformer.checkpoint import load, save

    numbers, store, nbytes = itertools.count(), client(endpoint), file.stat().st_size
    up = {
        "obstore, one buffer": lambda: obstore.put(store, "sent", memory, chunk_size=PART, max_concurrency=8),
        "obstore, with digests": lambda: obstore.put(
            store, "sent", digested(memory), chunk_size=PART, max_concurrency=8
        ),
        "`save`, a directory": lambda: save(tree, f"s3://bucket/{next(numbers)}/new"),
        "`save`, one file": lambda: save(tree, f"s3://bucket/{next(numbers)}.safetensors", overwrite=True),
    }
    down = {
        "obstore, ranges": lambda: by_client(store, nbytes),
        "sockets": lambda: by_sockets(endpoint, nbytes),
        "`load`": lambda: load("s3://bucket/key.safetensors"),
        "`load(verify=False)`": lambda: load("s3://bucket/key.safetensors", verify=False),
    }
    return [
        *table("Up", measure(up), nbytes, "obstore, one buffer"),
        *table("Down", measure(down), nbytes, "obstore, ranges"),
    ]


def digested(memory: Any) -> Iterator[Any]:
    """Yield pieces of memory after their digests are computed: the least that a checked save can do."""
    import xxhash

    view = memoryview(memory)
    for start in range(0, len(view), 4 * MIB):
        for at in range(start, min(start + 4 * MIB, len(view)), MIB):
            xxhash.xxh3_128_digest(view[at : at + MIB])
        yield view[start : start + 4 * MIB]


# --------------------------------------------------------------------------------------------- memory


def memory_of(megabytes: int) -> list[str]:
    """Measure, each in a fresh process, the memory that a save and a load take beyond the arrays."""
    found = {}
    for what in ("save", "load"):
        done = subprocess.run(
            [sys.executable, __file__, "--peak", what, "--megabytes", str(megabytes)],
            check=True,
            capture_output=True,
            text=True,
        )
        found[what] = int(done.stdout)
    return [
        "## Memory",
        "",
        "Resident memory beyond the arrays themselves, at most, sampled every millisecond in a fresh process.",
        "",
        "| | MiB |",
        "|---|---|",
        *(f"| `{what}` | {peak / MIB:.0f} |" for what, peak in found.items()),
        "",
    ]


def peak(what: str, megabytes: int) -> int:
    from eformer.checkpoint import load, save

    nbytes = megabytes * MIB
    if what == "load":
        return _peak_of(lambda: load("s3://bucket/key.safetensors")) - nbytes
    tree = {f"leaf {number}": np.ones(nbytes // 64, np.float32) for number in range(16)}
    return _peak_of(lambda: save(tree, "s3://bucket/peak/new"))


def _peak_of(call: Callable[[], Any]) -> int:
    """Return how much more memory is resident during a call than before it, at most."""
    resident, done = [_resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            resident.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = call()
    done.set()
    watcher.join()
    del kept
    return max(resident) - resident[0]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---------------------------------------------------------------------------------------- small leaves


def small(endpoint: str) -> list[str]:
    """Count the requests for many small leaves."""
    from eformer.checkpoint import load, save

    lines = [
        "## Small leaves",
        "",
        "Leaves of 4 KiB, safetensors, in a bucket that keeps them.",
        "",
        "| leaves | requests of a save | us a leaf | requests of a load | us a leaf |",
        "|---|---|---|---|---|",
    ]
    for count in (100, 1_000, 10_000):
        tree = {f"leaf {number}": np.full(1024, number, np.float32) for number in range(count)}
        where = f"s3://kept/small-{count}"
        row = [str(count)]
        for call in (lambda tree=tree, where=where: save(tree, where), lambda where=where: load(where)):
            _requests(endpoint)
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            row += [str(_requests(endpoint)), f"{took / count * 1e6:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _requests(endpoint: str) -> int:
    """Return how many requests there were since this was asked last."""
    with urllib.request.urlopen(f"{endpoint}/requests") as answer:
        return int(answer.read())


# ----------------------------------------------------------------------------------------------- peers


def beside_peers(python: str) -> list[str]:
    """Measure other ways to get 256 MiB into a bucket that keeps them, and back."""
    lines = [
        "## Beside others",
        "",
        "256 MiB in 16 leaves, to a bucket that keeps them in memory and back: the first call of a process, the "
        "fastest of 3 processes.",
        "",
        "| | save s | CPU s | load s | CPU s |",
        "|---|---|---|---|---|",
    ]
    for name in PEERS:
        interpreter = python if name in NOT_OURS else sys.executable
        found = [_first_call(interpreter, name, what) for what in ("save", "load")]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return [
        *lines,
        "",
        "Orbax is not in the table: it needs Google's own libraries for the paths, which cannot be pointed at this "
        "server.",
        "",
    ]


def _first_call(python: str, name: str, what: str) -> str:
    found = []
    for _ in range(3):
        done = subprocess.run(
            [python, __file__, "--peer", name, "--call", what], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            why = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return f"could not run: {why[-1]} | "
        found.append([float(text) for text in done.stdout.split()])
    return " | ".join(f"{min(column):.2f}" for column in zip(*found, strict=True))


def run_peer(name: str, what: str) -> str:
    tree = {
        f"leaf-{number}": np.random.default_rng(number).random((4096, 1024), np.float32)
        for number in range(16)
    }
    save, load = PEERS[name](tree)
    began, before = time.perf_counter(), cpu()
    save() if what == "save" else load()
    return f"{time.perf_counter() - began} {cpu() - before}"


def _eformer(kind: str) -> Callable[[Any], tuple[Callable[[], Any], Callable[[], Any]]]:
    def calls(tree: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        from eformer.checkpoint import load, save

        where = f"s3://kept/eformer-{kind}"
        return lambda: save(tree, where, format=kind), lambda: load(where)  # type: ignore[call-overload]

    return calls


def _tensorstore(tree: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import tensorstore as ts

    def spec(name: str) -> dict[str, Any]:
        return {
            "driver": "zarr",
            "kvstore": {
                "driver": "s3",
                "bucket": "kept",
                "path": f"tensorstore/{name}/",
                "endpoint": os.environ["AWS_ENDPOINT_URL"],
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},
            },
        }

    def save() -> None:
        made = {
            name: ts.open(
                {**spec(name), "metadata": {"compressor": None}},
                create=True,
                delete_existing=True,
                dtype=array.dtype,
                shape=array.shape,
            )
            for name, array in tree.items()
        }
        for future in [made[name].result().write(array) for name, array in tree.items()]:
            future.result()

    def load() -> dict[str, Any]:
        opened = {name: ts.open(spec(name)) for name in tree}
        read = {name: future.result().read() for name, future in opened.items()}
        return {name: future.result() for name, future in read.items()}

    return save, load


def _s3fs(tree: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import s3fs
    import safetensors.numpy

    system = s3fs.S3FileSystem(key="a", secret="b", endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def save() -> None:
        with system.open("kept/s3fs.safetensors", "wb") as file:
            file.write(safetensors.numpy.save(tree))

    return save, lambda: safetensors.numpy.load(system.cat_file("kept/s3fs.safetensors"))


PEERS: dict[str, Callable[[Any], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "eformer, safetensors": _eformer("safetensors"),
    "eformer, zarr": _eformer("tensorstore"),
    "TensorStore, zarr": _tensorstore,
    "safetensors and s3fs": _s3fs,
}
NOT_OURS = {"safetensors and s3fs"}


if __name__ == "__main__":
    main()
