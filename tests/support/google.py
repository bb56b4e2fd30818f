"""A double of the XML API of Google Cloud Storage, with the conditions that its documentation promises.

It knows what https://cloud.google.com/storage/docs/xml-api says of single objects, of lists, of multipart uploads and of
preconditions, as far as a checkpoint needs it, and answers everything else with 501.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import itertools
import re
import threading
import urllib.parse
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

_KNOWN_HEADERS = {
    "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "if-match",
    "if-none-match", "range", "user-agent", "x-goog-copy-source", "x-goog-if-generation-match",
}  # fmt: skip
_KNOWN_PARAMETERS = {
    "continuation-token", "delimiter", "generation", "list-type", "max-keys", "partNumber", "prefix", "start-after",
    "uploadId", "uploads",
}  # fmt: skip
_LEAST_PART = 5 * 2**20  # of all but the last
_MOST_KEYS = 1000  # in an answer to a list


class _Stored(NamedTuple):
    data: bytes
    generation: int
    etag: str
    modified: dt.datetime


class _Bucket:
    """The objects of one bucket. Every change is made while the lock is held, which makes conditions atomic."""

    def __init__(self, name: str, token: str) -> None:
        self.name, self.token = name, token
        self.objects: dict[str, _Stored] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count(1_700_000_000_000_000)

    def put(self, key: str, data: bytes, expected: str | None, etag: str = "") -> _Stored:
        """Replace an object if it has the generation that is expected; "0" if there is none."""
        with self.lock:
            there = self.objects.get(key)
            if expected is not None and str(there.generation if there else 0) != expected:
                raise _AnswerError(412, "PreconditionFailed")
            now = dt.datetime.now(dt.UTC)
            found = _Stored(data, next(self.numbers), etag or _md5(data), now)
            self.objects[key] = found
            return found


class _AnswerError(Exception):
    def __init__(self, status: int, code: str, details: str = "") -> None:
        self.status, self.code, self.details = status, code, details


def server(bucket: str, token: str) -> ThreadingHTTPServer:
    """Return a server of one bucket, for requests that carry a token."""
    held = _Bucket(bucket, token)
    return _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": held}))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: _Bucket
    key: str
    parameters: dict[str, str]

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the name is http.server's
        """Nobody reads it."""

    def do_GET(self) -> None:
        self._carry_out({"": self._get} if self._parse() else {"list-type": self._list})

    def do_HEAD(self) -> None:
        self._parse()
        self._carry_out({"": self._get})

    def do_PUT(self) -> None:
        self._parse()
        copies = "x-goog-copy-source" in self.headers
        self._carry_out({"uploadId": self._put_part, "": self._copy if copies else self._put})

    def do_POST(self) -> None:
        self._parse()
        self._carry_out({"uploads": self._begin, "uploadId": self._complete})

    def do_DELETE(self) -> None:
        self._parse()
        self._carry_out({"uploadId": self._abort, "": self._delete})

    # ------------------------------------------------------------------------------------------ requests

    def _parse(self) -> str:
        path, _, query = self.path.partition("?")
        _, self.name, *rest = urllib.parse.unquote(path).split("/", 2)
        self.key = rest[0] if rest else ""
        self.parameters = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self.key

    def _carry_out(self, ways: dict[str, Any]) -> None:
        """Answer by the way whose parameter is there."""
        try:
            self._check()
            ways[next((name for name in ways if name in self.parameters), "")]()
        except _AnswerError as error:
            text = f"<Error><Code>{error.code}</Code><Message>{escape(error.details)}</Message></Error>"
            self._answer(error.status, text.encode(), {"Content-Type": "application/xml"})
        except KeyError as error:
            self._answer(
                501, f"<Error><Code>NotImplemented</Code><Message>{error}</Message></Error>".encode()
            )

    def _check(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.bucket.token}":
            raise _AnswerError(401, "AuthenticationRequired")
        if self.name != self.bucket.name:
            raise _AnswerError(404, "NoSuchBucket")
        strange = {name.lower() for name in self.headers} - _KNOWN_HEADERS
        strange |= self.parameters.keys() - _KNOWN_PARAMETERS
        if strange:
            raise _AnswerError(501, "NotImplemented", f"the double does not know {sorted(strange)}")
        if len(self.key.encode()) > 1024:
            raise _AnswerError(400, "KeyTooLongError")
        if self.command in ("PUT", "POST") and "Content-Length" not in self.headers:
            raise _AnswerError(411, "MissingContentLength")

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)

    def _expected(self) -> str | None:
        expected = self.headers.get("x-goog-if-generation-match")
        if expected is not None and not expected.isdecimal():
            raise _AnswerError(400, "InvalidArgument", "x-goog-if-generation-match is a number")
        return expected

    # ------------------------------------------------------------------------------------------- objects

    def _find(self, key: str) -> _Stored:
        found = self.bucket.objects.get(key)
        if found is None or self.parameters.get("generation", str(found.generation)) != str(found.generation):
            raise _AnswerError(404, "NoSuchKey")
        return found

    def _get(self) -> None:
        found = self._find(self.key)
        if self._expected() not in (None, str(found.generation)):
            raise _AnswerError(412, "PreconditionFailed")
        if self.headers.get("If-Match", found.etag) not in (found.etag, "*"):
            raise _AnswerError(412, "PreconditionFailed")
        if self.headers.get("If-None-Match") in (found.etag, "*"):
            self._answer(304, headers=_described(found))
            return
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(200, found.data, {**_described(found), "Content-Length": str(len(found.data))})
            return
        start, stop = _range(asked, len(found.data))
        where = f"bytes {start}-{stop - 1}/{len(found.data)}"
        self._answer(206, found.data[start:stop], {**_described(found), "Content-Range": where})

    def _put(self) -> None:
        self._answer(200, headers=_described(self.bucket.put(self.key, self.body, self._expected())))

    def _copy(self) -> None:
        bucket, _, key = urllib.parse.unquote(self.headers["x-goog-copy-source"]).lstrip("/").partition("/")
        if bucket != self.bucket.name:
            raise _AnswerError(404, "NoSuchBucket")
        source = self._find(key)
        found = self.bucket.put(self.key, source.data, self._expected(), source.etag)
        text = f"<CopyObjectResult><ETag>{escape(found.etag)}</ETag></CopyObjectResult>"
        self._answer(200, text.encode(), _described(found))

    def _delete(self) -> None:
        with self.bucket.lock:
            found = self._find(self.key)
            if self._expected() not in (None, str(found.generation)):
                raise _AnswerError(412, "PreconditionFailed")
            del self.bucket.objects[self.key]
        self._answer(204)

    # ---------------------------------------------------------------------------------------------- list

    def _list(self) -> None:
        if self.parameters["list-type"] != "2":
            raise _AnswerError(400, "InvalidArgument", "list-type is 2")
        prefix, delimiter = self.parameters.get("prefix", ""), self.parameters.get("delimiter", "")
        after = self.parameters.get("continuation-token") or self.parameters.get("start-after", "")
        most = min(_MOST_KEYS, int(self.parameters.get("max-keys", _MOST_KEYS)))
        with self.bucket.lock:
            there = sorted(self.bucket.objects.items())
        entries: dict[str, str] = {}
        for key, found in there:
            if key.startswith(prefix):
                name, text = _entry(key, found, len(prefix), delimiter)
                if name > after:
                    entries[name] = text
        shown = list(entries)[:most]
        more = (
            f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
            if len(entries) > most
            else ""
        )
        content = "".join(entries[name] for name in shown)
        cut = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        self._answer(
            200,
            f"<ListBucketResult><Name>{self.name}</Name>{cut}{more}{content}</ListBucketResult>".encode(),
            {"Content-Type": "application/xml"},
        )

    # --------------------------------------------------------------------------------------- multipart

    def _begin(self) -> None:
        number = f"upload-{next(self.bucket.numbers)}"
        self.bucket.uploads[number] = self.key, {}
        text = (
            f"<InitiateMultipartUploadResult><Bucket>{self.name}</Bucket><Key>{escape(self.key)}</Key>"
            f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _parts(self) -> dict[int, bytes]:
        key, parts = self.bucket.uploads.get(self.parameters["uploadId"], ("", {}))
        if key != self.key:
            raise _AnswerError(404, "NoSuchUpload")
        return parts

    def _put_part(self) -> None:
        number = int(self.parameters["partNumber"])
        if not 1 <= number <= 10_000:
            raise _AnswerError(400, "InvalidArgument", "parts have numbers from 1 to 10000")
        self._parts()[number] = self.body
        self._answer(200, headers={"ETag": _md5(self.body)})

    def _complete(self) -> None:
        parts, named = self._parts(), ET.fromstring(self.body)
        numbers = [int(part.findtext("{*}PartNumber") or 0) for part in named.iterfind("{*}Part")]
        etags = [part.findtext("{*}ETag") for part in named.iterfind("{*}Part")]
        if numbers != sorted(set(numbers)):
            raise _AnswerError(400, "InvalidPartOrder")
        if not numbers or etags != [_md5(parts.get(number, b"")) for number in numbers]:
            raise _AnswerError(400, "InvalidPart")
        if any(len(parts[number]) < _LEAST_PART for number in numbers[:-1]):
            raise _AnswerError(400, "EntityTooSmall")
        whole = b"".join(parts[number] for number in numbers)
        etag = f'"{hashlib.md5("".join(map(str, etags)).encode()).hexdigest()}-{len(numbers)}"'
        found = self.bucket.put(self.key, whole, self._expected(), etag)
        self.bucket.uploads.pop(self.parameters["uploadId"], None)
        text = (
            f"<CompleteMultipartUploadResult><Bucket>{self.name}</Bucket><Key>{escape(self.key)}</Key>"
            f"<ETag>{escape(found.etag)}</ETag></CompleteMultipartUploadResult>"
        )
        self._answer(200, text.encode(), {**_described(found), "Content-Type": "application/xml"})

    def _abort(self) -> None:
        self._parts()
        self.bucket.uploads.pop(self.parameters["uploadId"], None)
        self._answer(204)


def _md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _described(found: _Stored) -> dict[str, str]:
    hashed = base64.b64encode(hashlib.md5(found.data).digest()).decode()
    return {
        "ETag": found.etag,
        "Last-Modified": format_datetime(found.modified, usegmt=True),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"md5={hashed}",
    }


def _range(asked: str, nbytes: int) -> tuple[int, int]:
    """Return where a range begins and ends."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if not found or found.groups() == ("", ""):
        raise _AnswerError(501, "NotImplemented", f"the double does not know the range {asked}")
    first, last = found.groups()
    start = int(first) if first else max(0, nbytes - int(last))
    stop = min(nbytes, int(last) + 1) if first and last else nbytes
    if start >= nbytes:
        raise _AnswerError(416, "InvalidRange")
    return start, stop


def _entry(key: str, found: _Stored, start: int, delimiter: str) -> tuple[str, str]:
    """Return the name by which a list is ordered, and the entry: an object, or all that begin alike."""
    inner, cut, _ = key[start:].partition(delimiter) if delimiter else (key, "", "")
    if cut:
        common = key[:start] + inner + cut
        return common, f"<CommonPrefixes><Prefix>{escape(common)}</Prefix></CommonPrefixes>"
    modified = found.modified.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return key, (
        f"<Contents><Key>{escape(key)}</Key><Generation>{found.generation}</Generation><LastModified>{modified}"
        f"</LastModified><ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
    )
