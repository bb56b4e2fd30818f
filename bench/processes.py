"""Several processes: what a save costs the caller, how many bytes are written, and what planning and committing take.

    python bench/processes.py [--quick] [--dir DIRECTORY] [--json FILE] > bench/results/processes.md

First four real processes of two devices each, on JAX's distributed runtime over loopback. Then one process of many
that are simulated: it plans, writes its part and seals as the first of so many would; two of the others really write
their parts, the rest are copies of the last. Takes three minutes; needs Linux and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PROCESSES, DEVICES = 4, 2
LEAVES = 100_000
FEW = 2000  # so few that all processes can be played
SIMULATED = 64

BARS = [
    ("save_async, in which nobody waits for another process", "ms", 10.0),
    ("bytes written", "x the state", 1.01),
    ("planning and committing, 64 processes", "s", 3.0),
]

# ------------------------------------------------------------------------------------- real processes


def start_jax(rank: int, port: int) -> Any:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, rank)
    return jax


def play_rank(rank: int, port: int, directory: Path, nbytes: int, rounds: int) -> None:
    """One of the processes: prints what it measured as JSON."""
    jax = start_jax(rank, port)
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from eformer._engine.processes import hosts as _hosts
    from eformer.checkpoint import load, save_async

    mesh = Mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), ("data", "model"))
    specs = [P("data"), P("data", "model"), P(None, "model"), P()]
    leaves = 64
    rows = nbytes // leaves // 4 // 1024
    host = np.random.default_rng(0).standard_normal((rows, 1024), np.float32)

    def put(spec: Any) -> Any:
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    state = {f"layer_{i}": {"w": put(specs[i % len(specs)])} for i in range(leaves)}
    found: dict[str, Any] = {
        "state": leaves * host.nbytes,
        "rendezvous": [],
        "save_async": [],
        "save": [],
        "load": [],
        "load, broadcast": [],
    }
    for layout in ("safetensors", "tensorstore"):
        for number in range(rounds):
            found["rendezvous"].append(
                timed(lambda: _hosts.current("meets").meet(b"x" * 200, lambda messages: b"y" * 100))[0]
            )
            before = bytes_written()
            took, pending = timed(lambda layout=layout: save_async(state, directory / layout, format=layout))
            found["save_async"].append(took)
            found["save"].append(took + timed(pending.result)[0])
            if number == 0:
                found[f"written, {layout}"] = bytes_written() - before
        for broadcast in (False, True):
            load(
                directory / layout, mesh=mesh, options={"broadcast": broadcast}
            )  # compiled, and in the page cache
            took, loaded = timed(
                lambda b=broadcast, d=layout: load(directory / d, mesh=mesh, options={"broadcast": b})
            )
            found["load, broadcast" if broadcast else "load"].append(took)
            for leaf in loaded.values():
                for shard in leaf["w"].addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])
    print(json.dumps(found), flush=True)


def timed(call: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def bytes_written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def real(directory: Path, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--directory", str(directory), "--port", str(port)]
    command += ["--nbytes", str(nbytes), "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        for rank in range(PROCESSES)
    ]
    try:
        return [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


# -------------------------------------------------------------------------------- simulated processes


class Simulated:
    """One of `count` hosts, each of which has one of this process's devices."""

    def __init__(self, number: int, count: int, order: dict[Any, int], meet: Any) -> None:
        self.number, self.count, self.order, self.meet = number, count, order, meet

    def process_of(self, device: Any) -> int:
        return self.order[device]

    def name(self, number: int) -> str:
        return f"process {number}"

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        raise error

    def end(self) -> None:
        pass


def simulate(count: int, leaves: int, cut: str, directory: Path) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    import msgspec
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from eformer._engine.record.manifest import coverage_of
    from eformer._engine.saving.save import Save
    from eformer._engine.saving.several import joined_receipts
    from eformer._engine.saving.start import start as start_save
    from eformer._engine.tasks.progress import SILENT
    from eformer.checkpoint import load

    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, P("x") if cut == "sharded" else P())
    pool = [jax.device_put(np.full((count, 8), i, np.float32), sharding) for i in range(50)]
    tree: dict[str, Any] = {}
    for number in range(leaves):
        tree.setdefault(f"layer_{number // 20}", {})[f"w{number % 20}"] = pool[number % 50]
    order = {device: index for index, device in enumerate(jax.devices())}
    has_all = leaves <= FEW
    said: dict[str, bytes] = {}

    def first(message: bytes, answer: Any) -> bytes:
        said["sent"] = message
        said["answered"] = answer([message] * count)
        return said["answered"]

    with ExitStack() as stack:
        receipts, planned, saves = [], [], []
        for index in range(count if has_all else min(count, 3)):  # the first, and two others
            hosts: Any = Simulated(index, count, order, first if index == 0 else lambda *_: said["answered"])
            start = time.perf_counter()
            save = start_save(tree, directory, hosts=hosts, detach=True)
            stack.callback(save.turn.end)
            save.format = save.new_format()
            save.prepare(stack)
            agreed = time.perf_counter() - start
            wrote, receipt = timed(lambda save=save: save.write(SILENT))
            receipts.append(receipt)
            planned.append((agreed, wrote))
            saves.append(save)
        expected = sum(coverage_of(name, count * 8) for name in saves[0].leaves) if count > 1 else 0
        data = Path(saves[0].upload.data.path)
        missing = expected - sum(receipt.coverage for receipt in receipts)
        for index in range(len(receipts), count):
            (like,) = receipts[-1].files
            name = f"copy-{index}-{like.name}"
            shutil.copy(data / like.name, data / name)
            part = msgspec.structs.replace(like, name=name)
            receipts.append(msgspec.structs.replace(receipts[-1], files=[part], coverage=missing % 2**64))
            missing = 0
        messages = [msgspec.msgpack.encode(receipt) for receipt in receipts]
        decode = msgspec.msgpack.Decoder(type(receipts[0])).decode
        sealed, _ = timed(lambda: Save.commit(saves[0], joined_receipts(list(map(decode, messages)))))
    if has_all:
        print(json.dumps({"load": timed(lambda: load(directory))[0]}))
        return
    print(
        json.dumps(
            {
                "prepare and agree": max(agreed for agreed, _ in planned),
                "arrange and write": max(wrote for _, wrote in planned),
                "seal": sealed,
                "messages of one process": len(said["sent"]) + len(messages[0]) if said else 0,
                "answers": len(said.get("answered", b"")),
                "manifest": (directory / "manifest.json").stat().st_size,
                "part": receipts[0].files[0].header_nbytes,
            }
        )
    )


