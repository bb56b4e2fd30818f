"""Run the scenarios of a module in this process, on one side, and write a line of JSON for each.

`python -m orbax_door.worker SIDE MODULE LEG DEVICES ROOTS OUT [NAME ...]`
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

LIMIT = 90  # seconds for a scenario


def main():
    side, module, leg, devices, roots, out, *names = sys.argv[1:]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    faulthandler.enable()
    scenarios = importlib.import_module(f"orbax_door.scenarios.{module}")
    ocp = library(side, getattr(scenarios, "INSTALLED", False))
    with open(out, "a", encoding="utf-8") as lines:
        for each in scenarios.SCENARIOS:
            if each.name in names:
                _write(lines, {"begun": each.name})
                _write(lines, {"name": each.name, "seen": seen(each, ocp, Path(roots), int(leg))})
        _write(lines, {"done": True})
    sys.stdout.flush()
    sys.stderr.flush()
    if not getattr(scenarios, "EXITS", False):
        os._exit(0)  # threads of a failed scenario may never end


def library(side, installed):
    """Import Orbax or the door; `installed` puts the door in the place of Orbax, for programs that import it by name."""
    if side == "oracle":
        import orbax.checkpoint as ocp
    elif installed:
        from eformer.compat.orbax import install

        install()
        import orbax.checkpoint as ocp
    else:
        from eformer.compat import orbax as ocp
    return ocp


def seen(scenario, ocp, roots, leg):
    """Run a scenario in a directory of its own, and return its views by label; an accident is a label, too."""
    from orbax_door.record import Viewer, families

    root = roots / "".join(each if each.isalnum() or each in "._-" else "-" for each in scenario.name)
    root.mkdir(parents=True, exist_ok=True)
    viewer, views = Viewer(ocp, root), {}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT)
    try:
        for label, value in scenario.seen(ocp, root, leg):
            name = (
                label
                if label not in views
                else f"{label} {sum(each.startswith(label) for each in views) + 1}"
            )
            views[name] = viewer.view(value)
    except Exception as error:
        views["accident"] = {"raised": families(error), "trace": traceback.format_exc()[-3000:]}
    finally:
        signal.alarm(0)
    return views


def _too_long(*_):
    raise TimeoutError(f"the scenario took more than {LIMIT} seconds")


def _write(lines, record):
    lines.write(json.dumps(record) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
