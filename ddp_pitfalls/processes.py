"""Processes and files that cannot outlive the one that started them. No torch."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM)


def die_with_supervisor() -> None:
    """Lead a process group of its own, which ends with the supervisor, whatever ended that.

    The supervisor holds the other end of this pipe; when the last holder is gone, the pipe's state changes. Linux itself
    then kills the group, also while this process waits in a collective and whatever children it has.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = int(parent.sentinel)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([pipe], timeout=0):  # it was gone before the signal was asked for
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_kill_group_after, args=(pipe,), daemon=True).start()


def _kill_group_after(pipe: int) -> None:
    wait([pipe])
    os.killpg(0, signal.SIGKILL)


def kill_group(process: BaseProcess) -> None:
    """End a rank and its children; a rank that had no time to make its own group is ended alone."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM come at the end of the block: while a process is forked, Python would lose their exception."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget_signals() -> None:
    """In a process that was started under ``signals_wait``: react as any Python does, and only to what comes from now on."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # forgets those that have come
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does not stop the clean-up; it takes a fraction of a second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Terminated(BaseException):
    """SIGTERM, as Ctrl-C is a KeyboardInterrupt: nothing on the way out takes it for an error."""


def raise_on_sigterm() -> None:
    """Raise Terminated in the main thread when this process is asked to end."""

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)


class NoRoom(Exception):
    """The temporary folder is full, or not there; the message says what to do."""


@dataclass(frozen=True)
class Folder:
    """A folder for the files of one run, and the process that removes it should this one be killed."""

    path: Path
    remover: subprocess.Popen[bytes]

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.remover.kill()
        self.remover.communicate()


def make_folder() -> Folder:
    """A new folder. Raises NoRoom where there cannot be one."""
    try:
        path = tempfile.mkdtemp(prefix="ddp-pitfalls-")
    except OSError as error:
        raise NoRoom(f"no room for the files of a run in {tempfile.gettempdir()}: set TMPDIR") from error
    after_us = ["sh", "-c", 'read _; sleep 0.5; rm -rf "$1"', "sh", path]  # read ends when nobody holds the pipe any more
    remover = subprocess.Popen(after_us, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    return Folder(Path(path), remover)


@contextmanager
def temporary_files() -> Iterator[None]:
    """Keep every temporary file of this process, and of those that it starts, in a folder that goes when this process does."""
    folder = make_folder()
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    try:
        yield
    finally:
        folder.remove()
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]


def anonymous_file() -> int:
    """A file without a name: nothing to delete, and in memory where that is possible, so that a full disk hides nothing."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddp-pitfalls")
    fd, name = tempfile.mkstemp()
    Path(name).unlink()
    return fd
