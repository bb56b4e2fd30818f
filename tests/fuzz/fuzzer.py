"""The loop over one process's inputs: choose, change, seal, call, judge."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from fuzz.cases import Bucket, Place
from fuzz.doors import SOURCE, Doors, is_documented, signature
from fuzz.edits import changed
from fuzz.guard import OutsideError
from fuzz.parsers import parse
from fuzz.readers import READERS
from fuzz.seals import seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from fuzz.cases import Case
    from fuzz.guard import Guard
    from fuzz.readers import Reader

_MOST_KEPT = 400  # inputs of a reader that reached something new
_BATCH = 50  # inputs from one seed, so that little of its directory has to be written again


class Finding(Exception):
    """An input has done what none may. `key` is equal for findings of one cause."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key, self.text = key, text


class Fuzzer:
    """`traced` is the share of inputs whose lines are noted: tracing takes many times as long as the rest."""

    def __init__(self, root: Path, guard: Guard | None = None, *, traced: float = 0.0) -> None:
        self.place, self.before = Place(root / "in"), Place(root / "before")
        self.bucket = Bucket()
        self.doors = Doors(root / "out")
        self.doors.clear()
        self.guard, self._traced = guard, traced
        self.outcomes: Counter[str] = Counter()
        self._lines: set[tuple[str, int]] = set()
        self._signatures: set[str] = set()

    # ------------------------------------------------------------------------------------------ seeds

    def begin(self, reader: Reader, seed: Case) -> None:
        """Make a seed the one that inputs are compared with."""
        if reader.in_memory:
            return
        self.before.clear()
        self.doors.before = self.before.put(seed)
        self.doors.like = None
        with suppress(Exception):
            self.doors.like = self._loaded(reader)

    def _loaded(self, reader: Reader) -> Any:
        from eformer import checkpoint, pytree

        if reader.name == "msgpack_gzip":
            return pytree.from_compressed_bytes(None, (self.before.root / "tree.msgpack.gz").read_bytes())
        prefixes = sorted(checkpoint.inspect(self.doors.before).trees)
        return checkpoint.load(self.doors.before, prefix=prefixes[0])

    # ----------------------------------------------------------------------------------------- inputs

    def inputs(
        self, reader: Reader, rng: Random, done: Callable[[], bool], tell: Callable[[Case], None]
    ) -> None:
        """Run batches of changed seeds until `done`. `tell` is called before each input is run."""
        seeds = reader.seeds()
        kept: list[Case] = []
        while not done():
            seed = rng.choice(seeds)
            self.begin(reader, seed)
            for _ in range(_BATCH):
                base = rng.choice(kept) if kept and rng.random() < 0.3 else seed
                case = changed(base, rng, seeds)
                if rng.random() < 0.85:
                    seal(case, rng)
                tell(case)
                if self.is_new(reader, case, rng) and len(kept) < _MOST_KEPT:
                    kept.append(case)
                if done():
                    return

    def is_new(self, reader: Reader, case: Case, rng: Random) -> bool:
        """Run an input; tell whether it reached lines or errors that none has before."""
        if rng.random() >= self._traced:
            return self.run(reader, case, rng)
        with _traced(self._lines) as trace:
            is_new = self.run(reader, case, rng)
        return is_new or trace.is_new

    def run(self, reader: Reader, case: Case, rng: Random) -> bool:
        """Give a case to one or two doors. Raise a Finding; tell whether an error is one that was not seen before."""
        first = reader.doors[0] if rng.random() < 0.3 else rng.choice(reader.doors)
        is_new, is_readable = self.call(reader, case, first)
        if is_readable and not reader.in_memory and rng.random() < 0.5:
            is_new |= self.call(reader, case, rng.choice(reader.doors))[0]
        return is_new

    def run_all(self, reader: Reader, case: Case) -> None:
        """Give a case to every door."""
        for door in dict.fromkeys(reader.doors):
            self.call(reader, case, door)

    def call(self, reader: Reader, case: Case, door: str) -> tuple[bool, bool]:
        """Give a case to one door. Tell whether its error is a new one, and whether there was none."""
        error = self._outcome(reader, case, door)
        if isinstance(error, OutsideError):  # or another program has looked there at that moment
            error = self._outcome(reader, case, door)
        if error is None:
            self.outcomes["read"] += 1
            return False, True
        self.outcomes[type(error).__name__] += 1
        name = signature(error)
        if not is_documented(error):
            raise Finding(f"{name}", f"{door}: {''.join(traceback.format_exception(error))}")
        is_new = name not in self._signatures
        self._signatures.add(name)
        return is_new, False

    def _outcome(self, reader: Reader, case: Case, door: str) -> BaseException | None:
        if reader.in_memory:
            return self._error_of(parse, case)
        place = self.bucket if reader.in_bucket else self.place
        error = self._error_of(getattr(self.doors, door), place.put(case))
        if reader.writes:
            place.clear()
        return error

    def _error_of(self, work: Callable[[Any], None], given: Any) -> BaseException | None:
        if self.guard:
            self.guard.is_on = True
        try:
            work(given)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  which is what is looked for
            return self._outside() or error
        finally:
            if self.guard:
                self.guard.is_on = False
        return self._outside()

    def _outside(self) -> OutsideError | None:
        try:
            if self.guard:
                self.guard.check()
        except OutsideError as error:
            return error
        return None


class _traced:
    """Note the lines of eformer that are run, in all threads."""

    def __init__(self, lines: set[tuple[str, int]]) -> None:
        self._lines, self.is_new = lines, False

    def __enter__(self) -> Self:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._lines:
            self._lines.add(line)
            self.is_new = True
        return self._line


def shares(names: list[str], rng: Random) -> list[str]:
    """Return readers in the order of one round: each once, then the rest of their shares."""
    rest = [name for name in names for _ in range(READERS[name].share - 1)]
    return [*rng.sample(names, len(names)), *rng.sample(rest, len(rest))]
