"""Lines between processes: what strangers send to a door, and messages that are too long or never come."""

import os
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from eformer._engine.processes import hosts, lines
from eformer._engine.processes.lines import Door, DoorAddress, dial

LOOPBACK = "127.0.0.1"


def echo(line):
    while True:
        line.send(line.receive(100))


@pytest.fixture
def door():
    with Door(LOOPBACK, echo) as door:
        yield door


@pytest.fixture
def dialled():
    """Dial doors; the lines are closed at the end."""
    with ExitStack() as lines:
        yield lambda door: lines.enter_context(closing(dial(door.address)))


def answers(door):
    """Whether a process of the job is served."""
    line = dial(door.address)
    line.send(b"hello")
    answer = line.receive(100)
    line.close()
    return answer == b"hello"


def stranger(door, data):
    """Send bytes to the port; return everything that the door answers until it hangs up."""
    with socket.create_connection((LOOPBACK, door.address.port), 5) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1000), b""))
        except OSError:  # the door has hung up already
            return b""


def test_a_process_with_the_secret_is_served(door):
    assert answers(door)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64 + b"\xff" * 8, bytes(2**20)],
    ids=["nothing", "one byte", "http", "a wrong proof", "a wrong proof and a length", "a megabyte"],
)
def test_a_stranger_gets_a_greeting_alone(door, data):
    assert len(stranger(door, data)) <= len(b"eformer\1") + 32
    assert answers(door)


def test_random_bytes_never_open_a_door(door):
    for _ in range(200):
        assert len(stranger(door, os.urandom(64))) <= 40
    assert answers(door)


def test_a_wrong_secret_is_refused_by_both_ends(door):
    with pytest.raises(ConnectionError):
        dial(DoorAddress(LOOPBACK, door.address.port, "0" * 64))
    assert answers(door)


def test_a_door_that_does_not_know_the_secret_is_not_believed(door):
    with Door(LOOPBACK, echo) as other, pytest.raises(ConnectionError):
        dial(DoorAddress(LOOPBACK, other.address.port, door.address.secret))


@pytest.mark.parametrize("data", [b"", b"eformer\2" + b"\0" * 64, b"eformer\1" + b"\0" * 64])
def test_a_server_that_is_no_door_is_refused(monkeypatch, data):
    monkeypatch.setattr(lines, "GREETING_SECONDS", 0.3)
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(data)
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((ConnectionError, TimeoutError)):
            dial(DoorAddress(LOOPBACK, server.getsockname()[1], "0" * 64))
        thread.join()


def test_a_proof_is_not_good_for_another_line(door):
    """Bytes that were overheard on one line open no other."""
    with socket.create_connection((LOOPBACK, door.address.port)) as connection:
        greeting = connection.recv(40)
        own = os.urandom(32)
        said = own + lines._proof(door.address.secret, b"caller", greeting[8:] + own)
        connection.sendall(said)
        assert len(connection.recv(100)) == 32
    assert len(stranger(door, said)) <= 40


def test_strangers_that_say_nothing_do_not_keep_others_out(door, monkeypatch):
    monkeypatch.setattr(lines, "GREETING_SECONDS", 0.3)
    silent = [socket.create_connection((LOOPBACK, door.address.port)) for _ in range(lines.MOST_LINES)]
    until = time.monotonic() + 30
    while not _is_served(door):
        assert time.monotonic() < until
    for connection in silent:
        connection.close()


def _is_served(door):
    try:
        return answers(door)
    except OSError:
        return False


def test_a_message_is_never_longer_than_expected(door, dialled):
    line = dialled(door)
    line.send(bytes(101))
    with pytest.raises(OSError, match=r"closed|reset"):
        line.receive(100)
    line = dialled(door)
    line.send(bytes(100))
    with pytest.raises(OSError, match="a message of 100 bytes, expected at most 99"):
        line.receive(99)
    assert answers(door)


def test_a_message_that_never_ends_is_given_up(door, dialled):
    line = dialled(door)
    with pytest.raises(TimeoutError, match=r"has sent too little within 0\.2 s"):
        line.receive(10, 0.2)


def test_an_error_in_an_answer_ends_the_line_alone(dialled):
    def failing(line):
        raise ValueError(line.receive(10))

    with Door(LOOPBACK, failing) as door:
        for _ in range(3):
            line = dialled(door)
            line.send(b"x")
            with pytest.raises(ConnectionError):
                line.receive(10)


def test_a_closed_door_closes_its_lines(door, dialled):
    line = dialled(door)
    door.close()
    with pytest.raises(ConnectionError):
        line.receive(10)
    with pytest.raises(ConnectionError):
        dial(door.address)


def test_a_forked_child_leaves_the_port_to_its_parent(door, dialled):
    line = dialled(door)
    if (child := os.fork()) == 0:
        os._exit(0 if door._socket.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    line.send(b"still here")
    assert line.receive(100) == b"still here"


def test_the_address_is_that_by_which_the_coordinator_is_reached(monkeypatch):
    asked = []
    monkeypatch.setattr(hosts, "_outgoing", lambda host, port: asked.append(host) or "127.0.0.1")
    for coordinator in ("127.0.0.1:12", "localhost:12", "[::1]:12"):
        monkeypatch.setattr("jax._src.distributed.global_state.coordinator_address", coordinator)
        assert hosts.own_address() == "127.0.0.1"
    assert asked == ["127.0.0.1", "localhost", "::1"]


def test_a_machine_whose_own_name_is_a_loopback_address_takes_its_default_route(monkeypatch):
    found = {"node-0": "127.0.1.1", "192.0.2.1": "10.0.0.7"}
    monkeypatch.setattr(hosts, "_outgoing", lambda host, _: found[host])
    monkeypatch.setattr("jax._src.distributed.global_state.coordinator_address", "node-0:12")
    assert hosts.own_address() == "10.0.0.7"


def test_all_processes_of_a_host_have_its_id():
    assert hosts.host_id() == hosts.host_id() != ""
