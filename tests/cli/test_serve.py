"""`eformer serve`, as a program."""

import http.client
import json
import os
import re
import signal
import tempfile
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from eformer import checkpoint
from support.commands import run as command
from support.programs import start_command


@pytest.fixture
def saved(tmp_path):
    checkpoint.save({"w": np.arange(4.0)}, tmp_path / "run" / "step-1")
    return tmp_path / "run"


@contextmanager
def served(*arguments):
    """Start the program; return its process and the address that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (os.path.join(folder, name) for name in ("out", "err"))
        os.mkfifo(out)
        process = start_command("serve", *arguments, out=out, err=err, NO_COLOR="1")
        with open(out, encoding="utf-8") as output:
            try:
                yield Served(process, output, err), output.readline().strip()
            finally:
                process.kill()
                process.join(30)


class Served:
    def __init__(self, process, output, errors):
        self.process, self.output, self.errors = process, output, errors

    def ended(self, number):
        """Send a signal; return the exit code, and the rest of the output and of the errors."""
        os.kill(self.process.pid, number)
        self.process.join(30)
        with open(self.errors, encoding="utf-8") as errors:
            return self.process.exitcode, self.output.read(), errors.read()


def get(url, path=""):
    found = urlsplit(url)
    connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
    connection.request("GET", found.path + path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_an_address_with_a_token_answers_and_ends_at_once(saved, number):
    with served(saved) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url)
        assert get(url)[0] == 200
        assert json.loads(get(url, "run.json")[1])["steps"][0]["number"] == 1
        assert json.loads(get(url, "step/1/leaf.json?path=w")[1])["checked"] is True
        assert get(url.rpartition("/")[0][:-1], "/")[0] == 403
        assert process.ended(number) == (0, "", "Ctrl-C stops the server.\n")


def test_a_checkpoint_alone_is_served_at_the_port_that_was_asked_for(saved):
    with served(saved / "step-1") as (_, url):
        assert json.loads(get(url, "summary.json")[1])["leaves"] == 1
        taken = urlsplit(url).port
        message = command("serve", saved, "--port", taken, code=1).stderr
        assert message == f"error: cannot listen at 127.0.0.1, port {taken}: Address already in use\n"


def test_another_host_is_warned_of(saved):
    with served(saved, "--host", "0.0.0.0") as (process, url):
        assert url.startswith("http://0.0.0.0:")
        assert get(url.replace("0.0.0.0", "127.0.0.1"))[0] == 200
        warning = process.ended(signal.SIGTERM)[2].splitlines()[0]
    assert warning.startswith("warning: other machines can reach 0.0.0.0: the address below gives access to")


def test_addresses_without_their_last_slash_lead_to_those_with_it(saved):
    with served(saved) as (_, url):
        found = urlsplit(url)
        for path in (found.path, f"{found.path}step/1/"):
            connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
            connection.request("GET", path.removesuffix("/"))
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Location"], answer.read()) == (308, path, b"")
            connection.request("GET", path.removesuffix("/"), headers={"Host": "elsewhere.example"})
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Location"]) == (421, None)
            connection.close()
        assert get(url.rstrip("/")[:-1])[0] == 403


def test_two_servers_have_different_tokens(saved):
    with served(saved) as (_, one), served(saved) as (_, other):
        assert urlsplit(one).path != urlsplit(other).path
        assert get(one.replace(urlsplit(one).path, urlsplit(other).path))[0] == 403


def test_what_is_not_there_is_an_error_in_one_line(tmp_path):
    assert "no checkpoint at" in command("serve", tmp_path / "nothing", code=1).stderr


def test_nothing_is_written(saved):
    before = sorted(path.relative_to(saved) for path in saved.rglob("*"))
    with served(saved, "--keep", 1) as (_, url):
        for path in ("", "run.json", "step/1/", "step/1/summary.json", "step/1/leaf.json?path=w"):
            assert get(url, path)[0] == 200
    assert sorted(path.relative_to(saved) for path in saved.rglob("*")) == before
