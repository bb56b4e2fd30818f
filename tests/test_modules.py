"""Every module has tests that are found: in the mirror path, or named in the last lines of its docstring."""

import ast
import re
from pathlib import PurePath

import pytest

from support.pages import ROOT

_NAMED = re.compile(r"(?:\A|\n\n)Tests: (.+)\.\Z", re.DOTALL)
_TEST = re.compile(r"^ *(?:def test_|class Test)", re.MULTILINE)
_EFORMER = re.compile(r"^ *(?:from|import) (?:eformer|support|contracts)\b", re.MULTILINE)


def test_every_module_with_code_has_tests_that_are_found():
    assert problems(ROOT) == []


def problems(root):
    """List the test files of modules that are not there, or test nothing."""
    package = root / "src/eformer"
    paths = (path for path in sorted(package.rglob("*.py")) if not path.name.startswith("__"))
    modules = {path.relative_to(package): ast.parse(path.read_text("utf-8")) for path in paths}
    return [
        f"{module}: {file} {problem}"
        for module, tree in modules.items()
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)
        for file in files_of(module, ast.get_docstring(tree) or "")
        if (problem := problem_of(root / file))
    ]


def files_of(module, docstring):
    """Return the test files that the docstring names, else the one in the mirror path."""
    if named := _NAMED.search(docstring):
        return named[1].replace("\n", " ").split(", ")
    folder = PurePath("tests", *(part.replace("_engine", "engine") for part in module.parent.parts))
    return [str(folder / f"test_{module.name.removeprefix('_')}")]


def problem_of(file):
    if not file.is_file():
        return "does not exist"
    text = file.read_text("utf-8")
    return "" if _TEST.search(text) and _EFORMER.search(text) else "tests nothing of eformer"


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Do it.\n\nTests: tests/test_own.py, tests/cli/test_more.py.", []),
        ("Do it.", ["tests/engine/room/test_do.py does not exist"]),
        ("Do it.\n\nTests: tests/test_own.py,\ntests/test_gone.py.", ["tests/test_gone.py does not exist"]),
        ("Do it.\n\nTests: tests/test_none.py.", ["tests/test_none.py tests nothing of eformer"]),
    ],
)
def test_a_module_without_tests_is_named(tmp_path, docstring, problem):
    module = tmp_path / "src/eformer/_engine/room/_do.py"
    for path, text in {
        module: f'"""{docstring}"""\n\ndef do(): ...\n',
        module.with_name("data.py"): '"""No code."""\n\nNUMBER = 1\n',
        tmp_path / "tests/test_own.py": "from eformer import checkpoint\n\ndef test_it(): ...\n",
        tmp_path / "tests/cli/test_more.py": "from support import commands\n\nclass TestIt(Contract): ...\n",
        tmp_path / "tests/test_none.py": "from eformer import checkpoint\n\ndef check(): ...\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert problems(tmp_path) == [f"_engine/room/_do.py: {each}" for each in problem]
