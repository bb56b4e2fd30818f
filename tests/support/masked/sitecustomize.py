"""Hide the calls of Linux, as macOS or an old Linux would.

Every interpreter that starts with this directory on its PYTHONPATH imports this file, so the processes that a test
starts are masked, too. `EFORMER_MASK` says what to hide:

    linux    calls of newer kernels, of rarer C libraries and file systems, and /proc and control groups
    macos    all calls of Python that macOS lacks, too; and eformer sees `sys.platform == "darwin"` and `F_FULLFSYNC`

Calls of Python are gone for all modules, because the standard library asks for them as it is imported. The C library,
/proc and the platform are hidden from eformer alone: JAX is the build for Linux, and tests look at their own processes.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import functools
import mmap
import os
import resource
import select
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# Flags and calls that file systems and kernels may lack: the flags are 0 or absent, the calls are not there.
_RARE: dict[ModuleType, str] = {
    os: "O_PATH O_DIRECT O_TMPFILE O_NOATIME copy_file_range fdatasync posix_fallocate posix_fadvise memfd_create"
    " pidfd_open eventfd sched_getaffinity sched_setaffinity splice",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_POPULATE_READ MADV_DONTFORK MADV_REMOVE",
}
# Calls and flags that the Python of macOS lacks as well. preadv came with macOS 11.
_NOT_ON_MACOS: dict[ModuleType, str] = {
    os: "preadv pwritev RWF_DSYNC RWF_HIPRI RWF_NOWAIT RWF_SYNC RWF_APPEND O_RSYNC O_LARGEFILE getrandom"
    " getxattr setxattr listxattr removexattr pipe2 setresuid setresgid getresuid getresgid sched_getparam sched_setparam"
    " sched_getscheduler sched_setscheduler sched_rr_get_interval setns unshare P_PIDFD",
    fcntl: "F_SETLEASE F_GETLEASE F_NOTIFY F_SETSIG F_GETSIG",
    select: "epoll POLLRDHUP EPOLLIN EPOLLOUT",
    resource: "prlimit RUSAGE_THREAD",
    signal: "sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX",
    mmap: "MAP_STACK MAP_DENYWRITE MAP_EXECUTABLE",
}
_FULL_SYNC = 51  # F_FULLFSYNC of macOS

_HIDDEN = ("/proc/", "/sys/fs/cgroup")
# The modules between a call of eformer and the call of the system that it makes.
_BETWEEN = {
    "os",
    "io",
    "pathlib",
    "pathlib._local",
    "pathlib._abc",
    "pathlib._os",
    "genericpath",
    "posixpath",
    __name__,
}


def _remove(names: dict[ModuleType, str]) -> None:
    for module, each in names.items():
        for name in each.split():
            vars(module).pop(name, None)


def _is_for_eformer() -> bool:
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("eformer.")


def _is_hidden(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_HIDDEN)


def _hide_files() -> None:
    """Let eformer find nothing in /proc and no control groups."""
    stat = os.stat

    @functools.wraps(stat)
    def masked_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if _is_hidden(path) and _is_for_eformer():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return stat(path, *args, **kwargs)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        is_of_a_file = event in ("open", "os.chmod", "os.listdir", "os.scandir")
        if is_of_a_file and _is_hidden(arguments[0]) and _is_for_eformer():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])

    os.stat = masked_stat
    sys.addaudithook(audit)


def _refuse_flags() -> None:
    """Let pwritev take no flags, as before Linux 6.14."""
    pwritev = os.pwritev

    @functools.wraps(pwritev)
    def masked(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return pwritev(descriptor, buffers, offset)

    os.pwritev = masked


def _add_full_sync() -> None:
    """Add the call by which macOS empties the cache of the drive; here fsync does that."""
    real = fcntl.fcntl

    @functools.wraps(real)
    def masked(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command == _FULL_SYNC:
            return os.fsync(descriptor) or 0
        return real(descriptor, command, argument)

    fcntl.fcntl, fcntl.F_FULLFSYNC = masked, _FULL_SYNC


# ------------------------------------------------------------------------------ the modules of eformer


class _Changed(ModuleType):
    """A module as eformer sees it: some attributes are others."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        super().__init__(module.__name__)
        vars(self).update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)


def _no_library(name: str | None, *args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOENT, f"{name} is masked")


class _Loader(SourceFileLoader):
    """Gives modules of eformer another `sys` and `ctypes`."""

    changed: dict[str, Any]  # the arguments of _Changed, by module

    def exec_module(self, module: ModuleType) -> None:
        # An import asks for `__import__` among the builtins of its module.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        super().exec_module(module)

    def _import(self, name: str, *args: Any, **kwargs: Any) -> ModuleType:
        module = builtins.__import__(name, *args, **kwargs)
        return _Changed(module, **self.changed[name]) if name in self.changed else module


class _Finder:
    """Finds the modules of eformer for `_Loader`."""

    def __init__(self, **changed: Any) -> None:
        self._changed = changed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "eformer":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            loader = _Loader(spec.loader.name, spec.loader.path)
            loader.changed, spec.loader = self._changed, loader
        return spec


def _mask(kind: str) -> None:
    _remove(_RARE)
    if kind == "macos":
        _remove(_NOT_ON_MACOS)
        _add_full_sync()
    else:
        _refuse_flags()
    _hide_files()
    platform = {"sys": {"platform": "darwin"}} if kind == "macos" else {}
    sys.meta_path.insert(0, _Finder(ctypes={"CDLL": _no_library}, **platform))


if _kind := os.environ.get("EFORMER_MASK"):
    if _kind not in ("linux", "macos"):
        raise ValueError(f"EFORMER_MASK={_kind!r} is neither 'linux' nor 'macos'")
    _mask(_kind)
