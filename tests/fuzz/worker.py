"""One process of the fuzzer. `run.py` starts it, sees that it goes on, and takes the input in work if it does not."""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import time
import warnings
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

from eformer._engine.formats.others import keras_files
from eformer._engine.stores.local import LocalStore
from fuzz.cases import Case
from fuzz.fuzzer import Finding, Fuzzer, shares
from fuzz.guard import Guard, limit_memory
from fuzz.readers import READERS

MEMORY = 1536 * 2**20  # bytes beyond what the program itself takes
TURN = 1.0  # seconds for one reader
STATE = (
    2**20
)  # bytes: the number of inputs, then the reader and the target of the one in work; and the file of a parser
_SAVED_FOR_KEY = 2


class Worker:
    def __init__(self, root: Path, findings: Path, seed: int, names: list[str]) -> None:
        self.root, self.findings, self.seed, self.names = root, findings, seed, names
        self.totals: dict[str, int] = dict.fromkeys(names, 0)
        self.seconds: dict[str, float] = dict.fromkeys(names, 0.0)
        self.keys: dict[str, int] = {}
        with (root / "state").open("w+b") as file:
            file.truncate(STATE)
            self.state = mmap.mmap(file.fileno(), STATE)
        self.count = 0

    def run(self, stop: float) -> None:
        fuzzer = Fuzzer(self.root, Guard(self.root), traced=0.05)
        self._warm_up(fuzzer)
        limit_memory(MEMORY)
        number = 0
        while time.time() < stop:
            for name in shares(self.names, Random(f"{self.seed}:{number}")):
                if time.time() >= stop:
                    break
                self._turn(fuzzer, name, Random(f"{self.seed}:{name}:{number}"))
                number += 1
                self._tell(fuzzer)

    def _warm_up(self, fuzzer: Fuzzer) -> None:
        """Import what is imported late, and start the threads of jax and TensorStore."""
        for name in self.names:
            for case in READERS[name].seeds():
                fuzzer.begin(READERS[name], case)
                fuzzer.guard.is_on = False  # type: ignore[union-attr]
                try:
                    fuzzer.run_all(READERS[name], case)
                except Finding as finding:
                    self._found(name, finding, case)

    def _turn(self, fuzzer: Fuzzer, name: str, rng: Random) -> None:
        began = time.monotonic()
        LocalStore.read_threads = rng.choice(
            (1, 1, 1, 2)
        )  # on busy cores the second one costs more than the rest

        def tell(case: Case) -> None:
            self.count += 1
            self.totals[name] += 1
            self._in_work(name, case)
            self.case = case

        def is_over() -> bool:
            return time.monotonic() - began > TURN

        while not is_over():
            try:
                fuzzer.inputs(READERS[name], rng, is_over, tell)
            except Finding as finding:
                self._found(name, finding, self.case)
        self.seconds[name] += time.monotonic() - began

    def _in_work(self, name: str, case: Case) -> None:
        target, data = next(iter(case.files.items())) if READERS[name].in_memory else (case.target, b"")
        text = f"{name}\n{target}\n".encode(errors="replace") + data
        self.state[:16] = self.count.to_bytes(8, "little") + len(text).to_bytes(8, "little")
        self.state[16 : 16 + len(text)] = text

    def _found(self, name: str, finding: Finding, case: Case) -> None:
        self.keys[finding.key] = self.keys.get(finding.key, 0) + 1
        if self.keys[finding.key] <= _SAVED_FOR_KEY:
            save_finding(self.findings, name, finding.key, finding.text, case)

    def _tell(self, fuzzer: Fuzzer) -> None:
        said = {
            "totals": self.totals,
            "seconds": self.seconds,
            "keys": self.keys,
            "outcomes": fuzzer.outcomes,
        }
        (self.root / "said.new").write_text(json.dumps(said))
        (self.root / "said.new").replace(self.root / "said.json")


def save_finding(findings: Path, reader: str, key: str, text: str, case: Case) -> Path:
    """Save an input with its traceback, and the command that repeats it."""
    findings.mkdir(parents=True, exist_ok=True)
    data = case.packed()
    name = "".join(char if char.isalnum() else "-" for char in key)[:100]
    path = findings / f"{reader}--{name}--{abs(hash(data)) % 10**8:08}.zip"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(
        f"python tests/fuzz/run.py --repeat {path}\n\n{key}\n\n{text}", errors="replace"
    )
    return path


def repeat(root: Path, path: Path) -> None:
    """Give one input to all doors of its reader."""
    name = path.name.partition("--")[0] if path.name.partition("--")[0] in READERS else path.parent.name
    reader = READERS[name]
    fuzzer = Fuzzer(root, Guard(root))
    fuzzer.begin(reader, reader.seeds()[0])
    limit_memory(MEMORY + 2**30)
    fuzzer.run_all(reader, Case.unpacked(path.read_bytes()))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("eformer").setLevel(logging.CRITICAL)
    keras_files._SECONDS = 2  # which damaged files may take
    root = Path(sys.argv[1])
    if sys.argv[2] == "--repeat":
        repeat(root, Path(sys.argv[3]))
        return
    findings, seed, stop, names = sys.argv[2:]
    Worker(root, Path(findings), int(seed), names.split(",")).run(float(stop))


if __name__ == "__main__":
    main()
