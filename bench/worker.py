"""One cell in a process of its own: takes it as JSON in its argument, prints what it measured as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import limits
from plan import Cell


def run(cell: Cell) -> dict[str, Any]:
    directory = Path(cell.directory)
    if cell.task == "write":
        return limits.write(cell.mode, directory, cell.nbytes, cell.threads, cell.tries)
    if cell.task == "read":
        return limits.read(directory, cell.nbytes, warm=cell.threads, cold=cell.cold_threads, most=cell.tries)
    if cell.task == "files":
        return limits.files(directory, cell.leaves, cell.nbytes, cell.threads, cell.tries)
    return run_with_jax(cell)


def run_with_jax(cell: Cell) -> dict[str, Any]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if cell.devices > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={cell.devices}"
    import tasks  # late: what it imports starts jax, which looks at the environment once
    import workloads

    if cell.task == "values":
        workloads.write_values(workloads.TREES[cell.tree](cell.size), Path(cell.values))
        return {"values": {}}
    if cell.task == "floors":
        return tasks.floors(cell)
    return tasks.TASKS[cell.task](tasks.bench_of(cell))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        answer = run(Cell(**json.loads(sys.argv[1])))
    except Exception as error:  # noqa: BLE001  whatever a system raises is what is told of it
        traceback.print_exc()
        answer = {"values": {}, "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
