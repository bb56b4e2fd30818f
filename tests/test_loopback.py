"""The guard that keeps tests on this machine: what leaves it is refused, noted, and makes the tests fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
METADATA = "169.254.169.254"

BEGIN = "import sys; from support import loopback; loopback.keep()\n"
END = "\nprint(*sorted(loopback.asked_for()), sep='\\n')"

PYTHON = f"""
import socket
for connect in (socket.socket.connect, socket.socket.connect_ex):
    for address in ("{METADATA}", "8.8.8.8"):
        try:
            connect(socket.socket(), (address, 80))
        except PermissionError as error:
            assert "tests stay on loopback" in str(error), error
        else:
            sys.exit("it was not refused")
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
"""

OBSTORE = """
import obstore
from obstore.store import AzureStore, GCSStore, S3Store
try:
    obstore.put({store}, "key", b"1")
except obstore.exceptions.BaseError as error:
    assert "{why}" in str(error), error
else:
    sys.exit("it was not refused")
"""
ONCE = 'retry_config={"max_retries": 0}'
CLIENTS = {
    "s3": (f'S3Store("bucket", region="us-east-1", {ONCE})', "403"),
    "azure": (f'AzureStore("container", account_name="account", {ONCE})', "403"),
    "google": (f'GCSStore("bucket", skip_signature=True, {ONCE})', "127.0.0.1:1"),  # is told to ask there
}

SUBPROCESS = f"""
import subprocess
code = "import urllib.request as r; r.urlopen('http://{METADATA}/latest/meta-data', timeout=5)"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
assert "403" in done.stderr, done.stderr
"""


def guarded(code):
    """Run code in a process that has a guard of its own; return what it has noted."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_"))
    }
    environment.pop("EFORMER_TESTS_PROXY", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code + END],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sockets_of_python_are_refused_and_noted():
    assert guarded(PYTHON).split() == [METADATA, "8.8.8.8"]


@pytest.mark.parametrize("cloud", CLIENTS)
def test_a_cloud_client_without_credentials_is_refused_and_noted(cloud):
    store, why = CLIENTS[cloud]
    noted = guarded(OBSTORE.format(store=store, why=why))
    assert (METADATA in noted) == (cloud != "google")


def test_programs_that_tests_start_are_refused_and_noted():
    assert METADATA in guarded(SUBPROCESS)


def test_what_stays_here_is_not_noted():
    assert guarded("").strip() == ""


def test_tests_that_leave_this_machine_fail(tmp_path):
    (tmp_path / "test_away.py").write_text(
        "import socket\n"
        "def test_away():\n"
        "    try: socket.socket().connect(('8.8.8.8', 80))\n"
        "    except OSError: pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)],
        capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert "1 passed" in done.stdout
    assert "These tests left this machine, or tried to: ['8.8.8.8']" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
