"""Build the site: `make docs`. The source directory is the repository itself, so that links are as on GitHub."""

import inspect
import re
import sys
from functools import cache
from pathlib import Path

from myst_parser.parsers.sphinx_ import MystParser

from eformer._version import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))

from docstrings import as_rst, typed  # noqa: E402  it is beside this file
from notebooks import as_markdown  # noqa: E402

project = "eformer"
copyright = "the eformer authors"  # noqa: A001  the name is Sphinx's
release = __version__

extensions = [
    "myst_parser",  # pages are Markdown
    "sphinx.ext.autodoc",  # API pages are made from docstrings
    "sphinx_click",  # the page of the command line is made from its help
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "*.md",
    "bench/results/*.md",
    "faults/results/*.md",
]
exclude_patterns = [
    ".*",
    "src",
    "tests",
    "README.md",
    "docs/_build",
    "docs/_site",
    "*/.scratch*",
]

# classes of pictures (add_dark_pictures)
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4  # links to headings are checked, too

default_role = "code"  # of single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# signatures stay readable: types are in the lists of arguments (docstrings.py)
autodoc_typehints = "none"
# which is not installed here
autodoc_mock_imports = ["keras"]
# types of other packages, which are on no page here
nitpick_ignore_regex = [("py:class", r"(?!eformer\.).*")]

highlight_language = "none"  # of blocks that say nothing else
smartquotes = False  # options such as --to stay options that can be copied
html_theme = "furo"
html_title = f"eformer {release}"
html_static_path = ["_site/static"]
html_favicon = "_site/static/favicon.svg"
html_css_files = ["site.css"]
templates_path = ["_site/templates"]
# the start page is docs/index.html
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Objects that functions return: what they hold matters, and not how they are made.
RESULTS = {
    "Conversion",
    "Diff",
    "Inspection",
    "LoadReport",
    "Pending",
    "Placement",
    "Pruned",
    "Report",
    "Resumed",
    "Step",
    "Verification",
    "View",
}

# Names of the API that a docstring may mean, in this order of modules.
MODULES = ("eformer.checkpoint", "eformer.errors")


class NotebookParser(MystParser):
    """Read a notebook as the Markdown that it amounts to."""

    supported = ("ipynb",)

    def parse(self, inputstring, document):
        super().parse(
            as_markdown(inputstring, Path(document["source"]).name), document
        )


def add_navigation(app, name, source):
    """Add the tree of pages to the start page: on GitHub it would be shown as code."""
    if name == root_doc:
        source[0] += (HERE / "_site" / "navigation.md").read_text("utf-8")


def add_dark_pictures(app, name, source):
    """Show NAME-dark.png in the place of NAME.png where the page is dark, if there is one."""
    folder = Path(app.srcdir, name).parent

    def both(found):
        alt, path = found.groups()
        dark = f"{path}-dark.png"
        if not (folder / dark).exists():
            return found[0]
        return f"![{alt}]({path}.png){{.only-light}}\n![{alt}]({dark}){{.only-dark}}"

    source[0] = re.sub(r"!\[([^]]+)\]\(([\w./-]+)\.png\)", both, source[0])


def convert_docstring(app, what, name, obj, options, lines):
    find = finder(name, obj)
    lines[:] = as_rst(lines, types=types_of(obj), find=find)
    if what == "property":
        returned = types_of(obj.fget).get("return", "")
        lines += [f":Type: {typed(returned, find)}", ""]


def types_of(obj):
    """Return the annotations of a function, or of a class and its constructor, as they are written."""
    found = dict(getattr(obj, "__annotations__", {}))
    if isinstance(obj, type):
        found |= getattr(obj.__init__, "__annotations__", {})
        found.pop("return", None)
    return {
        key: value for key, value in found.items() if isinstance(value, str)
    }


def finder(name, obj):
    """Return a function that finds the full name of what a docstring of `obj` calls by a short name."""
    own = {*types_of(obj), name.rpartition(".")[2]}
    places = (name, name.rpartition(".")[0], *MODULES)

    def find(short):
        full = [f"{place}.{short}" for place in places]
        known = documented_names()
        return next((x for x in full if x in known and short not in own), None)

    return find


@cache
def documented_names():
    """Return the names that the API pages have, with the members of classes."""
    directive = re.compile(
        r"auto(?:function|class|exception):: (\S+)(?:\n +:members: (.+))?"
    )
    found = set()
    for page in (HERE / "api").glob("*.md"):
        for name, members in directive.findall(page.read_text("utf-8")):
            found |= {name, *(f"{name}.{x}" for x in members.split(", ") if x)}
    return found


def simplify_signature(app, what, name, obj, options, signature, returns):
    if what == "class" and name.rpartition(".")[2] in RESULTS:
        return "", ""
    if what == "class" and name.startswith(
        "eformer.keras."
    ):  # hidden by the mock of its base
        _, *own = inspect.signature(obj.__init__).parameters.values()
        own = [each.replace(annotation=each.empty) for each in own]
        return str(inspect.Signature(own)), ""
    if signature and "_DEFAULT" in signature:
        kind = "LoadOptions" if name.endswith(".load") else "SaveOptions"
        signature = signature.replace("_DEFAULT", f"{kind}()")
    if what in ("function", "method"):
        returns = types_of(obj).get("return")
    return signature, returns


def show_examples(app, context, lines):
    """Show the examples in the help of a command as code. sphinx-click gives them as lines that begin with a bar."""
    text = "\n".join(lines)
    shown = re.sub(r"(^\| .*\n?)+", _as_literal, text, flags=re.MULTILINE)
    lines[:] = shown.split("\n")


def _as_literal(found):
    return "::\n\n" + re.sub(r"^\| ", "    ", found[0], flags=re.MULTILINE)


def setup(app):
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_dark_pictures)
    app.connect("autodoc-process-docstring", convert_docstring)
    app.connect("autodoc-process-signature", simplify_signature)
    app.connect("sphinx-click-process-description", show_examples)
