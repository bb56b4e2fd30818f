"""Answer the requests of the pages: an address stands for a page, or for the facts that a page asks for.

/                         the run, or the checkpoint
/run.json                 the steps of the run, as they are now
/step/100/                one step; ?against=50 compares it. Below it, and below / for a checkpoint alone:
    summary.json   columns.json   changes.json   leaf.json?path=
/report.css /run.js /checkpoint.js
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.find import find
from eformer._engine.formats.steps import RUN_FILE, is_checkpoint, steps_in
from eformer._engine.pages.checkpoints import Checkpoints, OpenCheckpoint
from eformer._engine.pages.live import LiveRun, require_identity
from eformer._engine.pages.page import SCRIPTS, STYLES, asset, joined_assets
from eformer._engine.pages.report import made
from eformer._engine.pages.requests import WITH_SLASH, Answer, HttpRequest, RefusedError, as_error, as_json
from eformer._engine.record.text import printable
from eformer._engine.runs.removed import REMOVED_FILE
from eformer._engine.stores.locate import store_at
from eformer.errors import EformerError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.pages.checkpoints import Located
    from eformer._engine.record.policies import Keep

Question = Callable[[OpenCheckpoint, HttpRequest], Any]

_KINDS = {"css": "text/css", "js": "text/javascript"}


class Pages:
    """The pages of one run, or of one checkpoint."""

    def __init__(self, path: str, rules: Sequence[Keep] = ()) -> None:
        self.path = path
        self._run = LiveRun(path, rules) if _is_run(path) else None
        self._checkpoints = Checkpoints()
        if self._run is None:
            find(self.path)  # raises NotFoundError for a path without a checkpoint

    def close(self) -> None:
        """Stop following the run."""
        if self._run:
            self._run.close()

    @property
    def title(self) -> str:
        return printable(str(self.path).rstrip("/").rpartition("/")[2] or str(self.path))

    def __call__(self, request: HttpRequest) -> Answer:
        """Answer one request. Also answer errors of reading, with their texts."""
        try:
            return self._answer(request)
        except NotFoundError as error:
            return as_error(404, self._relative(error))
        except (EformerError, OSError, ValueError) as error:
            return as_error(422, self._relative(error))

    def _relative(self, error: Exception) -> str:
        """Return the text of an error with paths relative to the run, whose own path is on the page."""
        return printable(str(error)).replace(f"{store_at(self.path).url}/", "")

    def _answer(self, request: HttpRequest) -> Answer:
        match request.parts:
            case ():
                return WITH_SLASH
            case ("",):
                return _shell("run" if self._run else "checkpoint", self.title, "")
            case ("report.css" | "run.js" | "checkpoint.js" as name,):
                return _file(name)
            case ("run.json",) if self._run:
                return self._news(self._run, request.known)
            case ("step", number) if self._run and _is_number(number):
                return WITH_SLASH
            case ("step", number, "") if self._run and _is_number(number):
                self._locate(int(number))
                return _shell("checkpoint", f"step {int(number)} · {self.title}", "../../")
            case ("step", number, name) if self._run and _is_number(number) and name in _QUESTIONS:
                return self._facts(name, request, int(number))
            case (name,) if not self._run and name in _QUESTIONS:
                return self._facts(name, request, None)
        raise RefusedError(404, "this page does not exist")

    def _news(self, run: LiveRun, known: str) -> Answer:
        news = run.news()
        if known == (etag := f'"{news.version}"'):
            return Answer(etag=etag)
        facts = news.as_json(run.store.url, run.rules) | {"title": self.title} | made()
        return as_json(facts, etag=etag)

    def _facts(self, name: str, request: HttpRequest, number: int | None) -> Answer:
        other = self._other(request)
        both = self._both(number, other)
        with self._checkpoints.opened(*both) as checkpoint:
            found = _QUESTIONS[name](checkpoint, request)
            if name == "summary.json" and self._run and number is not None:
                found["run"] = self._about_run(self._run, number, other)
        if isinstance(found, dict) and found.get("damaged") and self._both(number, other) != both:
            raise NotFoundError("this checkpoint was replaced while it was read; open the page again")
        return found if isinstance(found, Answer) else as_json(found)

    def _about_run(self, run: LiveRun, number: int, other: int | None) -> dict[str, Any]:
        """Return the facts of the run on the page of a step: a link back, and the steps to compare with."""
        steps = [step.number for step in run.news().steps if step.number != number]
        return {"title": self.title, "href": "../../", "steps": steps[::-1], "against": other}

    def _other(self, request: HttpRequest) -> int | None:
        """Return the step to compare with, if a request names one."""
        if not (text := request.parameters.get("against", "")):
            return None
        if not self._run or not _is_number(text):
            raise RefusedError(404, "the run has no such step to compare with")
        return int(text)

    def _both(self, number: int | None, other: int | None) -> tuple[Located, Located | None]:
        return self._locate(number), None if other is None else self._locate(other)

    def _locate(self, number: int | None = None) -> Located:
        if self._run and number is not None:
            return self._run.locate(number)
        store, name = store_at(self.path).parent()
        try:
            return str(self.path), require_identity(store, name)
        except FileNotFoundError:
            found = find(self.path)  # a path such as model, of files model-00001-of-00002.safetensors
            return found.path, found.manifest.digest


def _is_run(path: str) -> bool:
    """Tell whether a path is a run: a directory with steps, an empty directory, or a directory with the files of a run
    alone, whose job has not saved yet."""
    store = store_at(path)
    if is_checkpoint(store):
        return False
    try:
        return bool(steps_in(store)) or store.kinds().keys() <= {RUN_FILE, REMOVED_FILE}
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


_QUESTIONS: dict[str, Question] = {
    "summary.json": lambda checkpoint, _: checkpoint.summary(),
    "columns.json": lambda checkpoint, _: checkpoint.columns(),
    "changes.json": lambda checkpoint, _: checkpoint.changes(),
    "leaf.json": lambda checkpoint, asked: checkpoint.leaf(asked.parameters.get("path", ""), asked.has_gone),
}


def _shell(kind: str, title: str, up: str) -> Answer:
    """Return a page without data, for which its scripts ask."""
    text = asset("live.html").format(kind=kind, title=html.escape(title), up=up)
    return Answer(text.encode(), "text/html")


@cache
def _file(name: str) -> Answer:
    stem, _, suffix = name.rpartition(".")
    names = STYLES if suffix == "css" else (*SCRIPTS[stem], "live.js")
    body = joined_assets(names).encode()
    return Answer(body, _KINDS[suffix], etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"')
