"""A browser on the built site. Every test fails where the page logs something, asks another host, or misses a file."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built import CHROMIUM, ROOT, SITE
from playwright.sync_api import Page


def pytest_configure() -> None:
    if not Path(CHROMIUM).is_file():
        pytest.exit(f"there is no {CHROMIUM}: apt-get install chromium, or CHROMIUM=/path/to/one", 2)
    if not (SITE / "index.html").is_file():
        pytest.exit(f"there is no site in {SITE}: nox -s docs", 2)
    sys.path.insert(0, str(ROOT))


class Handler(http.server.SimpleHTTPRequestHandler):
    """As ``python -m http.server`` serves the folder, without its log."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(SITE))

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A browser that closes a connection is no error."""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In place of the guard of the other tests: the browser stays from test to test."""


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
    return {**browser_type_launch_args, "executable_path": CHROMIUM, "args": sandbox}


@pytest.fixture
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "permissions": ["clipboard-read", "clipboard-write"]}


@pytest.fixture
def page(page: Page, base_url: str) -> Iterator[Page]:
    bad: list[str] = []
    page.on("console", lambda m: bad.append(f"console {m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: bad.append(f"page error: {error}"))
    page.on("request", lambda r: None if r.url.startswith((base_url, "data:", "blob:")) else bad.append(f"another host: {r.url}"))
    page.on("response", lambda r: bad.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    yield page
    assert not bad, "\n".join(bad)
