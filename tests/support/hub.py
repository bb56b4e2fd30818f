"""A double of the Hugging Face Hub on loopback: models with revisions, large files on another server, ranges,
and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 2**16  # bytes; larger files are kept as LFS
PAGE = 3  # files that one answer lists


@dataclass
class Asked:
    """A request, and how many bytes its answer had."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0


@dataclass
class Hub:
    """Models by name: {commit: {path: bytes}}, and the commits that the names of revisions mean."""

    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[Asked] = field(default_factory=list)
    ranges: bool = True
    refuses: bool = False  # large files
    url: str = ""
    cdn: str = ""

    def commit(self, model: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit, and let the revision mean it."""
        text = json.dumps([model, len(self.commits), sorted(files)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[model, sha] = files
        self.revisions[model, revision] = self.revisions[model, sha] = sha
        return sha

    def data_sent(self, suffix: str = "") -> int:
        """Return the bytes of files that were sent."""
        return sum(asked.sent for asked in self.asked if "/api/" not in asked.path and suffix in asked.path)

    def start(self) -> None:
        """Serve on two free ports."""
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            self.noted = Asked(
                self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")
            )
            hub.asked.append(self.noted)
            path = urlsplit(self.path).path
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self.info(found[1], unquote(found[2] or "main"))
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
                self.tree(found[1], unquote(found[2]))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve(found[1], unquote(found[2]), unquote(found[3]))
            elif found := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
                self.large(found[1])
            else:
                self.answer(404, b"")

        def do_POST(self):
            self.noted = Asked(self.command, self.path, None, self.headers.get("Authorization"))
            hub.asked.append(self.noted)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            if self.headers.get("Authorization") != "Bearer hf_allowed":
                self.answer(401, b"")
            elif path == "/api/validate-yaml":
                self.json({"errors": [], "warnings": []})
            elif path == "/api/repos/create":
                asked = json.loads(body)
                model = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                if not any(name == model for name, _ in hub.revisions):
                    hub.commit(model, {})
                self.json({"url": f"{hub.url}/{model}", "name": model})
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
                hub.revisions.setdefault((found[1], unquote(found[2])), hub.revisions[found[1], "main"])
                self.json({})
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
                names = [file["path"] for file in json.loads(body)["files"]]
                self.json(
                    {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
                )
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
                self.take_commit(found[1], unquote(found[2]), body)
            else:
                self.answer(404, b"")

        def take_commit(self, model, revision, body):
            files = dict(hub.commits[model, hub.revisions[model, revision]])
            for line in body.splitlines():
                change = json.loads(line)
                if change["key"] == "file":
                    files[change["value"]["path"]] = base64.b64decode(change["value"]["content"])
                elif change["key"] == "deletedFile":
                    del files[change["value"]["path"]]
            sha = hub.commit(model, files, revision)
            self.json({"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{model}/commit/{sha}"})

        def sha_of(self, model, revision):
            if model in hub.gated and self.headers.get("Authorization") != "Bearer hf_allowed":
                self.answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"})
            elif model not in {name for name, _ in hub.revisions}:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif (model, revision) not in hub.revisions:
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                return hub.revisions[model, revision]
            return None

        def info(self, model, revision):
            if sha := self.sha_of(model, revision):
                self.json(
                    {"_id": "1", "id": model, "modelId": model, "sha": sha, "private": False, "tags": []}
                )

        def tree(self, model, revision):
            if not (sha := self.sha_of(model, revision)):
                return
            entries = [_described(path, data) for path, data in sorted(hub.commits[model, sha].items())]
            folders = {path.rpartition("/")[0] for path in hub.commits[model, sha]} - {""}
            entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders]
            start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            more = {}
            if start + PAGE < len(entries):
                url = f"{hub.url}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
                more = {"Link": f'<{url}>; rel="next"'}
            self.json(entries[start : start + PAGE], more)

        def resolve(self, model, revision, path):
            if not (sha := self.sha_of(model, revision)):
                return
            if path not in hub.commits[model, sha]:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
                return
            data = hub.commits[model, sha][path]
            if len(data) <= LARGE:
                self.file(data, {"X-Repo-Commit": sha, "ETag": f'"{_oid(data)}"'})
                return
            digest = hashlib.sha256(data).hexdigest()
            headers = {
                "X-Repo-Commit": sha,
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{digest}"',
                "Location": f"{hub.cdn}/cdn/{digest}?Signature=secret",
            }
            self.answer(302, b"", headers)

        def large(self, digest):
            for files in [] if hub.refuses else hub.commits.values():
                for data in files.values():
                    if len(data) > LARGE and hashlib.sha256(data).hexdigest() == digest:
                        self.file(data, {"ETag": f'"{digest}"'})
                        return
            self.answer(403 if hub.refuses else 404, b"")

        def file(self, data, headers):
            headers = {**headers, "Accept-Ranges": "bytes"}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted or not hub.ranges:
                self.answer(200, data, headers)
                return
            start, stop = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self.answer(206, data[start:stop], headers)

        def json(self, value, headers=None):
            self.answer(
                200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}
            )

        def answer(self, status, data, headers=None):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                for start in range(0, len(data), 2**16):
                    try:
                        self.wfile.write(data[start : start + 2**16])
                    except OSError:  # the client has seen enough
                        self.close_connection = True
                        return
                    self.noted.sent += len(data[start : start + 2**16])

    return Handler


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _described(path: str, data: bytes) -> dict:
    described = {"type": "file", "oid": _oid(data), "size": len(data), "path": path}
    if len(data) > LARGE:
        digest = hashlib.sha256(data).hexdigest()
        described["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return described
