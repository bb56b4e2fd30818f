"""Requests to one bucket, through obstore. Each has a deadline and is cancelled by Ctrl-C. Errors name the operation
and the URL, and never hold a secret.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import re
import threading
import time
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from msgspec import Struct

from eformer._engine.stores.answers import has_no_credentials, in_words, is_no_bucket, known_error
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.redact import Redactor
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import time_left, told
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import cancelled_with_others

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from eformer._engine.stores.base import Version

T = TypeVar("T")

PART_BYTES = 16 * 2**20
_PARTS_AT_ONCE = 8
_AT_ONCE = 32  # small requests
_KEYS_A_DELETE = 1000
_MOST_READS = 8  # reads of an object that is replaced all the time
_MOST_SWAPS = 8  # tries to replace an object, while the result of the last one is not known
# Seconds that a request may still take in work that is given up. A write that is answered can be undone; after a write
# that is cancelled, the object may appear at any time.
_GIVEN_UP = 10.0
# An ETag and a generation that no object has.
_WRONG = '"00000000000000000000000000000000"\n999999999999999999'

# Searched for in messages, because obstore has no error for this. The number alone may be part of a port or a key.
_PAST_END = re.compile(r"status code: 416\b|InMemory error: Invalid range|Wanted range starting at")
_SLOW = ("timed out", "TimedOut")


class Object(Struct, frozen=True):
    """An object as a server describes it: `modified` is the server's time."""

    key: str
    nbytes: int
    version: Version
    modified: dt.datetime


