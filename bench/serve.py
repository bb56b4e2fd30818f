"""`eformer serve` for a run of thousands of steps, and for a step of a hundred thousand leaves: how long pages wait.

    python bench/serve.py [--steps 5000] [--leaves 100000] [--rounds 7] > bench/results/serve.md

The server is a process of its own, asked over one connection. "First" is the first time after its start, everything
else the fastest of the rounds. CPU is that of the server, which a busy machine hardly changes. With Chromium and
chromedriver, a page is opened, too, and timed until it is drawn and can be used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from eformer import checkpoint
from eformer._engine.record.manifest import Manifest
from eformer._engine.saving.snapshot import metadata_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EFORMER = str(Path(sys.executable).with_name("eformer"))


# ---------------------------------------------------------------------------------------------- data


def make_run(path: Path, steps: int) -> None:
    """Write a run of small steps: one is saved, the others have its files and a manifest of their own."""
    with checkpoint.Run(path, every=10) as run:
        run.after(10, {"w": np.zeros(1000, np.float32), "b": np.ones(10, np.float32)}, metrics={"loss": 1.0})
    first = path / "step-10"
    manifest = Manifest.from_json((first / "manifest.json").read_bytes(), "manifest.json")
    for number in range(20, 10 * steps + 1, 10):
        make_step(first, path / f"step-{number}", manifest, number)


def make_step(first: Path, path: Path, manifest: Manifest, number: int) -> None:
    (tree,) = manifest.trees.values()
    facts = {"why": "every", "metrics": {"loss": 10 / number, "accuracy": 1 - 1 / number}}
    changed = msgspec.structs.replace(tree, raw_metadata=metadata_to_json({"eformer.run": facts}))
    path.mkdir()
    for file in first.iterdir():
        if file.name != "manifest.json":
            os.link(file, path / file.name)
    (path / "manifest.json").write_bytes(msgspec.structs.replace(manifest, trees={"": changed}).to_json())


def make_leaves(path: Path, leaves: int) -> None:
    """Save a tree of so many leaves: half of them in layers that are alike, half in one flat group."""
    modules = ("q", "k", "v", "o", "up", "down", "gate", "norm", "rope", "scale")
    layers = [
        {
            name: {"kernel": np.full((4, 4), n, np.float32), "bias": np.zeros(4, np.float32)}
            for name in modules
        }
        for n in range(leaves // 40)
    ]
    flat = {f"leaf_{n}": np.zeros(3, np.float32) for n in range(leaves // 2)}
    checkpoint.save({"params": {"layers": layers}, "state": flat}, path)


# -------------------------------------------------------------------------------------------- server


class Client:
    """A connection to the server, and the time that its process has computed."""

    def __init__(self, url: str, pid: int) -> None:
        found = urlsplit(url)
        assert found.hostname
        self.url, self.pid, self.base = url, pid, found.path
        self.connection = http.client.HTTPConnection(found.hostname, found.port, timeout=600)

    def get(self, path: str, etag: str = "") -> tuple[int, bytes, str]:
        self.connection.request("GET", self.base + path, headers={"If-None-Match": etag} if etag else {})
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("ETag", "")

    def cpu(self) -> float:
        return time.clock_gettime(
            ~self.pid << 3 | 2
        )  # the clock of another process, as clock_getcpuclockid has it

    def peak(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextmanager
def served(path: Path) -> Iterator[Client]:
    process = subprocess.Popen(
        [EFORMER, "serve", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout
        yield Client(process.stdout.readline().decode().strip(), process.pid)
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------------------------------- measure


class Table:
    """Rows of what was asked for, how long it took, and how much was sent."""

    def __init__(self, client: Client, rounds: int) -> None:
        self.client, self.rounds = client, rounds
        print("| asked for | ms | server's CPU, ms | sent |\n|---|---|---|---|")

    def row(
        self, name: str, path: str | Callable[[int], str], *, first: bool = False, etag: str = ""
    ) -> bytes:
        taken, body = [], b""
        for n in range(1 if first else self.rounds):
            cpu, start = self.client.cpu(), time.perf_counter()
            status, body, _ = self.client.get(path if isinstance(path, str) else path(n), etag)
            assert status == (304 if etag else 200), body
            taken.append((time.perf_counter() - start, self.client.cpu() - cpu))
        self.write(name, min(one[0] for one in taken), min(one[1] for one in taken), len(body))
        return body

    def write(self, name: str, seconds: float, cpu: float, nbytes: int | None) -> None:
        sent = "" if nbytes is None else f"{nbytes:,} B"
        print(f"| {name} | {1000 * seconds:,.1f} | {1000 * cpu:,.1f} | {sent} |", flush=True)


def measure_run(path: Path, rounds: int) -> None:
    with served(path) as client:
        table = Table(client, rounds)
        cpu, start = client.cpu(), time.perf_counter()
        facts = json.loads(table.row("the steps: first, as far as they are known", "run.json", first=True))
        while not facts["is_complete"]:
            time.sleep(0.1)
            facts = json.loads(client.get("run.json")[1])
        seconds, cpu = time.perf_counter() - start, client.cpu() - cpu
        table.write("the steps: all with metrics and sizes, since the first", seconds, cpu, None)
        table.row("the steps: again", "run.json")
        etag = client.get("run.json")[2]
        table.row("the steps: again, nothing is new", "run.json", etag=etag)
        numbers = [step["number"] for step in facts["steps"]]
        table.row("the page of a step, each another", lambda n: f"step/{numbers[-1 - n]}/")
        table.row("the summary of a step, each another", lambda n: f"step/{numbers[-10 - n]}/summary.json")
        draw(client, "the page of the run, until it is drawn", table)
        print(f"\nPeak memory of the server: {client.peak() / 1e6:,.0f} MB. {len(numbers):,} steps.\n")


def measure_leaves(path: Path, rounds: int) -> None:
    with served(path) as client:
        table = Table(client, rounds)
        summary = json.loads(table.row("the summary: first", "summary.json", first=True))
        table.row("the summary: again", "summary.json")
        columns = json.loads(table.row("the columns: first", "columns.json", first=True))
        table.row("the columns: again", "columns.json")
        paths = [f"params.layers.{n}.q.kernel" for n in range(rounds)]
        table.row("a leaf with its values, each another", lambda n: f"leaf.json?path={quote(paths[n])}")
        assert len(columns["kind"]) == summary["leaves"]
        draw(client, "the page, until it is drawn", table)
        print(f"\nPeak memory of the server: {client.peak() / 1e6:,.0f} MB. {summary['leaves']:,} leaves.\n")


def draw(client: Client, name: str, table: Table) -> None:
    """Time a page from its opening until it is drawn, in a browser, if there is one."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    driver: Any = None
    try:
        from support import browser

        driver = browser.start(Path(tempfile.mkdtemp()))
    except BaseException as error:  # noqa: BLE001  what pytest skips with
        print(f"| {name} | not measured: {error} | | |")
        return
    try:
        taken = []
        for _ in range(3):
            cpu, start = client.cpu(), time.perf_counter()
            driver.get(client.url)
            while driver.execute_script("return document.documentElement.dataset.ready") != "true":
                assert time.perf_counter() - start < 120, "the page is not drawn"
                time.sleep(0.005)
            taken.append((time.perf_counter() - start, client.cpu() - cpu))
        table.write(name, *min(taken), None)
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"# Pages of `eformer serve`\n\n`python bench/serve.py`, {cores} cores, load average {load:.0f}.\n")
    with tempfile.TemporaryDirectory() as folder:
        print(f"## A run of {given.steps:,} steps\n")
        make_run(Path(folder) / "run", given.steps)
        measure_run(Path(folder) / "run", given.rounds)
        print(f"## A checkpoint of {given.leaves:,} leaves\n")
        make_leaves(Path(folder) / "leaves", given.leaves)
        measure_leaves(Path(folder) / "leaves", given.rounds)


if __name__ == "__main__":
    main()
