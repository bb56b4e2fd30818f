"""Write the digest of every tiny model in every layout to `results.json`, after `make frameworks` has compared them.

.venv/bin/python tests/rules/results.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.tiny_models import CASES, laid_out

RESULTS = Path(__file__).parent / "results.json"


def digest(name: str, layout: str) -> str:
    """Return a digest of the names, dtypes, shapes and elements of a model in a layout."""
    found = hashlib.sha256()
    for leaf, array in sorted(laid_out(name, layout).items()):
        found.update(f"{leaf} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:32]


if __name__ == "__main__":
    results = {f"{name}/{layout}": digest(name, layout) for name, layout in CASES}
    RESULTS.write_text(json.dumps(results, indent=0) + "\n")
