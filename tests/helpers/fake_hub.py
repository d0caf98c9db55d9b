"""A hub on this machine: as much of the Hugging Face hub's HTTP as finding and downloading a model takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "a" * 40
# id: folder of its files, and its licence
Models = Mapping[str, tuple[Path, str]]


class FakeHub(ThreadingHTTPServer):
    """Serves models. `requests`: the methods and paths of what was asked for; `failing`: the ends of
    paths that fail once."""

    def __init__(self, models: Models) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.requests: list[str] = []
        self.failing: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def _answer(self, has_body: bool) -> None:
        address = urlsplit(unquote(self.path))
        self.server.requests.append(f"{self.command} {address.path}")
        status, body = self._find(address.path, {k: v[0] for k, v in parse_qs(address.query).items()})
        if fails := [end for end in self.server.failing if has_body and address.path.endswith(end)]:
            self.server.failing.remove(fails[0])
            status, body = 503, b"{}"
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _find(self, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        models = self.server.models
        if path == "/api/models":
            words = query.get("search", "").casefold()
            found = [{"id": i} for i in models if i.startswith(query["author"]) and words in i.casefold()]
            return 200, json.dumps(found).encode()
        match = re.match(r"/api/models/(?P<id>[^/]+/[^/]+)(?P<rest>/.*)?$", path)
        if match and match["id"] in models:
            folder, licence = models[match["id"]]
            names = [{"rfilename": file.name} for file in folder.iterdir()]
            if "/tree/" in (match["rest"] or ""):
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                    for file in folder.iterdir()
                ]
                return 200, json.dumps(tree).encode()
            info = {"id": match["id"], "sha": REVISION, "siblings": names, "tags": [f"license:{licence}"]}
            return 200, json.dumps(info).encode()
        match = re.match(r"/(?P<id>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>[^/]+)$", path)
        if match and match["id"] in models and (file := models[match["id"]][0] / match["file"]).is_file():
            return 200, file.read_bytes()
        return 404, b"{}"


@contextmanager
def run_fake_hub(models: Models) -> Iterator[FakeHub]:
    """A hub with these models, meanwhile."""
    with FakeHub(models) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
