"""Every public name is on a page of the API, with a docstring that says what it does, its arguments, and an example."""

import doctest
import importlib
import inspect
import re
import sys
import textwrap
from contextlib import suppress

import pytest

import eformer.checkpoint
from eformer._engine.stores import store_options
from support import api
from support.api import arguments, calls, on_pages, public
from support.pages import ROOT
from support.stages import Done, names_of_docstrings, training_run

CALLS = {name: (call, text) for name, call, text in calls()}

# What functions return: their fields are described, and nobody makes them.
RESULTS = {
    "Conversion", "Diff", "Inspection", "LoadReport", "PathStat", "Pending", "Placement", "Pruned", "Report", "Resumed", "Step",
    "Verification", "View",
}  # fmt: skip
VERBS = """
    Add Allow Ask Call Check Close Compare Compress Compute Convert Count Create Decompress Delete Describe Do Estimate
    Flatten Group Iterate Join Let Load Move Open Read Replace Report Replicate Restore Return Save Say Send Serialize Set Sign
    Split Start Stop Strip Tell Wait Write Yield
"""
SAME_AS = re.compile(r"arguments are those of `(?P<name>\w+)`")


def test_every_public_name_is_on_a_page():
    assert set(public()) == set(on_pages())


def test_every_member_that_a_page_shows_is_there_and_has_a_docstring():
    for name, members in on_pages().items():
        for member in filter(None, members):
            assert inspect.getdoc(getattr(public()[name], member)), f"{name}.{member}"


@pytest.mark.parametrize("name", [n for n, (call, _) in CALLS.items() if inspect.isfunction(call)])
def test_a_docstring_begins_with_a_verb_in_the_imperative(name):
    assert CALLS[name][1].split()[0] in VERBS.split()


@pytest.mark.parametrize("name", [n for n in CALLS if n.rpartition(".")[2] not in RESULTS])
def test_a_docstring_says_what_the_arguments_are(name):
    call, text = CALLS[name]
    if same := SAME_AS.search(text):
        text += CALLS[f"{name.rpartition('.')[0]}.{same['name']}"][1]
    missing = [each for each in arguments(call) if not re.search(rf"\b{each}\b", text)]
    assert not missing, f"{name} does not explain {missing}"


@pytest.mark.parametrize("name", [n for n in public() if n.startswith("eformer.checkpoint.")])
def test_every_name_of_the_main_module_has_an_example(name):
    assert has_example(public()[name])


@pytest.mark.parametrize("name", [n for n, (call, _) in CALLS.items() if inspect.isclass(call)])
def test_every_class_has_an_example(name):
    assert has_example(CALLS[name][0])


def has_example(named):
    return re.search(r"^    (>>> |with )", inspect.getdoc(named), re.MULTILINE)


def test_the_attributes_of_a_run_are_described(tmp_path):
    with eformer.checkpoint.Run(tmp_path / "run") as run:
        attributes = [name for name in vars(run) if name[0] != "_"]
    assert attributes
    assert set(attributes) <= set(docstrings().rows(inspect.getdoc(run)))


@pytest.mark.parametrize("name", [name for name, (_, text) in CALLS.items() if ">>>" in text])
def test_the_examples_in_docstrings_do_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store_options, "_given", {})  # options that an example sets end with it
    module = importlib.import_module(next(m for m in reversed(api.MODULES) if name.startswith(m)))
    variables = {**vars(module), **names_of_docstrings()}
    test = doctest.DocTestParser().get_doctest(CALLS[name][1], variables, name, None, 0)
    runner = doctest.DocTestRunner(_ShownOutput(), verbose=False)
    with suppress(Done):
        runner.run(test, out=sys.stderr.write, clear_globs=False)
    if "checkpoint.register_module" in CALLS[name][1]:
        _forget_modules()
    assert runner.failures == 0


def test_the_training_loop_in_the_docstring_of_run_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(public()["eformer.checkpoint.Run"])
    loop = re.search(r"(?:^    .*\n)+", text, re.MULTILINE)[0]
    variables = {"checkpoint": eformer.checkpoint, **training_run()}
    with suppress(Done):
        exec(textwrap.dedent(loop), variables)
    assert [step.number for step in eformer.checkpoint.steps("runs/llama")] == [1000, 2000, 3000]


class _ShownOutput(doctest.OutputChecker):
    """Compare the output of lines whose output is shown; others may return anything."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def _forget_modules():
    from eformer._engine.trees import modules

    modules._registered.functions = {}
    modules._framework_of.cache_clear()


def docstrings():
    """Return the module of the site that turns docstrings into text that Sphinx understands."""
    sys.path.insert(0, str(ROOT / "docs" / "_site"))
    try:
        return importlib.import_module("docstrings")
    finally:
        sys.path.pop(0)


def test_a_docstring_becomes_text_that_sphinx_understands():
    text = """\
        Do it to `array`s, as `do` does.

        one        the first,
                   in two lines, such as s3://x
        two, three
                   the others

        Where to:

        four       the `Others`

            plain code

        Example:
            >>> do()
        """
    expected = """\
        Do it to `array`\\ s, as :py:obj:`do <m.do>` does.

        **one** : int \\| None
            the first, in two lines, such as s3\\://x
        **two**, **three**
            the others

        .. rubric:: Where to

        **four** : Sequence[\\ :py:obj:`Others <m.Others>`\\ ]
            the :py:obj:`Others <m.Others>`

        .. code-block:: python

            plain code

        .. rubric:: Example

        .. code-block:: pycon

            >>> do()
        """
    found = docstrings().as_rst(
        textwrap.dedent(text).splitlines(),
        types={"one": "int | None", "four": "Sequence[Others]"},
        find={"do": "m.do", "Others": "m.Others"}.get,
    )
    assert "\n".join(found).strip() == textwrap.dedent(expected).strip()