class _Bucket:
    """A bucket, and the way in which requests are made to it."""

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
        self.hide = hide or Redactor()
        self.is_unconditional = is_alone and not is_trusted
        self._has_conditions: bool | None = True if is_trusted else None  # None: not known yet
        self._probing = Lock()
        self.compares_unquoted = False  # whether the server compares ETags without their quotes, as Ceph does

    def __repr__(self) -> str:
        return f"<objects of {self.url}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it may hold secrets; pass the URL")

    def path_to(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _request(self, operation: str, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Carry out a request in the thread of the event loop, and wait for it."""
        request, limit = _Request(operation, self.path_to(key), self), time_left(self._timeout)
        if limit == 0:
            raise request.slow()

        async def ask() -> T:
            with request.explained():
                return await work()

        return request.result_of(_submit(ask), limit)


class Objects(_Bucket):
    """The objects of one bucket. Safe to use from any thread, but not in a process that was forked after its use.

    url          the bucket, for messages
    timeout      seconds that a request may take, with all its retries
    hide         removes secrets from messages
    is_trusted   whether the server is known to honour conditions; other servers are probed before the first save
    is_alone     whether the caller says that no other process saves here at the same time; then a server need not
                 honour conditions
    server       tells the bucket from a bucket of the same URL on another server
    """

    # ---------------------------------------------------------------------------------------- read

    def read(
        self, key: str, start: int = 0, nbytes: int | None = None, version: Version | None = None
    ) -> tuple[Any, Object]:
        """Read a range of an object, to its end at most. Raise FileNotFoundError if it is gone or has another
        version."""
        options: dict[str, Any] = {"if_match": version.partition("\n")[0]} if version else {}
        if nbytes or start:
            options["range"] = (start, start + nbytes) if nbytes else {"offset": start}

        async def work() -> tuple[Any, Object]:
            found = await self._client.get_async(key, options=options)
            return await found.bytes_async(), _object(found.meta)

        if nbytes == 0:
            return b"", self.head(key)
        for _ in range(_MOST_READS):
            try:
                return self._request("read", key, work)
            except _RefusedError:
                raise FileNotFoundError(f"{self.path_to(key)} was replaced") from None
            except _PastEndError:
                found = self.head(key)
            if found.nbytes <= start:  # else a longer object has replaced it since
                return b"", found
        raise OSError(
            f"{self.path_to(key)}: the server does not read it from byte {start} on, although it says that it is "
            "longer; try again later"
        )

    def head(self, key: str) -> Object:
        return _object(self._request("look up", key, lambda: self._client.head_async(key)))

    def find(self, key: str) -> Object | None:
        try:
            return self.head(key)
        except FileNotFoundError:
            return None

    def read_if_there(self, key: str) -> tuple[bytes, Version] | None:
        try:
            data, found = self.read(key)
        except FileNotFoundError:
            return None
        return bytes(data), found.version

    def list(self, below: str) -> Iterator[Object]:
        """List all objects whose keys begin with `below`, a directory."""
        found = self._request("list", below, lambda: self._client.list(below).collect_async())
        yield from map(_object, found)

    def children(self, below: str) -> tuple[Sequence[str], Sequence[Object]]:
        """List one level: the names of directories, and the objects."""
        found = self._request("list", below, lambda: self._client.list_with_delimiter_async(below))
        names = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        return names, [_object(meta) for meta in found["objects"]]

    # --------------------------------------------------------------------------------------- write

    def put(self, key: str, data: Any) -> None:
        """Write an object of any length, or replace it."""
        if len(data) <= PART_BYTES:
            self._request("write", key, lambda: self._put(key, data, use_multipart=False))
        else:
            self.stream(key, [data]).wait()

    def put_all(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write many small objects."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str, data: bytes) -> None:
            async with slots:
                await self._put(key, data, use_multipart=False)

        async def work() -> None:
            await asyncio.gather(*(one(key, data) for key, data in files))

        if files:
            self._request("write", files[0][0], work)

    def stream(self, key: str, chunks: Iterable[Any]) -> Stream:
        """Write a large object from pieces of memory, in their order. A few of them are sent at the same time.

        The object is invisible before its last piece has arrived. The memory is not copied, and is in use until it is
        sent. A thread of its own asks for the pieces: in the threads of obstore this would hold up other requests.
        """
        _loop()  # raises in a forked process
        send = partial(self._client.put, key, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
        return Stream(_Request("upload", self.path_to(key), self), send, chunks)

    async def _put(self, key: str, data: Any, **how: Any) -> None:
        await self._client.put_async(key, data, **how)

    def copy(self, key: str, final: str) -> None:
        self._request("copy", key, lambda: self._client.copy_async(key, final))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, if they exist."""
        doomed = sorted(keys)
        for start in range(0, len(doomed), _KEYS_A_DELETE):
            some = doomed[start : start + _KEYS_A_DELETE]
            try:
                self._request("delete", some[0], partial(self._delete, some))
            except FileNotFoundError:
                # The stores of Google and Azure raise for the first object that is gone.
                for key in some:
                    with suppress(FileNotFoundError):
                        self._request("delete", key, partial(self._delete, [key]))

    async def _delete(self, keys: Sequence[str]) -> None:
        await self._client.delete_async(keys)

    # ---------------------------------------------------------------------------------- conditions

    def require_conditions(self, unused_key: str) -> None:
        """Raise ValueError if saves could overwrite each other here. The server is probed once."""
        if self.is_unconditional:
            return
        with self._probing:
            if self._has_conditions is None:
                self._has_conditions = self._honours_conditions(unused_key)
        if not self._has_conditions:
            raise ValueError(
                f"{self.url}: the server ignores the conditions of requests, so two saves could damage each other; "
                "if no other process saves here at the same time, give the store option single_writer=True"
            )

    def put_if(self, key: str, data: bytes, expected: Version | None) -> bool:
        """Write an object if it has the expected version. Return False if the server refused."""
        mode: Any = "create"
        if expected is not None:
            etag, _, number = expected.partition("\n")
            condition = {"e_tag": etag.strip('"') if self.compares_unquoted else etag, "version": number}
            mode = {name: value for name, value in condition.items() if value}
        try:
            self._request("write", key, lambda: self._put(key, data, mode=mode, use_multipart=False))
        except _RefusedError:
            return False
        return True

    def _honours_conditions(self, key: str) -> bool:
        """Tell whether the server refuses to write an object on a condition that does not hold.

        `key` must not exist; its object is removed again. The probe shows that the server looks at conditions, not that
        they are atomic. Raise the error of a server that cannot be written to at all.
        """
        try:
            self.put_if(key, b"1", None)
        except OSError:
            self.put(key, b"1")  # if this works, the server refuses conditions alone
            return False
        else:
            return not self.put_if(key, b"2", None) and not self.put_if(key, b"3", _WRONG)
        finally:
            with suppress(OSError):  # it looks like the lease of a save, and runs out
                self.delete([key])

    def swap(self, key: str, data: bytes, expected: Version | None) -> None:
        """Replace an object if it has the expected version; None: if it does not exist.

        Raise SwapError otherwise. A put whose answer was lost may have succeeded, even if a retry of it was refused. So
        after a refusal or an error the object is read: its bytes tell whether it was replaced.
        """
        for attempt in itertools.count(1):
            problem: OSError | None = None
            try:
                if self._swap(key, data, expected):
                    return
            except OSError as error:
                problem = error
            # Every index has a random id, so equal bytes mean that this put has succeeded.
            there = self.read_if_there(key)
            if there is not None and there[0] == data:
                return
            is_unchanged = (there[1] if there else None) == expected
            if is_unchanged and problem is None and expected and not self.compares_unquoted:
                self.compares_unquoted = True
            elif problem is None or not is_unchanged:
                raise SwapError(f"{self.path_to(key)} has changed since it was read")
            elif attempt >= _MOST_SWAPS:
                raise problem
            else:
                time.sleep(min(2.0, 0.025 * 2**attempt))

    def _swap(self, key: str, data: bytes, expected: Version | None) -> bool:
        """Return False if the object has another version. After an error it may have been replaced or not."""
        if not self.is_unconditional:
            return self.put_if(key, data, expected)
        there = self.find(key)
        if (there.version if there else None) != expected:
            return False
        self.put(key, data)
        if bytes(self.read(key)[0]) != data:
            raise OSError(
                f"{self.path_to(key)} has other bytes than written: another process saves here, too"
            )
        return True

    # ------------------------------------------------------------------------------------- requests


class _Request:
    """A request under way: wait for it, and explain its errors."""

    def __init__(self, operation: str, where: str, bucket: _Bucket) -> None:
        self._operation, self._where, self._bucket = operation, where, bucket
        self._to = "look it up" if operation == "look up" else f"{operation} it"
        self._began = time.monotonic()

    def result_of(self, future: Future[T], limit: float | None) -> T:
        """Wait for the result, `limit` seconds at most. Cancel the request if the wait ends early."""
        try:
            with cancelled_with_others(future.cancel):
                return interrupts.result_of(future, limit, grace=_GIVEN_UP)
        except interrupts.StoppedError as error:
            if future.cancel():
                raise UnansweredError(f"{error}; {self.slow()}") from None
            raise  # the pieces of an upload have ended with this error
        except TimeoutError:
            if future.cancel():
                raise self.slow() from None
            return future.result()  # or raise the error of the request itself
        except CancelledError:
            raise InterruptedError(f"{self._where}: the {self._operation} was cancelled") from None
        except BaseException:
            future.cancel()
            raise

    def slow(self) -> TimeoutError:
        over = f"; {why} is over" if (why := told()) else ""
        return TimeoutError(
            f"{self._where}: the server has not answered a request to {self._to} for {self._took()}{over}"
        )

    def _took(self) -> str:
        return f"{time.monotonic() - self._began:.1f} s"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of obstore into built-in errors, or errors of this module."""
        from obstore import exceptions

        where = self._where
        try:
            yield
        except FileNotFoundError as error:
            if is_no_bucket(text := self._text(error)):
                raise self._failure(text) from OSError(text)
            raise FileNotFoundError(f"{where} does not exist") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise _RefusedError(where) from None
        except exceptions.BaseError as error:
            text = self._text(error)
            if self._operation == "read" and _PAST_END.search(text):
                raise _PastEndError(where) from None
            if any(sign in str(error) for sign in _SLOW) and not has_no_credentials(text, where):
                raise self.slow() from None
            is_refused = isinstance(
                error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
            )
            # The error of obstore may hold secrets; the chained error has its text without them.
            raise self._failure(text, is_refused=is_refused) from OSError(text)

    def _text(self, error: Exception) -> str:
        return self._bucket.hide(str(error).partition("\n\nDebug source")[0])

    def _failure(self, text: str, *, is_refused: bool = False) -> OSError:
        """Return the error for an answer of the server, or for none."""
        found = known_error(text, self._bucket.url, self._where, self._to, is_refused=is_refused)
        return found or OSError(
            f"{self._where}: the request to {self._to} failed after {self._took()}: {in_words(text)}"
        )


class Stream:
    """An object that is being sent, by a thread of its own."""

    def __init__(
        self, request: _Request, send: Callable[[Iterator[Any]], object], chunks: Iterable[Any]
    ) -> None:
        self._request, self._future = request, Future[None]()
        self._has_all = False
        # In the context of the caller, whose work may be given up.
        threading.Thread(
            target=copy_context().run,
            args=(self._carry_out, send, self._checked(chunks)),
            name="eformer-upload",
            daemon=True,
        ).start()

    def _carry_out(self, send: Callable[[Iterator[Any]], object], chunks: Iterator[Any]) -> None:
        with suppress(InvalidStateError):  # cancelled
            try:
                with self._request.explained():
                    send(chunks)
            except BaseException as error:  # noqa: BLE001  raised by `wait`
                self._future.set_exception(error)
            else:
                self._future.set_result(None)

    def _checked(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """Yield the pieces. Raise if the upload is cancelled, so that no object appears."""
        for chunk in chunks:
            interrupts.check()
            if self._future.cancelled():
                break
            yield chunk
        interrupts.check()
        self._has_all = True  # first: `may_appear` is asked after `cancel`
        if self._future.cancelled():
            raise InterruptedError("the upload was cancelled")

    def wait(self) -> None:
        """Wait until the object exists."""
        self._request.result_of(self._future, time_left())

    def on_end(self, call: Callable[[], object]) -> None:
        self._future.add_done_callback(lambda _: call())

    def raise_error(self) -> None:
        """Raise the error of an upload that has failed already."""
        if self._future.done():
            self.wait()

    def may_appear(self) -> bool:
        """Tell, after an error, whether the object may still appear: its end was sent."""
        return self._has_all

    def cancel(self) -> None:
        self._future.cancel()


class UnansweredError(interrupts.StoppedError, TimeoutError):
    """A request of work that is given up, which the server has not answered in time."""


class _RefusedError(Exception):
    """The condition of a request does not hold."""


class _PastEndError(Exception):
    """A range begins after the end of the object."""


# ------------------------------------------------------------------------------------------ the loop


class _Loop:
    """An event loop in a thread of its own, in which all requests of the process run."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = _CountedLoop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="eformer-requests", daemon=True)
        self.thread.start()


class _CountedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how many foreign threads are calling it."""

    calls = 0

    def call_soon_threadsafe(self, *args: Any, **context: Any) -> asyncio.Handle:  # type: ignore[override]
        self.calls += 1  # the GIL is held; a lost update costs a part of the grace time at the end
        try:
            return super().call_soon_threadsafe(*args, **context)
        finally:
            self.calls -= 1


def _wait_for_answers(started: _Loop) -> None:
    """Let threads of obstore return before the interpreter ends.

    A thread of obstore tells the loop of an answer, and drops the GIL on the way. If the interpreter ends then, the
    thread is ended inside of Rust, which aborts the process after its work is done.
    """
    if started.pid != os.getpid():  # a child of a fork has none of these threads
        return
    deadline = time.monotonic() + _MOST_GRACE
    while started.loop.calls > 0 and time.monotonic() < deadline:
        time.sleep(_GRACE)
    time.sleep(_GRACE)  # for the way from the loop back into Rust


_start = Lock()
_GRACE, _MOST_GRACE = 0.01, 1.0  # seconds


@cache
def _started_once() -> _Loop:
    started = _Loop()
    atexit.register(_wait_for_answers, started)
    return started


def _started() -> _Loop:
    with _start:  # `cache` alone would start several loops for several threads
        return _started_once()


def _loop() -> _Loop:
    if _started().pid != os.getpid():
        raise RuntimeError(
            "this process was forked from one that had used a bucket, and obstore does not survive that; start "
            "processes by 'spawn' or 'forkserver', or use buckets in the children only"
        )
    return _started()


def is_thread_of_requests() -> bool:
    """Tell whether this is the thread of the event loop. It can get to any code, because it may collect garbage."""
    return threading.current_thread() is _loop().thread


def _submit(work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    if is_thread_of_requests():
        raise RuntimeError(
            "a request was made in the thread that carries out requests, and would wait for itself"
        )
    return asyncio.run_coroutine_threadsafe(work(), _loop().loop)


def _object(meta: Any) -> Object:
    version = "\n".join((meta.get("e_tag") or "", meta.get("version") or ""))
    return Object(meta["path"], meta["size"], version, meta["last_modified"])
