"""What a plain install can do, and which extra is named for what it cannot: the packages are really not importable."""

import re
import subprocess
import sys
from pathlib import Path

import eformer

OPTIONAL = ("huggingface_hub", "h5py", "cryptography")
LATE = {"obstore", "tensorstore"}
WITH_OTHERS = {"etils", "jaxlib"}  # Orbax brings the first, which its callers have; jax the second
REQUIRED = {"click", "jax", "ml_dtypes", "msgspec", "numpy", "rich", "xxhash", "zstandard"} | LATE
SOURCE = Path(eformer.__file__).parent
COMPAT = Path(__file__).parents[1] / "compat"

BLOCK = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import os, numpy as np
from eformer import checkpoint
from eformer.checkpoint import SaveOptions
os.chdir(sys.argv[1])
"""


def without_extras(code, folder):
    """Run code in a process that has a plain install."""
    command = [sys.executable, "-c", BLOCK + code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


ERRORS = """
def message(call):
    try:
        call()
    except ImportError as error:
        return str(error)
checkpoint.save({"w": np.ones(3)}, "c")
for call in (%s):
    print(message(call))
"""


def test_every_absence_names_the_extra(tmp_path):
    (tmp_path / "key.pem").write_text("x")
    calls = [
        "lambda: checkpoint.load('hf://org/model')",
        f"lambda: checkpoint.load({str(COMPAT / 'keras' / 'model.weights.h5')!r})",
        "lambda: checkpoint.sign('c', private_key='key.pem')",
    ]
    ended = without_extras(ERRORS % ", ".join(calls), tmp_path)
    assert ended.stdout.splitlines() == [
        "hf:// needs the package huggingface_hub: pip install 'eformer-checkpoint[hf]'",
        "files of Keras need the package h5py: pip install 'eformer-checkpoint[h5]'",
        "signatures need the package cryptography: pip install 'eformer-checkpoint[sign]'",
    ], ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "key.pem"]  # nothing was begun


def test_a_plain_install_does_what_the_readme_shows_first(tmp_path):
    code = """
import jax.numpy as jnp
state = {"params": {"embedding": jnp.arange(60.0).reshape(20, 3)}, "step": 1}
checkpoint.save(state, "run/step-100")
checkpoint.save_async(state, "run/step-200").result()
checkpoint.load("run/step-200", like=state)
checkpoint.save(state, "run/step-300", options=SaveOptions(reuse="run/step-200"))
with checkpoint.Run("other", every=1, keep=3) as run:
    assert run.resume(like=state) is None
    run.after(1, state)
assert checkpoint.open("run/step-200")["params.embedding"][10:12].shape == (2, 3)
checkpoint.inspect("run/step-300"), checkpoint.abstract("run/step-300")
assert checkpoint.verify("run/step-200").ok and checkpoint.diff("run/step-100", "run/step-200").same
for to in ("safetensors", "tensorstore", "msgpack", "npz", "orbax"):
    checkpoint.convert("run/step-200", to, to=to)
checkpoint.save(state, "z", format="tensorstore", options=SaveOptions(compression="zstd"))
assert checkpoint.load("z")["step"] == 1
print("done")
"""
    ended = without_extras(code, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stderr


def test_a_plain_install_has_buckets_orbax_and_jaxs_own_manager(tmp_path):
    code = f"""
import jax
from eformer.serialization import AsyncCheckpointManager, tree_serialize_leaves
tree = {{"w": jax.numpy.ones(3)}}
manager = AsyncCheckpointManager()
assert manager.global_manager is manager.global_manager
tree_serialize_leaves("arrays", tree, manager=manager.global_manager)
checkpoint.save(tree, "memory://bucket/x")
assert checkpoint.load("memory://bucket/x")["w"].tolist() == [1.0] * 3
checkpoint.save(tree, "database", format="tensorstore", options=SaveOptions(ocdbt=True))
assert checkpoint.load({str(COMPAT / "orbax" / "v0_standard")!r})["params"]
print("done")
"""
    ended = without_extras(code, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stderr


def test_the_command_line_prints_the_error_that_names_the_extra(tmp_path):
    code = "from eformer.cli.commands import main; main(['inspect', 'hf://org/model'])"
    ended = without_extras(code, tmp_path)
    assert ended.returncode == 1
    assert (
        ended.stderr
        == "error: hf:// needs the package huggingface_hub: pip install 'eformer-checkpoint[hf]'\n"
    )


def imported(indent):
    """Return the packages that modules import at this indentation, apart from the standard library."""
    line = re.compile(rf"^{indent}(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)
    paths = {*SOURCE.rglob("*.py")} - {SOURCE / "keras.py"}  # which only programs that use Keras import
    found = {name or other for path in paths for name, other in line.findall(path.read_text())}
    return found - sys.stdlib_module_names - {"eformer"}


def test_every_dependency_is_imported_and_nothing_else_is():
    assert (
        REQUIRED <= imported(" *") - {"google", "boto3"} <= REQUIRED | {*OPTIONAL, *WITH_OTHERS, "_typeshed"}
    )
    assert imported("") <= REQUIRED - LATE  # and an extra is only imported where it is needed
