"""A server that speaks just enough S3 to be measured against: it forgets large objects, and sends one file.

    python bench/discard_server.py PORT FILE

Objects of the bucket "kept" are kept in memory, of those in other buckets the first 1 MiB, so that indexes, leases and
headers are there, with the conditions of PUT. GET of anything else is a range of FILE by sendfile. It does little with
the bytes, so that a client is what is measured. GET /requests returns how many requests there were since it was asked
last.
"""

import contextlib
import hashlib
import itertools
import os
import re
import socket
import sys
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

SMALL = 2**20
FILE_ETAG = '"0123456789abcdef0123456789abcdef"'


class Kept:
    """The objects that are not forgotten, the parts of those that are on their way, and a count of requests."""

    def __init__(self):
        self.lock, self.objects, self.parts = threading.Lock(), {}, {}
        self.uploads, self.requests = itertools.count(1), itertools.count()

    def put(self, key, body, headers):
        """Keep an object if its condition holds. Return its ETag, or None."""
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        with self.lock:
            found = self.objects.get(key)
            wanted = headers.get("if-match")
            if (found and headers.get("if-none-match") == "*") or (
                wanted and (not found or found[0] != wanted)
            ):
                return None
            self.objects[key] = etag, body
        return etag

    def complete(self, key, upload):
        parts = self.parts.pop(upload, {})
        if parts:
            self.put(key, b"".join(parts[number] for number in sorted(parts)), {})

    def list(self, bucket, below):
        start = f"/{bucket}/{below}"
        with self.lock:
            return sorted((key, *found) for key, found in self.objects.items() if key.startswith(start))


class Connection:
    """One client: requests are answered one after the other."""

    def __init__(self, connection, path, kept):
        self.connection, self.buffer, self.kept = connection, bytearray(2**20), kept
        self.file = os.open(path, os.O_RDONLY)
        self.size, self.rest = os.fstat(self.file).st_size, b""

    def serve(self):
        with contextlib.suppress(OSError), self.connection:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self.answer():
                pass
        os.close(self.file)

    # ---------------------------------------------------------------------------------------- receive

    def answer(self):
        """Answer one request. Return False at the end of the connection."""
        while b"\r\n\r\n" not in self.rest:
            if not (count := self.receive(2**20)):
                return False
            self.rest += self.buffer[:count]
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        (method, target, _), *lines = (line.split(" ") for line in head.decode("latin1").split("\r\n"))
        headers = {line[0].rstrip(":").lower(): " ".join(line[1:]) for line in lines}
        if headers.get("expect") == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts = urlsplit(target)
        asked = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        getattr(self, f"do_{method.lower()}")(unquote(parts.path), asked, headers)
        return True

    def receive(self, most):
        return self.connection.recv_into(self.buffer, min(most, len(self.buffer)))

    def body(self, key, headers):
        """Receive what is sent. Return what is to be kept: all of it, or its beginning."""
        nbytes = int(headers.get("content-length", 0))
        kept = bytearray(nbytes if key.startswith("/kept/") else min(nbytes, SMALL))
        taken = min(nbytes, len(self.rest))
        known = min(taken, len(kept))
        kept[:known], self.rest = self.rest[:known], self.rest[taken:]
        with memoryview(kept) as view:
            while taken < nbytes:
                into = view[taken:] if taken < len(kept) else memoryview(self.buffer)[: nbytes - taken]
                taken += self.connection.recv_into(into)
        return bytes(kept)

    # ----------------------------------------------------------------------------------------- answer

    def do_put(self, key, asked, headers):
        next(self.kept.requests)
        body = self.body(key, headers)
        if "uploadId" in asked:
            if key.startswith("/kept/") or asked["partNumber"] == "1":
                self.kept.parts.setdefault(asked["uploadId"], {})[int(asked["partNumber"])] = body
            self.send(etag=FILE_ETAG)
        elif (etag := self.kept.put(key, body, headers)) is None:
            self.send("", "412 Precondition Failed")
        else:
            self.send(etag=etag)

    def do_post(self, key, asked, headers):
        next(self.kept.requests)
        self.body("/kept/", headers)
        if "uploads" in asked:
            found = f"<UploadId>{next(self.kept.uploads)}</UploadId>"
            self.send(
                f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>{found}</InitiateMultipartUploadResult>"
            )
        elif "uploadId" in asked:
            self.kept.complete(key, asked["uploadId"])
            self.send(
                "<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key>"
                f"<ETag>{escape(FILE_ETAG)}</ETag></CompleteMultipartUploadResult>"
            )
        else:
            self.send("<DeleteResult></DeleteResult>")

    def do_delete(self, key, asked, headers):
        next(self.kept.requests)
        self.kept.objects.pop(key, None)
        self.send("", "204 No Content")

    def do_head(self, key, asked, headers):
        self.do_get(key, asked, headers, is_head=True)

    def do_get(self, key, asked, headers, *, is_head=False):
        if key == "/requests":
            self.send(str(next(self.kept.requests)))
            self.kept.requests = itertools.count()
            return
        next(self.kept.requests)
        _, bucket, name = [*key.split("/", 2), ""][:3]
        found = self.kept.objects.get(key)
        if not name:
            self.send_list(bucket, asked.get("prefix", ""))
        elif found:
            start, stop, more = self.range(headers.get("range", ""), len(found[1]))
            status = "206 Partial Content" if more else "200 OK"
            self.send("", status, more, stop - start, etag=found[0])
            if not is_head:
                self.connection.sendall(memoryview(found[1])[start:stop])
        elif bucket == "kept" or name.endswith(".json") or "/" in name:
            self.send("" if is_head else "<Error><Code>NoSuchKey</Code></Error>", "404 Not Found")
        else:
            self.send_file(headers.get("range", ""), is_head=is_head)

    def send_list(self, bucket, below):
        found = "".join(
            f"<Contents><Key>{escape(key.split('/', 2)[2])}</Key><Size>{len(body)}</Size><ETag>{escape(etag)}</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, etag, body in self.kept.list(bucket, below)
        )
        self.send(
            f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        )

    @staticmethod
    def range(asked, size):
        """Return the first byte of a range, the one behind it, and the header for it."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        start = int(found[1]) if found else 0
        stop = min(int(found[2]) + 1 if found and found[2] else size, size)
        return start, stop, f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n" if found else ""

    def send(self, body="", status="200 OK", more="", length=None, etag=FILE_ETAG):
        head = (
            f"HTTP/1.1 {status}\r\nETag: {etag}\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{more}"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n{body}"
        )
        self.connection.sendall(head.encode())

    def send_file(self, asked, *, is_head):
        start, stop, more = self.range(asked, self.size)
        self.send("", "206 Partial Content" if more else "200 OK", more, stop - start)
        while start < stop and not is_head:
            start += os.sendfile(self.connection.fileno(), self.file, start, min(stop - start, 2**22))


def main():
    port, path = int(sys.argv[1]), sys.argv[2]
    server, kept = socket.create_server(("127.0.0.1", port), backlog=512), Kept()
    while True:
        connection = Connection(server.accept()[0], path, kept)
        threading.Thread(target=connection.serve, daemon=True).start()


if __name__ == "__main__":
    main()
