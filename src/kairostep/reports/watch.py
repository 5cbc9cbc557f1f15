"""`kairostep report --watch`: the page on localhost, following runs while they train."""

import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kairostep.reports.page import content, import_extra, whole_page
from kairostep.reports.report import make_report, runs_in
from kairostep.runs.history import RunHistory, fingerprint

HOST, PORT = "127.0.0.1", 8765


class WatchedRuns:
    """Run directories and their page. If a run writes a file, only that run is read again, and the page is rebuilt.

    Args:
        directories: Runs, or folders of runs.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        for package in ("jinja2", "plotly"):
            import_extra(package)
        for directory in directories:
            runs_in(directory)  # ValueError if it does not exist
        self.directories = list(directories)
        self.histories: dict[Path, tuple[Any, RunHistory]] = {}
        self.pages: dict[str, tuple[str, str]] = {}
        self.building = threading.Lock()

    def version(self) -> str:
        """Return the version of the page, which changes when a run writes something."""
        found = [(str(run), fingerprint(run)) for run in self._runs()]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def page(self) -> tuple[str, str]:
        """Return the whole page, and its version."""
        return self._build("page")

    def content(self) -> tuple[str, str]:
        """Return the part of the page that changes, and its version."""
        return self._build("content")

    def _build(self, kind: str) -> tuple[str, str]:
        with self.building:  # requests that come meanwhile wait for the same page
            version = self.version()
            if self.pages.get(kind, ("", ""))[1] != version:
                context, groups, figures = make_report(self._runs(), self._history)
                context["version"] = version
                made = whole_page if kind == "page" else content
                self.pages[kind] = (made(context, groups, figures), version)
            return self.pages[kind]

    def _runs(self) -> list[Path]:
        found: dict[Path, None] = {}
        for directory in self.directories:
            if directory.is_dir():  # it may have been removed
                found |= dict.fromkeys(runs_in(directory))
        return list(found)

    def _history(self, directory: Path) -> RunHistory:
        mark = fingerprint(directory)
        known = self.histories.get(directory)
        if known is None or known[0] != mark:
            known = self.histories[directory] = (mark, RunHistory.read(directory))
        return known[1]


def make_server(directories: Sequence[Path], port: int | None = None) -> ThreadingHTTPServer:
    """Return a server of the page on localhost.

    Args:
        directories: Runs, or folders of runs.
        port: Default: 8765, or a free one if that is taken.

    Raises:
        ValueError: A directory does not exist, or the port is taken.
    """
    runs = WatchedRuns(directories)

    class Handler(_Handler):
        watched = runs

    for wanted in [PORT, 0] if port is None else [port]:
        try:
            return ThreadingHTTPServer((HOST, wanted), Handler)
        except (OSError, OverflowError) as error:
            reason = error
    raise ValueError(f"the port must be free, got {port}: {reason}; pass another --port, or none")


def serve(directories: Sequence[Path], port: int | None = None) -> None:
    """Serve the page until Ctrl-C."""
    with make_server(directories, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ follows the runs; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)


class _Handler(BaseHTTPRequestHandler):
    watched: WatchedRuns

    def do_GET(self) -> None:  # the name is http.server's
        """Answer with the page, the part that changes, or the version."""
        name = self.headers.get("Host", "").partition(":")[0]  # browsers leave port 80 out
        if name.lower() not in (HOST, "localhost"):
            self._answer("text/plain", "asked for by another name than localhost", 403)  # by a page of somebody else
        elif self.path == "/":
            self._answer("text/html", self.watched.page()[0])
        elif self.path == "/content":
            text, version = self.watched.content()
            self._answer("application/json", json.dumps({"version": version, "content": text}))
        elif self.path == "/version":
            self._answer("application/json", json.dumps({"version": self.watched.version()}))
        else:
            self._answer("text/plain", "not found", 404)

    def _answer(self, kind: str, text: str, status: int = 200) -> None:
        body = text.encode(errors="replace")
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the browser closed the connection
            self.close_connection = True

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: the page asks every two seconds."""
