"""Run cases, one line of JSON after the other, in one of the environments."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from cases import Outcome  # noqa: E402
from kinds import KINDS  # noqa: E402
from kinds.kind import Bench  # noqa: E402


def main(memory: Path, disk: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    bench = Bench(memory, disk)
    for line in sys.stdin:
        request = json.loads(line)
        bench.first = request["first"]
        try:
            outcome = KINDS[request["kind"]].run(request["layout"], request["seed"], bench)
        except Exception:  # noqa: BLE001  a fault of this program is seen in the table, too
            outcome = Outcome("crashed", traceback.format_exc()[-1500:])
        print(json.dumps(outcome.as_json()), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
