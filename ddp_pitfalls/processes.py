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
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does not stop the clean-up; it takes a fraction of a second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """A new folder. Raises OSError where there is no room for one."""
    path = tempfile.mkdtemp(prefix="ddp-pitfalls-")
    after_us = ["sh", "-c", 'read _; sleep 0.5; rm -rf "$1"', "sh", path]  # read ends when nobody holds the pipe any more
    remover = subprocess.Popen(after_us, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    return Folder(Path(path), remover)


def anonymous_file() -> int:
    """A file without a name: nothing to delete, and in memory where that is possible, so that a full disk hides nothing."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ddp-pitfalls")
    fd, name = tempfile.mkstemp()
    Path(name).unlink()
    return fd
