"""Servers that ignore the conditions of requests: they are found, and refused for saving."""

import itertools

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores import leases
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import SaveOptions, load, save
from support.object_server import credentials, serving

numbers = itertools.count()


@pytest.fixture
def url():
    return f"s3://bucket-{next(numbers)}/run"  # a client of its own


@pytest.fixture
def careless(url):
    with (
        serving(honours_conditions=False) as server,
        checkpoint.store_options(url, endpoint=server.url, **credentials()),
    ):
        yield server


def puts(server):
    return [path for command, path, _ in server.requests if command == "PUT"]


def test_a_server_that_ignores_conditions_is_refused_for_saving(careless, url):
    with pytest.raises(ValueError, match=rf"{url[:11]}.*ignores the conditions.*single_writer=True"):
        save({"w": np.ones(3)}, url)
    assert not careless.objects


@pytest.mark.parametrize("ignored", ["if-none-match", "if-match"])
def test_each_of_the_two_conditions_is_needed(url, ignored):
    with serving() as server:

        class Careless(server.RequestHandlerClass):
            def put(self):
                del self.headers[ignored]
                super().put()

        server.RequestHandlerClass = Careless
        options = credentials() | {"endpoint": server.url}
        with pytest.raises(ValueError, match="single_writer=True"):
            save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
        assert not server.objects


def test_nothing_is_replaced_by_a_save_that_is_refused(careless, url):
    with checkpoint.store_options(url, single_writer=True):
        save({"w": np.ones(3)}, url)
    before = dict(careless.objects)
    for _ in range(2):
        with pytest.raises(ValueError, match="single_writer"):
            save({"w": np.zeros(3)}, url)
    assert careless.objects == before
    assert load(url)["w"].tolist() == [1, 1, 1]  # reading needs no conditions


def test_a_server_that_does_not_know_conditions_is_refused_too(url):
    """Some answer 501 to them, and take all else."""
    with serving() as server:

        class Strict(server.RequestHandlerClass):
            def put(self):
                if self.headers.get("if-none-match") or self.headers.get("if-match"):
                    self.answer(501)
                else:
                    super().put()

        server.RequestHandlerClass = Strict
        options = credentials() | {"endpoint": server.url, "retries": 0}
        with pytest.raises(ValueError, match="single_writer=True"):
            save({"w": np.ones(3)}, url, options=SaveOptions(store_options=options))
        assert not server.objects


def test_a_single_writer_saves_with_plain_puts(careless, url):
    with checkpoint.store_options(url, single_writer=True):
        for number in range(3):
            save({"w": np.full(3, number)}, url, prefix="a")
            save({"v": np.full(3, -number)}, url, prefix="b")
        assert load(url, prefix="a")["w"].tolist() == [2, 2, 2]
        assert checkpoint.verify(url).ok
    conditional = [
        command
        for command, _, headers in careless.requests
        if {"if-none-match", "if-match"} & {name.lower() for name in headers}
    ]
    assert "PUT" not in conditional


def test_a_single_writer_removes_what_it_replaced_and_nothing_else(careless, url, monkeypatch):
    monkeypatch.setattr(leases, "LEASE", -1e9)
    stranger = "run/.eformer-leases/9999999999999999", "run/model.9999999999999999.safetensors"
    with checkpoint.store_options(url, single_writer=True):
        save({"w": np.full(3, 0)}, url)
        for key in stranger:
            careless.objects[key] = b"{}"
        for number in range(1, 4):
            save({"w": np.full(3, number)}, url)
        assert load(url)["w"].tolist() == [3, 3, 3]
    data = [key for key in careless.objects if key.endswith(".safetensors") and key not in stranger]
    assert len(data) <= 2  # that of the last save, and what it has replaced
    assert set(stranger) <= set(careless.objects)


def test_a_server_that_honours_conditions_is_asked_once_and_nothing_is_left(url):
    with serving() as server, checkpoint.store_options(url, endpoint=server.url, **credentials()):
        save({"w": np.ones(3)}, url)
        first = len(puts(server))
        save({"w": np.zeros(3)}, url)
        assert len(puts(server)) - first < first
        assert not [key for key in server.objects if leases.LEASES in key and b"1" in server.objects[key]]
        assert checkpoint.verify(url).ok


def test_reading_asks_nothing(careless, url):
    with pytest.raises(FileNotFoundError):
        load(url)
    assert not puts(careless)


def test_a_server_that_cannot_be_written_to_is_an_error_of_its_own(url):
    with serving() as server:
        server.refuse_with = 403, b"<Error><Code>AccessDenied</Code></Error>"
        with checkpoint.store_options(url, endpoint=server.url, **credentials()):
            with pytest.raises(OSError, match=rf"{url}.*AccessDenied"):
                store_at(url).begin(save_id="0123456789abcdef")
            server.refuse_with = None
            save({"w": np.ones(3)}, url)  # and it is asked again
