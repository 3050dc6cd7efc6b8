"""A small Hugging Face Hub on 127.0.0.1: listings of repositories, and their files with etags and commits."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    """Files of one commit, and the token that may read them."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None  # required to see the repository
    gated: bool = False
    vanished: tuple[str, ...] = ()  # listed but missing
    cut: set[str] = field(default_factory=set)  # the connection breaks halfway through the next download
    listing: bytes | None = None  # replaces the body of its listing
    endless: bool = False  # the listing never ends
    silent: bool = False  # sends no answer until the server ends
    status: int = 0  # replaces the status of all answers
    headers: dict[str, str | None] = field(default_factory=dict)  # replace headers of files; None omits one

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()


@dataclass
class Hub:
    """Repositories, the address of their server, and the received requests."""

    repos: dict[str, Repo]
    sign_in: int = 0  # status of a page that answers all requests, as a proxy's sign-in page does
    url: str = ""
    requests: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve(repos: dict[str, Repo], sign_in: int = 0) -> Iterator[Hub]:
    """Serve `repos` until the block ends."""
    hub = Hub(repos, sign_in)

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Make the library, which is imported once, use the server at `url` and this cache."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    template = "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + template, "HF_HUB_CACHE": str(cache)}
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))  # a copy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.content.sign_in:
            page = {"Content-Type": "text/html; charset=utf-8"}
            return self._send(self.content.sign_in, page, b"<html>Sign in to the network</html>")
        url = urlsplit(self.path)
        self.content.requests.append(f"{self.command} {url.path}")
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", url.path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        found = info or resolve
        if found is None:
            return self._fail(404, None)
        repo, revision = self.content.repos.get(found[1]), unquote(found[2] or "main")
        if repo is None or (repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            return self._fail(404 if repo is None else 401, "RepoNotFound")
        if repo.gated:
            return self._fail(403, "GatedRepo")
        if repo.silent:
            self.content.closing.wait()
        if repo.status:
            return self._fail(repo.status, None)
        if revision not in (*repo.revisions, repo.commit):
            return self._fail(404, "RevisionNotFound")
        if info:
            return self._info(repo, info[1])
        name = unquote(found[3])
        if name not in repo.files:
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
        return self._file(repo, name)

    do_HEAD = do_GET

    def _info(self, repo: Repo, repo_id: str) -> None:
        siblings = [{"rfilename": name} for name in sorted({*repo.files, *repo.vanished})]
        info = {"id": repo_id, "sha": repo.commit, "private": repo.token is not None, "siblings": siblings}
        body = json.dumps(info).encode() if repo.listing is None else repo.listing
        if repo.endless:
            self._send_for_ever(body)
        else:
            self._send(200, {"Content-Type": "application/json"}, body)

    def _send_for_ever(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):  # until the client closes the connection
            while not self.content.closing.is_set():
                self.wfile.write(body)

    def _file(self, repo: Repo, name: str) -> None:
        content, status = repo.files[name], 200
        headers: dict[str, str] = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": repo.commit,
            "Accept-Ranges": "bytes",
        }
        headers = {k: v for k, v in {**headers, **repo.headers}.items() if v is not None}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part:
            first, last = int(part[1]), int(part[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        sent = len(content)
        if self.command == "GET" and name in repo.cut:
            repo.cut.remove(name)
            sent //= 2
            self.close_connection = True
        self._send(status, headers, content, sent)

    def _fail(self, status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        error = {"X-Error-Code": code, "X-Error-Message": f"{code}: {self.path}"} if code else {}
        self._send(status, {**(headers or {}), **error}, b"")

    def _send(self, status: int, headers: dict[str, str], content: bytes, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])
