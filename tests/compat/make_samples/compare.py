"""Compare what eformer loads with what Orbax restores, for many versions of Orbax and every kind of checkpoint.

    python tests/compat/make_samples/compare.py [--versions 0.4.1,0.12.8] [--write docs/guides/orbax-versions.md]
        [--pack tests/compat/orbax-old/kinds.tar.xz] DIRECTORY

Every version is installed into an environment of its own in DIRECTORY, where checkpoints of all kinds are then written
by `write_kinds.py`. Both are kept for the next run. Prints a table, and every checkpoint that is not equal. `--write`
puts the table into a page, between the lines that mark its place; `--pack` makes the archive of samples for the tests.
"""

import argparse
import io
import json
import logging
import shutil
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- the table of compare.py begins -->\n", "<!-- and ends -->\n"

_OLD = "numpy<2 scipy<1.13 optax<0.1.8 chex<0.1.86 ml_dtypes==0.2.0 setuptools<70"
_NEWER = "numpy<2 scipy<1.13 optax<0.2.3 chex<0.1.87"

# The versions of Orbax, each with packages of its time.
VERSIONS = {
    "0.2.7": f"jax==0.4.13 jaxlib==0.4.13 flax==0.7.0 tensorstore==0.1.40 {_OLD}",
    "0.3.0": f"jax==0.4.13 jaxlib==0.4.13 flax==0.7.2 tensorstore==0.1.40 {_OLD}",
    "0.3.5": f"jax==0.4.18 jaxlib==0.4.18 flax==0.7.2 tensorstore==0.1.41 {_OLD}",
    "0.4.1": f"jax==0.4.19 jaxlib==0.4.19 flax==0.7.4 tensorstore==0.1.45 {_OLD}",
    "0.4.4": f"jax==0.4.20 jaxlib==0.4.20 flax==0.7.5 tensorstore==0.1.51 {_NEWER}",
    "0.4.8": f"jax==0.4.23 jaxlib==0.4.23 flax==0.8.0 tensorstore==0.1.51 {_NEWER}",
    "0.5.3": f"jax==0.4.25 jaxlib==0.4.25 flax==0.8.1 tensorstore==0.1.54 {_NEWER}",
    "0.5.10": f"jax==0.4.26 jaxlib==0.4.26 flax==0.8.3 tensorstore==0.1.56 {_NEWER}",
    "0.5.20": "jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 tensorstore==0.1.63 numpy<2 optax<0.2.4",
    "0.5.23": "jax==0.4.31 jaxlib==0.4.31 flax==0.8.5 tensorstore==0.1.64 numpy<2 optax<0.2.4",
    "0.6.1": "jax==0.4.31 jaxlib==0.4.31 flax==0.9.0 tensorstore==0.1.65 numpy<2 optax<0.2.4",
    "0.6.4": "jax==0.4.33 jaxlib==0.4.33 flax==0.9.0 tensorstore==0.1.65 numpy<2 optax<0.2.4",
    "0.7.0": "jax==0.4.34 jaxlib==0.4.34 flax==0.10.0 tensorstore==0.1.66 numpy<2 optax<0.2.4",
    "0.8.0": "jax==0.4.35 jaxlib==0.4.35 flax==0.10.1 tensorstore==0.1.67 numpy<2 optax<0.2.5",
    "0.9.1": "jax==0.4.35 jaxlib==0.4.35 flax==0.10.2 tensorstore==0.1.69 numpy<2 optax<0.2.5",
    "0.10.3": "jax==0.4.38 jaxlib==0.4.38 flax==0.10.2 tensorstore==0.1.71 numpy<2.3 optax<0.2.5",
    "0.11.0": "jax==0.4.38 jaxlib==0.4.38 flax==0.10.2 tensorstore==0.1.71 numpy<2.3 optax<0.2.5",
    "0.11.13": "jax==0.6.0 jaxlib==0.6.0 flax==0.10.6 tensorstore==0.1.74 numpy<2.3 optax<0.2.6",
    "0.11.25": "jax==0.7.0 jaxlib==0.7.0 flax==0.11.2 tensorstore==0.1.76 numpy<2.4 optax<0.2.6",
    "0.12.0": "jax==0.10.0 jaxlib==0.10.0 flax==0.12.6 tensorstore==0.1.84",
    "0.12.8": "jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 tensorstore==0.1.86",
}

_ALONE = ("array_alone", "array_aggregated", "json_alone")
_ITEMS = ("item_array", "item_only_array", "item_key", "item_json", "item_only_json", "item_numpy_key")

# The kinds of each version that are samples for the tests: those that this version alone, or first, wrote like that.
PACKED = {
    "0.2.7": (*_ALONE, "pytree-slashes", "flax_legacy-base"),
    "0.3.0": ("pytree_metadata-base", "pytree_metadata-empties"),
    "0.3.5": (*_ALONE, "pytree_ocdbt-slashes", "standard-slashes", "manager_of_one-base"),
    "0.4.1": (
        *_ALONE,
        "pytree-slashes",
        "pytree_plain-slashes",
        "standard-slashes",
        "manager_of_items-slashes",
    ),
    "0.5.3": (*_ALONE, "manager_with_args-base", "half_aggregated-texts"),
    "0.5.10": ("item_only_json",),
    "0.5.20": (*_ALONE, *_ITEMS, "pytree-empties", "standard-empties", "manager_padded-base"),
    "0.9.1": (*_ALONE, *_ITEMS, "manager_padded-empties"),
    "0.12.8": (*_ALONE, *_ITEMS, "version_1-base", "flax_legacy-optimizer", "flax_orbax-base"),
}

