"""The table of kinds of leaves: how each kind comes back for each kind of target, as Orbax has it (`kinds.toml`)."""

import json
import tomllib
from pathlib import Path

TABLE = Path(__file__).with_name("kinds.toml")
_HEAD = """# How a leaf comes back, by its kind when saved and by the target of the restore, as orbax-checkpoint 0.12.8 does it.
# Written by `python -m orbax_door.run --only 'kinds.*' --write-kinds`; `make orbax-door` compares it with Orbax.
"""


def check(oracle, *, write):
    """Compare the table with Orbax, or write it; return the cells that differ."""
    found = table(oracle)
    if write:
        TABLE.write_text(
            _HEAD + "".join(f"\n[{row}]\n{_lines(cells)}" for row, cells in found.items()), "utf-8"
        )
    known = tomllib.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}
    return [
        f"kinds.toml: {row}: {cell}: has {known.get(row, {}).get(cell)!r}, Orbax has {value!r}"
        for row, cells in found.items()
        for cell, value in cells.items()
        if known.get(row, {}).get(cell) != value
    ]


def _lines(cells):
    return "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in cells.items())


def table(oracle):
    """Return `{kind: {target: short text}}` of the scenarios of kinds."""
    rows = {}
    for name, views in oracle.items():
        if name.startswith("kinds.comes_back"):
            kind = name.partition("[")[2].partition(" by ")[0]
            rows.setdefault(kind.replace(" ", "-"), {}).update(
                {label: short(view) for label, view in views.items()}
            )
    return rows


def short(view):
    """Say a view in a few words."""
    if "raised" in view:
        return f"error {view['raised'][0]}"
    view = view.get("returned", view)
    if view == {"python": "str", "value": "saved"}:
        return "saved"
    if "jax" in view:
        kind = "key" if "key" in view["jax"] else f"jax {_shaped(view['jax'])}"
        return f"{kind}{' weak' * view['weak']} on {_place(view['sharding'])}"
    for kind in ("numpy", "numpy scalar", "abstract"):
        if kind in view:
            return f"{kind} {_shaped(view[kind])}"
    if "python" in view:
        return "None" if view["value"] == "None" else f"{view['python']} {view['value']}"
    if "items" in view:
        name = (
            view.get("namedtuple")
            or view.get("dataclass")
            or view.get("mapping")
            or view.get("sequence")
            or view.get("node")
        )
        items = view["items"].items() if isinstance(view["items"], dict) else enumerate(view["items"])
        inside = ", ".join(f"{str(key).removeprefix('str:')}: {short(each)}" for key, each in items)
        return f"{name}({inside})"
    return next(iter(view)) if view else "nothing"


def _shaped(view):
    return f"{view['dtype']}{view['shape']}".replace(" ", "")


def _place(sharding):
    axes = sharding.get("axes")
    spec = f"{axes} {sharding['spec']}".replace("'", "") if axes else ""
    return spec or f"devices {sharding['devices']}"
