"""HTTP as it is spoken with browsers and with anything else that connects: limits, headers, and what is refused."""

import gzip
import http.client
import json
import logging
import socket
import threading
import time
from contextlib import suppress

import pytest

from eformer._engine.pages import server as http_server
from eformer._engine.pages.requests import Answer, RefusedError
from eformer._engine.pages.server import Server

TOKEN = "s3cret"


def echo(request):
    """Answer with what was asked for."""
    if request.parts == ("fail",):
        raise RuntimeError("a mistake")
    if request.parts == ("refuse",):
        raise RefusedError(404, "there is no such page")
    body = json.dumps([request.parts, dict(request.parameters)]).encode()
    return Answer(body, etag='"1"' if request.parts == ("tagged",) else "")


def started(answer):
    server = Server("127.0.0.1", 0, TOKEN, answer)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture
def server():
    with started(echo) as server:
        yield server
        server.shutdown()


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_every_answer_has_the_headers_that_keep_it_in_its_page(server):
    for path in (f"/{TOKEN}/a", "/wrong/"):
        answer, _ = get(server, path)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Server" not in answer.headers


def test_a_large_answer_is_compressed_for_clients_that_take_it():
    with started(lambda _: Answer(b"columns" * 10**5)) as server:
        answer, body = get(server, f"/{TOKEN}/a", Accept_Encoding="gzip, br")
        assert (answer.headers["Content-Encoding"], gzip.decompress(body)) == ("gzip", b"columns" * 10**5)
        answer, body = get(server, f"/{TOKEN}/a")
        assert (answer.headers["Content-Encoding"], body) == (None, b"columns" * 10**5)
        server.shutdown()


def test_head_has_the_headers_of_get_and_no_body(server):
    whole, body = get(server, f"/{TOKEN}/a")
    head, nothing = get(server, f"/{TOKEN}/a", "HEAD")
    assert (head.status, head.headers["Content-Length"], nothing) == (200, str(len(body)), b"")
    assert whole.headers.keys() == head.headers.keys()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_every_method_but_get_and_head_is_refused(server, method):
    answer, body = get(server, f"/{TOKEN}/", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert json.loads(body)["error"] == "only GET and HEAD are answered"


def test_an_answer_that_the_client_has_is_not_sent_again(server):
    answer, _ = get(server, f"/{TOKEN}/tagged")
    again, body = get(server, f"/{TOKEN}/tagged", If_None_Match=answer.headers["ETag"])
    assert (again.status, body) == (304, b"")


def test_a_mistake_in_an_answer_is_an_error_without_details_and_the_next_is_answered(server, caplog):
    answer, body = get(server, f"/{TOKEN}/fail")
    assert answer.status == 500
    assert b"a mistake" not in body
    assert "a mistake" in caplog.text
    assert get(server, f"/{TOKEN}/a")[0].status == 200


def test_what_is_refused_is_json_with_its_reason(server):
    answer, body = get(server, f"/{TOKEN}/refuse")
    assert (answer.status, json.loads(body)) == (404, {"error": "there is no such page"})
    assert get(server, "/")[0].status == 403
    assert get(server, f"/{TOKEN}/", Host="evil.example")[0].status == 421


def test_several_requests_share_a_connection(server):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    for name in "abc":
        connection.request("GET", f"/{TOKEN}/{name}")
        assert json.loads(connection.getresponse().read())[0] == [name]
    connection.close()


def spoken(server, data):
    """Send bytes; return everything that comes back until the server closes the connection."""
    with socket.create_connection(server.server_address, timeout=10) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it closes before it has read everything
            connection.sendall(data)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 2**20 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 2000 + b"\r\n", 431),
        (b"GET /s3cret/../../etc/passwd HTTP/1.1\r\nHost: evil\r\n\r\n", 421),
    ],
)
def test_what_is_not_a_request_or_too_long_is_refused_and_the_connection_closed(server, data, status):
    assert spoken(server, data).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_client_that_sends_slowly_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    with started(echo) as server, socket.create_connection(server.server_address, timeout=10) as connection:
        for byte in b"GET / HTTP/1.1\r\n":  # each in time, but not all together
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert connection.recv(100) == b""
        server.shutdown()


def test_more_connections_than_allowed_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    with started(echo) as server:
        idle = [socket.create_connection(server.server_address, timeout=10) for _ in range(2)]
        assert spoken(server, b"") == b""
        for one in idle:
            one.close()
        server.shutdown()


def test_a_client_that_goes_is_seen_by_what_works_for_it(monkeypatch):
    has_begun, seen = threading.Event(), threading.Event()

    def slow(request):
        has_begun.set()
        while not request.has_gone():
            time.sleep(0.005)
        seen.set()
        return Answer()

    with started(slow) as server:
        connection = socket.create_connection(server.server_address, timeout=10)
        connection.sendall(f"GET /{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.site.port}\r\n\r\n".encode())
        assert has_begun.wait(10)
        assert not seen.is_set()
        connection.close()
        assert seen.wait(10)
        server.shutdown()


def test_the_token_is_not_logged(server, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        get(server, f"/{TOKEN}/a")
        get(server, f"/{TOKEN}/fail")
        spoken(server, f"GET /{TOKEN}/ HTTP/9.9\r\n\r\n".encode())
    captured = capfd.readouterr()
    assert TOKEN not in caplog.text + captured.out + captured.err


def test_an_address_that_cannot_be_listened_at_is_an_error(server):
    port = server.server_address[1]
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
        Server("127.0.0.1", port, TOKEN, echo)
    with pytest.raises(OSError, match=r"cannot listen at 192.0.2.1, port 0: Cannot assign"):
        Server("192.0.2.1", 0, TOKEN, echo)