def simulated(directory: Path, count: int, leaves: int, cut: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--simulate", str(count), "--leaves", str(leaves), "--cut", cut]
    place = directory / f"simulated-{count}-{cut}"
    done = subprocess.run(
        [*command, "--directory", str(place)], stdout=subprocess.PIPE, text=True, check=True
    )
    shutil.rmtree(place)
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------- report


def print_real(found: list[dict[str, Any]]) -> dict[str, float]:
    """Of every round the slowest process counts: they wait for each other anyway."""
    state = found[0]["state"]
    slowest = {
        what: [max(values) for values in zip(*(one[what] for one in found), strict=True)]
        for what in ("rendezvous", "save_async", "save", "load", "load, broadcast")
    }
    medians = {what: 1e3 * statistics.median(values) for what, values in slowest.items()}
    written = {d: sum(one[f"written, {d}"] for one in found) / state for d in ("safetensors", "tensorstore")}
    print(f"# Several processes\n\n`python bench/processes.py`, {os.cpu_count()} cores.")
    print(f"\n{PROCESSES} processes of {DEVICES} devices, a state of {state / 1e6:.0f} MB in 64 leaves\n")
    print("| what | median of the rounds, slowest process |\n| --- | --- |")
    for what, value in medians.items():
        print(f"| {what} | {value:.2f} ms |")
    for layout, ratio in written.items():
        print(f"| bytes written, {layout} | {ratio:.4f} x the state |")
    return {BARS[0][0]: medians["save_async"], "bytes written": max(written.values())}


def print_simulated(rows: dict[tuple[int, str], dict[str, float]], leaves: int) -> None:
    names = list(next(iter(rows.values())))
    print(f"\n{leaves:,} leaves of 32 bytes a process, simulated; seconds and bytes of one process\n")
    print("| processes | leaves are | " + " | ".join(names) + " |\n| --- | --- |" + " --- |" * len(names))
    for (count, cut), row in rows.items():
        values = [f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in row.values()]
        print(f"| {count} | {cut} | " + " | ".join(values) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path)
    for name in ("--rank", "--port", "--nbytes", "--rounds", "--simulate", "--leaves"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cut", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        play_rank(arguments.rank, arguments.port, arguments.directory, arguments.nbytes, arguments.rounds)
        return
    if arguments.simulate is not None:
        simulate(arguments.simulate, arguments.leaves, arguments.cut, arguments.directory)
        return
    quick = arguments.quick
    here = arguments.dir or Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(dir=here, prefix=".scratch-") as folder:
        directory = Path(folder)
        found = real(directory, 2**26 if quick else 2**29, 3 if quick else 7)
        reached = print_real(found)
        counts = (4, SIMULATED) if quick else (1, 4, 16, SIMULATED, 256, 1000)
        rows = {
            (count, cut): simulated(directory, count, LEAVES, cut)
            for cut in ("sharded", "replicated")
            for count in counts
        }
        print_simulated(rows, LEAVES)
        took = simulated(directory, SIMULATED, FEW, "sharded")["load"]
        print(f"\n{FEW:,} leaves, each in {SIMULATED} parts, load in one process in {took:.2f} s")
    worst = [row for (count, _), row in rows.items() if count == SIMULATED]
    parts = ("prepare and agree", "arrange and write", "seal")
    reached["planning and committing, 64 processes"] = max(sum(row[p] for p in parts) for row in worst)
    print("\n| what | reached | bar | met |\n| --- | --- | --- | --- |")
    for what, unit, limit in BARS:
        verdict = "yes" if reached[what] <= limit else "**no**"
        print(f"| {what} | {reached[what]:.3g} {unit} | <= {limit:g} | {verdict} |")
    if arguments.json:
        simulations = [{"processes": n, "leaves are": cut, **row} for (n, cut), row in rows.items()]
        arguments.json.write_text(
            json.dumps({"reached": reached, "real": found, "simulated": simulations}, indent=1)
        )


if __name__ == "__main__":
    main()
