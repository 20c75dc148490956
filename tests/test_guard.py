"""The guard that runs after every test sees whatever a test leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import support

from ddp_pitfalls.catalogue import ROOT


@contextmanager
def a_process() -> Iterator[str]:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        yield f"process {process.pid} (sleep 1000)"
    finally:
        process.kill()
        process.wait()


@contextmanager
def an_orphan() -> Iterator[str]:
    """A process whose parent has gone."""
    shell = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    try:
        yield f"process {shell.stdout.strip()} (sleep 1000)"
    finally:
        os.kill(int(shell.stdout), signal.SIGKILL)


@contextmanager
def a_thread() -> Iterator[str]:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="left by a test")
    thread.start()
    try:
        yield "thread left by a test"
    finally:
        leave.set()
        thread.join()


@contextmanager
def a_variable() -> Iterator[str]:
    os.environ["LEFT_BY_A_TEST"] = "1"
    try:
        yield "environment variable LEFT_BY_A_TEST (None before, '1' now)"
    finally:
        del os.environ["LEFT_BY_A_TEST"]


@contextmanager
def a_changed_variable() -> Iterator[str]:
    path = os.environ["PATH"]
    os.environ["PATH"] = "/nowhere"
    try:
        yield f"environment variable PATH ({path!r} before, '/nowhere' now)"
    finally:
        os.environ["PATH"] = path


@contextmanager
def a_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"listening port {server.getsockname()[1]}"


@contextmanager
def a_file(folder: Path) -> Iterator[str]:
    fd, name = tempfile.mkstemp(dir=folder, prefix="left-by-a-test-")
    os.close(fd)
    try:
        yield f"file {name}"
    finally:
        Path(name).unlink()


LEAKS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "process": a_process,
    "orphan": an_orphan,
    "thread": a_thread,
    "variable": a_variable,
    "changed variable": a_changed_variable,
    "port": a_port,
    "file in the temporary folder": lambda: a_file(Path(tempfile.gettempdir())),
    "file in a folder there": lambda: a_file(next(path for path in Path(tempfile.gettempdir()).iterdir() if path.is_dir())),
    "file in the repository": lambda: a_file(ROOT / "docs"),
    "file in the shared memory": lambda: a_file(support.SHARED_MEMORY),
}
NEEDS_LINUX = {"process", "orphan", "port", "file in the shared memory"}


@pytest.mark.parametrize("name", LEAKS)
def test_what_is_left_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS_LINUX and sys.platform != "linux":
        pytest.skip("needs /proc and /dev/shm")
    monkeypatch.setattr(support, "shared_folders", [ROOT, support.SHARED_MEMORY])
    before = support.belongings()
    with LEAKS[name]() as left:
        assert left in support.left_since(before, patience=0.0)
    assert left not in support.left_since(before, patience=support.CLEAN_UP)


def test_what_is_left_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"left behind: .*variable LEFT_BY_A_TEST"), support.nothing_left(patience=0.0):
        monkeypatch.setenv("LEFT_BY_A_TEST", "1")


def test_every_test_is_guarded(request: pytest.FixtureRequest) -> None:
    assert "nothing_left" in request.fixturenames