ROWS = {
    "pytree": "`PyTreeCheckpointer`",
    "pytree_ocdbt": "the same, `use_ocdbt=True`",
    "pytree_plain": "the same, `use_ocdbt=False`",
    "pytree_metadata": "the same, `write_tree_metadata=True`",
    "pytree_zarr3": "the same, `use_zarr3=True`",
    "pytree_plain_zarr3": "the same, zarr 3 without OCDBT",
    "aggregated": "all leaves aggregated",
    "half_aggregated": "some leaves aggregated",
    "half_aggregated_plain": "the same, without OCDBT",
    "standard": "`StandardCheckpointer`",
    "version_1": "`orbax.checkpoint.v1`",
    "manager_of_one": "`CheckpointManager`, one checkpointer",
    "manager_of_items": "`CheckpointManager`, a checkpointer for each item",
    "manager_with_args": "`CheckpointManager`, `args.StandardSave`",
    "manager_padded": "`CheckpointManager`, `args.PyTreeSave`, padded steps",
    "item": "items: `ArraySave`, `JaxRandomKeySave`, `NumpyRandomKeySave`, `JsonSave`",
    "alone": "one array or JSON document, without a tree",
    "flax_orbax": "flax `save_checkpoint`, over Orbax",
    "flax_legacy": "flax `save_checkpoint`, legacy",
}


def install(version, directory):
    """Make the environment of a version, unless it is there; return its Python."""
    environment = directory / f"orbax-{version}"
    done = environment / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        packages = [f"orbax-checkpoint=={version}", *VERSIONS[version].split()]
        subprocess.run([environment / "bin" / "pip", "install", "-q", "--no-compile", *packages], check=True)
        done.touch()
    return environment / "bin" / "python"


def write_kinds(version, directory):
    """Let a version write its checkpoints, unless they are there; return their directory."""
    kinds = directory / f"kinds-{version}"
    if not (kinds / "expected.json").exists():
        shutil.rmtree(kinds, ignore_errors=True)  # of a run that was broken off
        kinds.mkdir()
        command = [install(version, directory), HERE / "write_kinds.py", kinds]
        with (directory / f"kinds-{version}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return kinds


def compare(path, expected):
    """Say how eformer's tree compares: "equal", or "refused", "left out" or "wrong" with the reason."""
    from eformer import checkpoint
    from eformer.errors import EformerError

    try:
        for item, leaves in expected.items():
            problem = _difference(checkpoint.load(path, prefix=item or None), leaves)
            if problem:
                return "wrong", f"{item or 'the tree'}: {problem}"
        report = checkpoint.verify(path)
        if not report.ok or report.left_out:
            return "left out", str(report)
    except EformerError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - any other error is a bug
        return "wrong", traceback.format_exc(limit=-3)
    return "equal", ""


def _difference(tree, expected):
    from describe import described_leaves

    found = described_leaves(tree)
    paths = [path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)]
    return "; ".join(
        f"{path}: Orbax {_short(expected.get(path))}, eformer {_short(found.get(path))}"
        for path in sorted(paths)[:4]
    )


def _short(description):
    return description and " ".join(map(str, description[:3]))


def row_of(kind):
    """Return the row of the table that a kind of checkpoint is counted in."""
    way = kind.partition("-")[0]
    if way.startswith("item_"):
        return "item"
    return "alone" if way in _ALONE else way


def compare_version(kinds):
    """Compare all checkpoints of a version: return the results counted by row, and a line for each unequal one."""
    expected = json.loads((kinds / "expected.json").read_text())
    counts, problems = {}, []
    for kind, restored in expected.items():
        if isinstance(restored, str):  # this version of Orbax cannot save it, or not restore it
            continue
        result, reason = compare(kinds / kind, restored)
        counts.setdefault(row_of(kind), Counter())[result] += 1
        if result != "equal":
            problems.append(f"{kinds.name}/{kind}: {result}: {reason}")
    return counts, problems


def table(results):
    """Make the table, in Markdown, of the counts of each version."""
    lines = [f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for row, title in ROWS.items():
        cells = [_cell(counts.get(row, Counter())) for counts in results.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(counts):
    if counts.keys() <= {"equal"}:
        return str(counts["equal"] or "–")
    return ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))


def write_into(page, text):
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}{text}{END}{after}", "utf-8")


def pack(path, versions, directory):
    """Pack the samples for the tests: the kinds of `PACKED`, with what Orbax restored from them."""
    samples = {}
    with tarfile.open(path, "w:xz") as archive:
        for version in versions:
            kinds = directory / f"kinds-{version}"
            expected = json.loads((kinds / "expected.json").read_text())
            for kind in PACKED.get(version, ()):
                _add(archive, kinds / kind, f"orbax-{version}/{kind}")
                samples[f"orbax-{version}/{kind}"] = expected[kind]
        data = json.dumps(samples).encode()
        member = tarfile.TarInfo("expected.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def _add(archive, path, name):
    """Add a checkpoint without its path on this machine, which Orbax notes where it says that a save is done."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder) / "copy"))
        for note in copy.rglob("commit_success.txt"):
            note.write_text(note.read_text().replace(str(path.parent.parent.resolve()), ""))
        archive.add(copy, name, filter=_without_owner)


def _without_owner(member):
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--pack", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    options.directory.mkdir(parents=True, exist_ok=True)
    results, problems = {}, []
    for version in options.versions.split(","):
        results[version], found = compare_version(write_kinds(version, options.directory.resolve()))
        problems += found
    text = table(results)
    sys.stdout.write("\n".join([text, *problems, ""]))
    if options.pack:
        pack(options.pack, results, options.directory)
    if options.write:
        write_into(options.write, text)


if __name__ == "__main__":
    main()
