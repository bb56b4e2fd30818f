"""Requests to one bucket, through obstore: each with a deadline, cancelled at once by Ctrl-C, with errors that say what
was asked of which URL. No secret gets into a message.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec import Struct

from eformer._engine.stores.probe import honours_conditions
from eformer._engine.stores.redact import Redactor
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import time_left, told
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import cancelled_with_others

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from eformer._engine.stores.base import Version

PART_BYTES = 16 * 2**20
_PARTS_AT_ONCE = 8
_AT_ONCE = 32  # small requests
_KEYS_A_DELETE = 1000

# In messages, which is all that obstore gives. The number alone may be one of a port or a key.
_PAST_END = re.compile(r"status code: 416\b|InMemory error: Invalid range|Wanted range starting at")
_SLOW = ("timed out", "TimedOut")


class Object(Struct, frozen=True):
    """An object as a server describes it: `modified` is the server's time."""

    key: str
    nbytes: int
    version: Version
    modified: dt.datetime


class Objects:
    """The objects of one bucket. Safe to use from any thread, but not in a process that was forked after its use.

    url          the bucket, for messages
    timeout      seconds that a request may take, with all its retries
    hide         takes secrets out of messages
    is_trusted   whether the server is known to honour conditions; others are probed before the first save
    is_alone     whether the caller says that nobody else saves here at the same time; then a server need not honour
                 conditions
    server       tells the bucket from others of the same URL
    """

    def __init__(
        self,
        client: Any,
        url: str,
        timeout: float = 300.0,
        *,
        hide: Redactor | None = None,
        is_trusted: bool = True,
        is_alone: bool = False,
        server: str = "",
    ) -> None:
        self.server = server
        self.url, self._client, self._timeout = url, client, timeout
        self._hide = hide or Redactor()
        self.is_unconditional = is_alone and not is_trusted
        self._has_conditions: bool | None = True if is_trusted else None  # None: not known yet
        self._probing = Lock()
        self._unquoted = False  # whether the server compares ETags without their quotes

    def __repr__(self) -> str:
        return f"<objects of {self.url}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it may hold secrets; pass the URL")

    # ---------------------------------------------------------------------------------------- read

    def read(
        self,
        key: str,
        start: int = 0,
        nbytes: int | None = None,
        version: Version | None = None,
    ) -> tuple[Any, Object]:
        """Read a range of an object, to its end at most. Raise FileNotFoundError if it is gone, or not this version."""

        async def work() -> tuple[Any, Object]:
            import obstore

            options: Any = {}
            if nbytes:
                options["range"] = (start, start + nbytes)
            elif start:
                options["range"] = {"offset": start}
            if version:
                options["if_match"] = _etag(version)
            found = await obstore.get_async(self._client, key, options=options)
            return await found.bytes_async(), _object(found.meta)

        if nbytes == 0:
            return b"", self.head(key)
        try:
            return cast("tuple[Any, Object]", self._request("read", key, work))
        except _RefusedError:
            raise FileNotFoundError(f"{self.path_to(key)} was replaced") from None
        except _PastEndError:
            found = self.head(key)
        if found.nbytes > start:  # it was replaced by a longer one since
            return cast("tuple[Any, Object]", self._request("read", key, work))
        return b"", found

    def head(self, key: str) -> Object:
        async def work() -> Object:
            import obstore

            return _object(await obstore.head_async(self._client, key))

        return cast("Object", self._request("look up", key, work))

    def find(self, key: str) -> Object | None:
        try:
            return self.head(key)
        except FileNotFoundError:
            return None

    def list(self, below: str) -> Iterator[Object]:
        """List all objects whose keys begin with `below`, a directory."""

        async def work() -> list[Object]:
            import obstore

            found = [part async for part in obstore.list(self._client, below)]
            return [_object(meta) for part in found for meta in part]

        yield from self._request("list", below, work)

    def children(self, below: str) -> tuple[Sequence[str], Sequence[Object]]:
        """List one level: the names of directories, and the objects."""

        async def work() -> tuple[Sequence[str], Sequence[Object]]:
            import obstore

            found = await obstore.list_with_delimiter_async(self._client, below)
            names = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
            return names, [_object(meta) for meta in found["objects"]]

        return cast("tuple[Sequence[str], Sequence[Object]]", self._request("list", below, work))

    # --------------------------------------------------------------------------------------- write

    def put(self, key: str, data: Any) -> None:
        """Write a small object, or replace it."""
        self._request("write", key, lambda: self._put(key, data, use_multipart=False))

    def write(self, key: str, data: bytes) -> None:
        """Write an object of any length, or replace it."""
        if len(data) <= PART_BYTES:
            self.put(key, data)
        else:
            self.stream(key, [data]).wait()

    def put_all(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write many small objects."""

        async def work() -> None:
            slots = asyncio.Semaphore(_AT_ONCE)

            async def one(key: str, data: bytes) -> None:
                async with slots:
                    await self._put(key, data, use_multipart=False)

            await asyncio.gather(*(one(key, data) for key, data in files))

        if files:
            self._request("write", files[0][0], work)

    def stream(self, key: str, chunks: Iterable[Any]) -> Stream:
        """Write a large object from pieces of memory, in their order, some of them at once.

        Nobody sees it before the last piece is there. The memory is not copied, and used until it is sent. The pieces
        are asked for in a thread of its own: in the threads of obstore they would hold up other requests.
        """

        began = time.monotonic()

        def send(pieces: Iterator[Any]) -> None:
            import obstore

            try:
                obstore.put(self._client, key, pieces, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
            except Exception as error:  # noqa: BLE001  all of them are explained
                raise self._explained(error, "upload", key, began) from None

        _check_process()
        return Stream(send, chunks, lambda: self._slow("upload", key, began))

    async def _put(self, key: str, data: Any, **how: Any) -> None:
        import obstore

        await obstore.put_async(self._client, key, data, **how)

    def require_conditions(self, unused_key: str) -> None:
        """Raise ValueError if saves could overwrite each other here. The server is asked once."""
        if self.is_unconditional:
            return
        with self._probing:
            if self._has_conditions is None:
                self._has_conditions = honours_conditions(self, unused_key)
        if not self._has_conditions:
            raise ValueError(
                f"{self.url}: the server ignores the conditions of requests, so two saves could damage each other; "
                "if nobody else saves here at the same time, give the store option single_writer=True"
            )

    def swap(self, key: str, data: bytes, expected: Version | None) -> bool:
        """Replace an object if it is still the version that is expected; None: if there is none.

        Return False if it is not. An error leaves it open whether the object was replaced.
        """
        if not self.is_unconditional:
            return self.put_if(key, data, expected)
        found = self.find(key)
        if (found.version if found else None) != expected:
            return False
        self.put(key, data)
        if bytes(self.read(key)[0]) != data:
            raise OSError(f"{self.path_to(key)} is not what was written: somebody else saves here, too")
        return True

    def put_if(self, key: str, data: bytes, expected: Version | None) -> bool:
        """Write an object on the condition of a version. Return False if the server refused."""
        mode: Any = "create" if expected is None else _update(expected, unquoted=self._unquoted)
        try:
            self._request("write", key, lambda: self._put(key, data, mode=mode, use_multipart=False))
        except _RefusedError:
            return False
        return True

    def use_unquoted_etags(self) -> bool:
        """Compare ETags without quotes from now on, as Ceph wants it. Return False if that was so already."""
        was, self._unquoted = self._unquoted, True
        return not was

    def copy(self, key: str, final: str) -> None:
        async def work() -> None:
            import obstore

            await obstore.copy_async(self._client, key, final)

        self._request("copy", key, work)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, if they are there."""
        doomed = sorted(keys)
        for start in range(0, len(doomed), _KEYS_A_DELETE):
            some = doomed[start : start + _KEYS_A_DELETE]
            try:
                self._request("delete", some[0], lambda some=some: self._delete(some))  # type: ignore[misc]
            except FileNotFoundError:  # Google's and Azure's raise for the first that is gone
                for key in some:
                    self._delete_one(key)

    async def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        await obstore.delete_async(self._client, keys)

    def _delete_one(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self._request("delete", key, lambda: self._delete([key]))

    # ------------------------------------------------------------------------------------- requests

    def path_to(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _request(self, operation: str, key: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Carry out a request in the thread of the event loop, and wait for it."""
        began, limit = time.monotonic(), time_left(self._timeout)
        if limit == 0:
            raise self._slow(operation, key, began)
        future = _submit(work)
        try:
            with cancelled_with_others(future.cancel):
                return interrupts.result_of(future, limit)
        except FutureTimeoutError:
            future.cancel()
            raise self._slow(operation, key, began) from None
        except CancelledError:
            raise InterruptedError(f"{self.path_to(key)}: the {operation} was given up") from None
        except BaseException as error:
            future.cancel()
            raised = self._explained(error, operation, key, began)
            if raised is error:
                raise
            raise raised from None

    def _slow(self, operation: str, key: str, began: float) -> TimeoutError:
        took, why = time.monotonic() - began, told()
        over = f"; {why} is over" if why else ""
        return TimeoutError(
            f"{self.path_to(key)}: the server has not answered a request to {_to(operation)} for {took:.1f} s{over}"
        )

    def _explained(self, error: BaseException, operation: str, key: str, began: float) -> BaseException:
        """Return an error of this package, or a built-in one, for one of obstore's."""
        from obstore import exceptions

        text, where = self._hide(str(error).partition("\n\nDebug source")[0]), self.path_to(key)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"{where} does not exist")
        if isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
            return _RefusedError(where)
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            return PermissionError(f"{where}: the server refuses to {_to(operation)}: {text}")
        if isinstance(error, exceptions.BaseError):
            if operation == "read" and _PAST_END.search(text):
                return _PastEndError(where)
            if any(sign in str(error) for sign in _SLOW):
                return self._slow(operation, key, began)
            took = time.monotonic() - began
            return OSError(f"{where}: to {_to(operation)} failed after {took:.1f} s: {text}")
        return error


def _to(operation: str) -> str:
    return "look it up" if operation == "look up" else f"{operation} it"


class Stream:
    """An object on its way, sent by a thread of its own."""

    def __init__(
        self, send: Callable[[Iterator[Any]], None], chunks: Iterable[Any], slow: Callable[[], TimeoutError]
    ) -> None:
        self._future: Future[None] = Future()
        self._slow = slow
        threading.Thread(
            target=self._carry_out, args=(send, self._checked(chunks)), name="eformer-upload", daemon=True
        ).start()

    def _carry_out(self, send: Callable[[Iterator[Any]], None], chunks: Iterator[Any]) -> None:
        error: BaseException | None = None
        try:
            send(chunks)
        except BaseException as raised:  # noqa: BLE001  raised by who waits
            error = raised
        with suppress(InvalidStateError):  # cancelled
            if error:
                self._future.set_exception(error)
            else:
                self._future.set_result(None)

    def _checked(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """Yield the pieces, and raise if the upload is cancelled: then nothing appears."""
        for chunk in chunks:
            if self._future.cancelled():
                break
            yield chunk
        if self._future.cancelled():
            raise InterruptedError("the upload was given up")

    def wait(self) -> None:
        """Return when the object is there."""
        with cancelled_with_others(self.cancel):
            try:
                interrupts.result_of(self._future, time_left())
            except FutureTimeoutError:
                if self._future.done():  # the error is that of the upload
                    raise
                self.cancel()
                raise self._slow() from None
            except CancelledError:
                raise InterruptedError("the upload was given up") from None
            except BaseException:
                self.cancel()
                raise

    def on_end(self, call: Callable[[], object]) -> None:
        self._future.add_done_callback(lambda _: call())

    def raise_error(self) -> None:
        """Raise the error of an upload that has failed already."""
        if self._future.done():
            self.wait()

    def cancel(self) -> None:
        self._future.cancel()


class _RefusedError(Exception):
    """The condition of a request does not hold."""


class _PastEndError(Exception):
    """A range begins behind the end of the object."""


# ------------------------------------------------------------------------------------------ the loop


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="eformer-requests", daemon=True)
        self.thread.start()


@cache
def _loop() -> _Loop:
    return _Loop()


def _check_process() -> _Loop:
    loop = _loop()
    if loop.pid != os.getpid():
        raise RuntimeError(
            "this process was forked from one that had used a bucket, and obstore does not survive that; start "
            "processes by 'spawn' or 'forkserver', or use buckets in the children only"
        )
    return loop


def is_thread_of_requests() -> bool:
    """Tell whether this is the thread of the event loop: it gets here if it collects garbage."""
    return threading.current_thread() is _check_process().thread


def _submit(work: Callable[[], Awaitable[Any]]) -> Future[Any]:
    async def awaited() -> Any:
        return await work()

    if is_thread_of_requests():
        raise RuntimeError(
            "a request was made in the thread that carries out requests, which would wait for itself"
        )
    return asyncio.run_coroutine_threadsafe(awaited(), _check_process().loop)


# ------------------------------------------------------------------------------------------ versions


def _object(meta: Any) -> Object:
    version = "\n".join((meta.get("e_tag") or "", meta.get("version") or ""))
    return Object(meta["path"], meta["size"], version, meta["last_modified"])


def _etag(version: Version) -> str:
    return version.partition("\n")[0]


def _update(version: Version, *, unquoted: bool) -> dict[str, str]:
    """Return the condition that an object is still of this version."""
    etag, _, number = version.partition("\n")
    found = {"e_tag": etag.strip('"') if unquoted else etag, "version": number}
    return {name: value for name, value in found.items() if value}
