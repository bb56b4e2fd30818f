"""Name sample files that flax and equinox wrote, and load the program that wrote them."""

import importlib.util
from pathlib import Path

FILES = Path(__file__).parents[1] / "compat" / "files"
SAMPLES = ["flax.msgpack", "flax_chunked.msgpack", "equinox.eqx", "equinox_with_line.eqx"]
FORMATS = {".msgpack": "msgpack, of flax", ".npz": "npz", ".eqx": "equinox"}

_spec = importlib.util.spec_from_file_location("write", FILES / "write.py")
write = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write)
