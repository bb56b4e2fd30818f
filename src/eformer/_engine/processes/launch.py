"""Find the processes that a launcher has started for one command, and connect them by JAX's own runtime.

jax is imported only if there are several. Slurm steps, Open MPI, Indexed Jobs of Kubernetes and pods of TPUs are found
by the variables that `jax.distributed.initialize` reads; any other launcher passes `--coordinator` and `--process`.

Tests: tests/engine/processes/test_launch.py, tests/multihost/test_crew.py.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.processes.coordination import Board, BoardOfSeveral, Hosts, Together
from eformer._engine.processes.crew import Crew
from eformer._engine.record.division import Portion, parse_part
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

START_TIMEOUT = "EFORMER_START_TIMEOUT"  # a variable: seconds until all processes have come
_SECONDS_TO_START = 300
_NEVER = 7 * 24 * 3600  # seconds
_SECONDS_TO_MEET = 7 * 24 * 3600.0  # a process that has died is noticed much earlier
ALONE = "pass --process 0/1 to run this process alone"


class Launch(Struct, frozen=True):
    """A process that a launcher has started: its part, the launcher, and the address of the first process; "" leaves
    the address to JAX."""

    part: Portion
    launcher: str
    coordinator: str = ""


class LaunchedCrew(Crew):
    """The processes of a launcher, by the coordination service of JAX."""

    def __init__(self, client: Any, part: Portion) -> None:
        self.number, self.count = part.number, part.count
        self._client, self._begun = client, 0

    def hosts(self, doing: str) -> Hosts:
        return Together(self._client, tuple(range(self.count)), self.number, doing, _SECONDS_TO_MEET)

    def board(self, place: str) -> Board:
        return BoardOfSeveral(self._client, place, self.number, self.count)

    def begin(self) -> int:
        self._begun += 1
        return self._begun


def crew_of(coordinator: str | None = None, process: str | None = None) -> Crew:
    """Return the processes of this command: those of a launcher, or this process alone. Blocks until all have come.

    `coordinator` is HOST:PORT of the first process, `process` is I/N. Raise ValueError for variables or arguments that
    are wrong or contradict each other, ProcessError if the other processes do not come.
    """
    launch = find_launch(os.environ, coordinator, process)
    return Crew() if launch is None else _connect(launch)


def find_launch(
    environ: Mapping[str, str], coordinator: str | None = None, process: str | None = None
) -> Launch | None:
    """Return the launch of this process; None for a process alone."""
    part = None if process is None else parse_part(process, "--process ")
    if coordinator is not None:
        _check_address(coordinator)
    if part is not None and part.count == 1:
        return None
    found = _found(environ) if part is None else Launch(part, "this command", coordinator or "")
    if part is not None and coordinator is None and _found(environ) is None:
        raise ValueError(
            f"--process {process} needs --coordinator HOST:PORT, the address of process 0 and a free port there"
        )
    if found is None:
        if coordinator is not None:
            raise ValueError(f"--coordinator {coordinator} needs --process I/N, such as 3/16")
        return None
    return found if coordinator is None else Launch(found.part, found.launcher, coordinator)


def _check_address(text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator {text!r}: expected HOST:PORT, such as node-0:8476")


# ------------------------------------------------------------------------------------------- launchers


def _found(environ: Mapping[str, str]) -> Launch | None:
    """Recognise a launcher by its variables. The shell of a Slurm job is no step, and a step of one task is alone."""
    for find in (_slurm, _open_mpi, _tpu, _kubernetes):
        launch = find(environ)
        if launch is not None and launch.part.count > 1:
            return launch
    return None


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    part = _part(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if part.count > 1:
        _number(environ, "SLURM_JOB_ID", 0)
        _require(environ, "SLURM_STEP_NODELIST", r"[\w.,\[\]-]+", "a list of nodes such as node[01-04]")
    return Launch(part, "Slurm")


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    return Launch(_part(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "Open MPI")


def _tpu(environ: Mapping[str, str]) -> Launch | None:
    """A pod of TPUs names its workers in every worker; several slices have the same number of workers each."""
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    workers = [name for name in names.split(",") if name]
    if not workers or "TPU_WORKER_ID" not in environ:
        return None
    worker = _number(environ, "TPU_WORKER_ID", 0, len(workers))
    slices = _number(environ, "MEGASCALE_NUM_SLICES", 1) if environ.get("MEGASCALE_NUM_SLICES") else 1
    at = _number(environ, "MEGASCALE_SLICE_ID", 0, slices) if slices > 1 else 0
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]
    host = first.rpartition(":")[0] or first
    return Launch(Portion(at * len(workers) + worker, slices * len(workers)), "TPU", f"{host}:8482")


def _kubernetes(environ: Mapping[str, str]) -> Launch | None:
    """An Indexed Job tells a pod its index alone: JAX asks Kubernetes for the rest, by the package `kubernetes`.
    Without it, the pods are independent, as in an array."""
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environ) or not find_spec("kubernetes"):
        return None
    number = _number(environ, "JOB_COMPLETION_INDEX", 0)
    count = _pods_of_job()
    if number >= count:
        raise ValueError(
            f"JOB_COMPLETION_INDEX={number}: expected less than the parallelism of the Job, {count}"
        )
    return Launch(Portion(number, count), "Kubernetes")


def _pods_of_job() -> int:
    from jax._src.clusters.k8s_cluster import K8sCluster  # noqa: TID251  JAX has no public name for it

    return int(K8sCluster.get_process_count())


def _part(environ: Mapping[str, str], number: str, count: str) -> Portion:
    processes = _number(environ, count, 1)
    return Portion(_number(environ, number, 0, processes), processes)


def _number(environ: Mapping[str, str], name: str, least: int, below: int = 2**31) -> int:
    """Return a variable as a number. Raise ValueError if it is missing or out of range."""
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) < below:
        bound = f"from {least} to {below - 1}" if below < 2**31 else f"of at least {least}"
        state = f"{name}={text!r}" if name in environ else f"{name} is not set"
        raise ValueError(f"{state}: expected a number {bound} from the launcher; correct it, or {ALONE}")
    return int(text)


def _require(environ: Mapping[str, str], name: str, form: str, expected: str) -> None:
    text = environ.get(name, "")
    if not re.fullmatch(form, text):
        state = f"{name}={text!r}" if name in environ else f"{name} is not set"
        raise ValueError(
            f"{state}: expected {expected} from the launcher; pass --coordinator HOST:PORT, or {ALONE}"
        )


# --------------------------------------------------------------------------------------------- connect


def _connect(launch: Launch) -> Crew:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a tool needs no accelerator, which a training job may use
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else the service logs each connection
    seconds = _number(os.environ, START_TIMEOUT, 1) if START_TIMEOUT in os.environ else _SECONDS_TO_START
    try:
        address = launch.coordinator or _address_of(launch, seconds)
        return LaunchedCrew(_joined(address, launch.part, seconds), launch.part)
    except Exception as error:
        raise ProcessError(
            f"process {launch.part} of {launch.launcher} could not reach the others: {_first_line(error)}. Start "
            f"all {launch.part.count} processes with the same command, pass --coordinator HOST:PORT of process 0, or "
            f"{ALONE}"
        ) from error


def _address_of(launch: Launch, seconds: int) -> str:
    """Ask JAX for the address of the first process."""
    from jax._src import clusters  # noqa: TID251  JAX has no public name for it

    part = launch.part
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, part.count, part.number, [0], None, seconds
    )
    if found[0] is None:
        raise ProcessError("JAX does not find the address of process 0")
    return str(found[0])


def _joined(address: str, part: Portion, seconds: int) -> Any:
    """Start JAX's coordination service in the first process, and connect to it.

    `jax.distributed.initialize` would also start devices, and end this process when any other one dies: here, only the
    death of the first process does that.
    """
    from jaxlib import _jax  # noqa: TID251  JAX has no public name for the service without its devices

    port = address.rpartition(":")[2]
    if part.is_first:
        with _without_warnings():
            _Service.running = _jax.get_distributed_runtime_service(
                f"[::]:{port}",
                part.count,
                cluster_register_timeout=_NEVER,
                shutdown_timeout=1,
                recoverable=True,
            )
    client = _jax.get_distributed_runtime_client(
        address,
        part.number,
        init_timeout=_NEVER,
        shutdown_timeout=1,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    _connect_within(client.connect, seconds)
    return client


class _Service:
    running: Any = None  # kept, because the service ends with its last reference


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Discard standard error: JAX warns that recovery is an experiment, whatever its log level."""
    there = os.dup(2)
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(there, 2)
        os.close(there)


def _connect_within(connect: Callable[[], Any], seconds: int) -> None:
    """Connect in a thread: JAX ends the program if the processes do not come within its own limit."""
    errors: list[Exception] = []

    def call() -> None:
        try:
            connect()
        except Exception as error:  # noqa: BLE001  raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="eformer-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise ProcessError(f"after {seconds} s not all of them have come")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
