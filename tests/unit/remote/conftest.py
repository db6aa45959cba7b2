"""A hub on loopback with the endpoints that huggingface_hub calls: revisions, trees and files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

OLD, NEW = "a" * 40, "b" * 40
"""Commits of every repository: the tag v1 and the branch main."""


@dataclass
class Hub:
    """Repositories by the paths `owner/name` and `datasets/owner/name`: commit -> file -> content."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)
    """Paths of downloaded files."""
    branch: str = NEW

    def commit(self, repo: str, revision: str) -> str | None:
        named = {"main": self.branch, "v1": OLD, "refs/pr/1": OLD}.get(revision, revision)
        return named if named in self.repos[repo] else None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/").replace("%2F", "/")
        is_api, path = path.startswith("api/"), path.removeprefix("api/").removeprefix("models/")
        repo = next((name for name in self.hub.repos if path.startswith(f"{name}/")), None)
        if repo is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repo in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        kind, _, rest = path.removeprefix(f"{repo}/").partition("/")
        if kind == "revision":
            commit = self.hub.commit(repo, rest)
            if commit is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._send(200, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode())
        if kind == "tree":
            files = self.hub.repos[repo][rest].items()
            listed = [{"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files]
            return self._send(200, json.dumps(listed).encode())
        assert not is_api
        assert kind == "resolve"
        commit, _, file = rest.partition("/")
        data = self.hub.repos[repo][commit][file]
        if with_body:
            self.hub.downloads.append(file)
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit}
        return self._send(200, data if with_body else b"", {**headers, "Content-Length": str(len(data))})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty hub cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Running hub, and an empty cache."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
