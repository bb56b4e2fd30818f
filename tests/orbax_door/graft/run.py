"""Run Orbax's own tests with Orbax's classes, then with the door's in their place: `make orbax-suite`.

The tests come from packages of Orbax at run time, into `graft/.work`, which git ignores. A case counts if it passes with
Orbax's own classes. `deviations.toml` lists cases that are meant to fail with the door.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ET
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE / ".work"
LIMIT = 900  # seconds for a file of tests

# Versions whose source packages contain test files; other packages have abstract classes alone, if anything.
WITH_TESTS = ("0.11.0", "0.11.1", "0.11.2", "0.11.3")
PINNED = "0.12.8"

# Files about public names, without internals first.
PURE = """transform_utils_test.py checkpoint_args_test.py checkpoint_manager_options_test.py _src/composite_test.py
    _src/tree/utils_test.py _src/handlers/handler_registration_test.py _src/handlers/json_checkpoint_handler_test.py
    _src/handlers/random_key_checkpoint_handler_test.py""".split()
PUBLIC = """_src/handlers/composite_checkpoint_handler_test.py checkpoint_utils_test.py single_host_test.py test_utils_test.py
    _src/path/step_test.py""".split()
NEEDS = (
    "flax optax chex absl-py portpicker pytest pytest-timeout safetensors mock google-cloud-logging".split()
)


def main():
    options = _options()
    python = options.python or environment(options.orbax)
    files = list(test_files(options))
    sides = [""] if options.real or not has_door() else ["", "1"]
    if not options.real and not has_door():
        print("eformer.compat.orbax does not exist yet: Orbax's own classes alone are tested")
    listed = tomllib.loads((HERE / "deviations.toml").read_text("utf-8")).get("deviation", [])
    failures = 0
    for path in files:
        outcomes = [cases(python, path, graft) for graft in sides]
        failures += row(path, *outcomes, listed=listed)
    sys.exit(bool(failures))


def _options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--orbax", default=WITH_TESTS[-1], help="the version whose tests run, with Orbax of that version"
    )
    parser.add_argument("--real", action="store_true", help="Orbax's own classes alone")
    parser.add_argument("--python", help="an interpreter that has Orbax; without it, an environment is made")
    parser.add_argument("--set", choices=("pure", "public", "all", "shipped"), default="pure")
    parser.add_argument("files", nargs="*", help="files of tests, below orbax/checkpoint")
    return parser.parse_args()


def has_door():
    """Tell whether the door exists."""
    try:
        return importlib.util.find_spec("eformer.compat.orbax") is not None
    except ModuleNotFoundError:
        return False


def environment(version):
    """Make an environment with Orbax of the version and this package; return its interpreter."""
    place = WORK / version / "venv"
    python, mark = place / "bin/python", place / ".installed"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        root = HERE.parents[2]
        subprocess.run([*pip, "-c", root / "constraints.txt", "-e", root, "jax"], check=True)
        subprocess.run([*pip, f"orbax-checkpoint=={version}", *NEEDS], check=True)
        mark.touch()
    return str(python)


def test_files(options):
    """Yield the files of the chosen set."""
    if options.set == "shipped":
        yield HERE / "cases_shipped.py"
        return
    known = {"pure": PURE, "public": [*PURE, *PUBLIC], "all": None}[options.set]
    base = source(options.orbax)
    names = options.files or known or sorted(str(path.relative_to(base)) for path in base.rglob("*_test.py"))
    yield from (base / name for name in names if (base / name).exists())


def source(version):
    """Download the source package of a version, and return the directory of its modules."""
    place = WORK / version / "source"
    base = place / f"orbax_checkpoint-{version}" / "orbax" / "checkpoint"
    if not base.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run(
            [*pip, "--no-binary", ":all:", "-d", place, f"orbax-checkpoint=={version}"], check=True
        )
        with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
            archive.extractall(place, filter="data")
    return base


def cases(python, path, graft):
    """Run a file of tests, and return the outcome of each case by name."""
    report = WORK / "report.xml"
    report.unlink(missing_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(map(str, [HERE.parents[1]]))
    environment = {**os.environ, "PYTHONPATH": paths, "EFORMER_ORBAX_GRAFT": graft, "JAX_PLATFORMS": "cpu"}
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "orbax_door.graft.plugin",
        "--import-mode=importlib",
        "--noconftest",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={WORK}",
        f"--junitxml={report}",
        str(path),
    ]
    try:
        done = subprocess.run(
            command, env=environment, cwd=WORK, timeout=LIMIT, check=False, capture_output=True, text=True
        )
        (WORK / f"{path.stem}{'-door' * bool(graft)}.log").write_text(
            done.stdout + done.stderr, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return {"(the file)": "time limit"}
    return read(report) if report.exists() else {"(the file)": "no report"}


def read(report):
    """Read the outcomes of a report: passed, skipped or failed."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = "failed" if "failed" in (state, found.get(name)) else state
    return found


def row(path, real, door=None, *, listed=()):
    """Print the row of a file and its failures; return their number."""
    name = path.name if path.parent == HERE else str(path).rpartition("/orbax/checkpoint/")[2]
    applicable = [case for case, state in real.items() if state == "passed"]
    text = f"{name:62} Orbax: {len(applicable):4} of {len(real):4} pass"
    if door is None:
        print(
            text,
            *(
                f"   not with Orbax: {case}"
                for case, state in real.items()
                if state not in ("passed", "skipped")
            ),
            sep="\n",
        )
        return 0
    known = [each["case"] for each in listed if fnmatchcase(name, each["file"])]
    failed = [case for case in applicable if door.get(case) != "passed"]
    open_ = [case for case in failed if not any(fnmatchcase(case, each) for each in known)]
    stale = [each for each in known if not any(fnmatchcase(case, each) for case in failed)]
    print(
        f"{text}   door: {len(applicable) - len(failed):4} pass, {len(failed) - len(open_):3} listed, {len(open_):3} fail"
    )
    print(
        *(f"   fails: {case}" for case in open_),
        *(f"   listed, but passes: {case}" for case in stale),
        sep="\n",
    )
    return len(open_) + len(stale)


if __name__ == "__main__":
    main()
