"""A server that speaks just enough S3 to be measured against: it forgets what is sent to it, and sends one file.

    python bench/discard_server.py PORT FILE

PUT and POST: the body is received and forgotten. GET: whatever the key, a range of FILE by sendfile, except that there
is no JSON. Listing: there is nothing. It does little with the bytes, so that a client is what is measured.
"""

import contextlib
import os
import re
import socket
import sys
import threading

ETAG = '"0123456789abcdef0123456789abcdef"'
STARTED = (
    "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>"
    "</InitiateMultipartUploadResult>"
)
COMPLETED = (
    f"<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key><ETag>{ETAG}</ETag>"
    "</CompleteMultipartUploadResult>"
)
EMPTY = "<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


class Connection:
    """One client: requests are answered one after the other."""

    def __init__(self, connection, path):
        self.connection, self.buffer = connection, bytearray(2**20)
        self.file = os.open(path, os.O_RDONLY)
        self.size, self.rest = os.fstat(self.file).st_size, b""

    def serve(self):
        with contextlib.suppress(OSError), self.connection:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self.answer():
                pass
        os.close(self.file)

    def receive(self, most):
        return self.connection.recv_into(self.buffer, min(most, len(self.buffer)))

    def answer(self):
        """Answer one request. Return False at the end of the connection."""
        while b"\r\n\r\n" not in self.rest:
            if not (count := self.receive(2**20)):
                return False
            self.rest += self.buffer[:count]
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        (method, target, _), *lines = (line.split(" ") for line in head.decode("latin1").split("\r\n"))
        headers = {line[0].rstrip(":").lower(): " ".join(line[1:]) for line in lines}
        self.skip_body(int(headers.get("content-length", 0)))
        if method == "GET" and "list-type" in target:
            self.send(EMPTY)
        elif method in ("GET", "HEAD") and target.endswith(".json"):
            self.send("", "404 Not Found")
        elif method in ("GET", "HEAD"):
            self.send_file(headers.get("range", ""), is_head=method == "HEAD")
        elif method == "POST":
            self.send(STARTED if "uploads" in target else COMPLETED)
        else:
            self.send("")
        return True

    def skip_body(self, left):
        taken = min(left, len(self.rest))
        self.rest, left = self.rest[taken:], left - taken
        while left:
            left -= self.receive(left)

    def send(self, body, status="200 OK", more="", length=None):
        head = (
            f"HTTP/1.1 {status}\r\nETag: {ETAG}\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{more}"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n{body}"
        )
        self.connection.sendall(head.encode())

    def send_file(self, asked, *, is_head):
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        start = int(found[1]) if found else 0
        stop = min(int(found[2]) + 1 if found and found[2] else self.size, self.size)
        more = f"Content-Range: bytes {start}-{stop - 1}/{self.size}\r\n" if found else ""
        self.send("", "206 Partial Content" if found else "200 OK", more, stop - start)
        while start < stop and not is_head:
            start += os.sendfile(self.connection.fileno(), self.file, start, min(stop - start, 2**22))


def main():
    port, path = int(sys.argv[1]), sys.argv[2]
    server = socket.create_server(("127.0.0.1", port), backlog=512)
    while True:
        connection = Connection(server.accept()[0], path)
        threading.Thread(target=connection.serve, daemon=True).start()


if __name__ == "__main__":
    main()
