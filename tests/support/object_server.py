"""A small server of objects on loopback, with the interface that S3 and the XML API of Google share.

It can ignore the conditions of requests, as some servers do, refuse everything with a status of choice, refuse to be
written to, and answer late.
"""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape


@contextmanager
def serving(*, honours_conditions=True):
    """Run a server; its `url`, `objects` and `requests` can be looked at, and `refuse_with` be set."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.objects, server.requests, server.generations, server.times = {}, [], {}, {}
        server.honours_conditions, server.refuse_with = honours_conditions, None
        server.is_read_only, server.delay = False, 0.0
        server.changes = threading.Lock()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def credentials():
    """Options with which a client asks nobody for credentials."""
    return {"access_key_id": "AKIDOFTESTS", "secret_access_key": "of-tests", "region": "us-east-1"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        time.sleep(self.server.delay)
        if self.server.refuse_with:
            self.answer(*self.server.refuse_with)
            return
        if self.server.is_read_only and self.command not in ("GET", "HEAD"):
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        with self.server.changes:
            getattr(self, self.command.lower())()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    @property
    def key(self):
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def query(self):
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, True).items()}

    def put(self):
        if self.server.honours_conditions and not self.condition_holds():
            self.answer(412)
            return
        data = self.body
        if source := self.headers.get("x-amz-copy-source"):
            data = self.server.objects[unquote(source).lstrip("/").partition("/")[2]]
        self.server.objects[self.key] = data
        self.server.times[self.key] = time.time()
        self.server.generations[self.key] = self.server.generations.get(self.key, 0) + 1
        result = f"<CopyObjectResult><ETag>{self.etag}</ETag></CopyObjectResult>" if source else ""
        self.answer(200, result.encode(), ETag=self.etag)

    def condition_holds(self):
        there = self.key in self.server.objects
        wanted = self.headers.get("if-match")
        generation = self.headers.get("x-goog-if-generation-match")
        if self.headers.get("if-none-match") == "*" and there:
            return False
        if generation is not None:
            return int(generation) == (self.server.generations[self.key] if there else 0)
        return wanted is None or (there and wanted == self.etag)

    def get(self):
        if not self.key:
            self.answer(200, self.listing().encode())
        elif self.key not in self.server.objects:
            self.answer(404)
        elif self.server.honours_conditions and not self.condition_holds():
            self.answer(412)
        else:
            self.answer_object()

    head = get

    def answer_object(self):
        data, status, more = self.server.objects[self.key], 200, {}
        if found := self.headers.get("range"):
            first, _, last = found.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or len(data)) + 1, len(data))
            if start >= len(data):
                self.answer(416)
                return
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self.answer(
            status,
            data,
            ETag=self.etag,
            **{"Last-Modified": formatdate(self.server.times.get(self.key, 0), usegmt=True), **more},
        )

    def delete(self):
        self.answer(404 if self.server.objects.pop(self.key, None) is None else 204)

    def post(self):
        keys = [found.text for found in ET.fromstring(self.body).iter() if found.tag.endswith("Key")]
        for key in keys:
            self.server.objects.pop(key, None)
        inner = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{inner}</DeleteResult>".encode())

    def listing(self):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        inner, folders = "", set()
        for key in sorted(self.server.objects):
            if not key.startswith(prefix):
                continue
            name, is_deeper, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if is_deeper:
                folders.add(prefix + name + is_deeper)
                continue
            data = self.server.objects[key]
            inner += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{_etag(data)}</ETag>"
                f"<LastModified>{_when(self.server.times.get(key, 0))}</LastModified></Contents>"
            )
        for folder in sorted(folders):
            inner += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{inner}</ListBucketResult>"

    @property
    def etag(self):
        return _etag(self.server.objects[self.key])

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        headers = {"x-goog-generation": str(self.server.generations.get(self.key, 1)), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
                self.wfile.write(body)

    def log_message(self, *args):
        pass


def _when(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _etag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'
