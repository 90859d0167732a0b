"""A server on loopback that answers as the Hugging Face hub does to those who fetch a model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator

SHA = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|auth-check)(?:/([^?]+))?)?(?:\?.*)?"
)
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclasses.dataclass
class Repo:
    """A model on the server.

    Attributes:
      files: content by path.
      gated: its files are refused.
    """

    files: dict[str, bytes]
    gated: bool = False


@dataclasses.dataclass
class Hub:
    """A running server.

    Attributes:
      endpoint: its address.
      repos: by id; may be changed while it runs.
      requests: method and path of every request so far.
    """

    endpoint: str
    repos: dict[str, Repo]
    requests: list[str] = dataclasses.field(default_factory=list)

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were asked for."""
        found = (_FILE.fullmatch(request.partition(" ")[2]) for request in self.requests)
        return sorted({match[3] for match in found if match})


@contextlib.contextmanager
def serve(repos: dict[str, Repo]) -> Iterator[Hub]:
    """Run a server until the context ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            hub.requests.append(f"{self.command} {self.path}")
            if match := _API.fullmatch(self.path):
                self._answer_api(*match.groups())
            elif match := _FILE.fullmatch(self.path):
                self._answer_file(*match.groups())
            else:
                self._refuse(404, "")

        def _answer_api(self, repo_id, kind, revision):
            repo = hub.repos.get(repo_id)
            if repo is None:
                self._refuse(401, "RepoNotFound")
            elif kind == "auth-check" and repo.gated:
                self._refuse(403, "GatedRepo")
            elif revision not in (None, "main", "v1", SHA):
                self._refuse(404, "RevisionNotFound")
            elif kind == "tree":
                files = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in repo.files.items()
                ]
                self._send(json.dumps(files).encode())
            else:
                files = [
                    {"rfilename": name, "size": len(data), "blobId": _etag(data)}
                    for name, data in repo.files.items()
                ]
                about = {"id": repo_id, "sha": SHA, "siblings": files, "tags": [], "private": False}
                self._send(json.dumps(about | {"gated": "auto" if repo.gated else False}).encode())

        def _answer_file(self, repo_id, revision, name):
            repo = hub.repos[repo_id]
            if repo.gated:
                self._refuse(403, "GatedRepo")
            else:
                self._send(repo.files[name])

        def _send(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def _refuse(self, status, code):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("X-Error-Code", code)
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = Hub(endpoint=f"http://127.0.0.1:{server.server_port}", repos=repos)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
