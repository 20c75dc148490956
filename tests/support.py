"""What the tests share: what a test may not leave behind, and ways to run a script."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from ddp_pitfalls import hardware
from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.launch import verdict_on
from ddp_pitfalls.measure import REPRO, Verdict
from ddp_pitfalls.script import load
from ddp_pitfalls.supervise import PATIENCE

SCRIPTS = Path(__file__).resolve().parent / "scripts"
SHARED_MEMORY = Path("/dev/shm")
NOT_OURS = {".git", ".nox", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "build", "site"}  # as in .gitignore
shared_folders = [ROOT, SHARED_MEMORY]  # none with pytest --shared-tree, while somebody else writes there too
CLEAN_UP = 20.0  # seconds for what ends by itself: a rank whose supervisor was killed while it imported torch, on a busy machine


@dataclass(frozen=True)
class Belongings:
    """What this process and its descendants hold outside their memory."""

    processes: Mapping[tuple[int, str], str]  # process id and start time: command
    threads: Mapping[int, str]
    environment: Mapping[str, str]
    sockets: frozenset[str]  # inodes
    files: frozenset[Path]


@contextmanager
def nothing_left(patience: float = CLEAN_UP) -> Iterator[None]:
    """Raise AssertionError where the body leaves a process, thread, environment variable, listening port or file."""
    before = belongings()
    yield
    if left := left_since(before, patience):
        raise AssertionError("left behind: " + "; ".join(left))


def belongings() -> Belongings:
    """What there is now. Without /proc (macOS) processes that are not multiprocessing's, and ports, are not seen."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return Belongings(_descendants(), _threads(), environment, _sockets(), frozenset(_files()))


def left_since(before: Belongings, patience: float) -> list[str]:
    """What there is more than before, once it has had ``patience`` seconds to go by itself."""
    deadline = time.monotonic() + patience
    while True:
        left = list(_more(before, belongings()))
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def _more(before: Belongings, now: Belongings) -> Iterator[str]:
    yield from (f"process {key[0]} ({command})" for key, command in now.processes.items() if key not in before.processes)
    yield from (f"thread {name}" for id, name in now.threads.items() if id not in before.threads)
    for name in sorted({*before.environment, *now.environment}):
        old, new = before.environment.get(name), now.environment.get(name)
        if old != new:
            yield f"environment variable {name} ({old!r} before, {new!r} now)"
    if sockets := now.sockets - before.sockets:
        yield from (f"listening port {port}" for inode, port in _listening().items() if inode in sockets)
    yield from (f"file {path}" for path in sorted(now.files - before.files) if not _held_by_others(path))


def adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one, so that a test sees them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _servants() -> set[int | None]:
    """The processes that multiprocessing keeps for later tests."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


def _descendants() -> dict[tuple[int, str], str]:
    if not Path("/proc/self/stat").exists():
        return {(child.pid or 0, ""): child.name for child in multiprocessing.active_children()}
    return {(pid, born): _command(pid) for pid, born in _below(os.getpid()) if pid not in _servants()}


def _below(parent: int) -> Iterator[tuple[int, str]]:
    """Process id and start time of everything that runs below a process."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, _text(children).split()):
            _, _, rest = _text(Path(f"/proc/{pid}/stat")).rpartition(") ")
            state, *fields = rest.split() or ["gone"]
            if state == "Z" and parent == os.getpid():
                _reap(pid)
            elif state not in ("Z", "gone"):
                yield pid, fields[18]
                yield from _below(pid)


def _text(path: Path) -> str:
    """What a file of /proc says; nothing, when its process has gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _reap(pid: int) -> None:
    """Take notice of the end of an orphan; children of this process itself have somebody who waits for them."""
    ours = {child.pid for child in multiprocessing.active_children()}
    if pid not in ours:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _command(pid: int) -> str:
    return _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:100]


def _threads() -> dict[int, str]:
    """The threads of this process by native id, those of libraries included."""
    found = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):
        found.setdefault(int(task.name), f"of a library: {_text(task / 'comm').strip()}")
    return found


def _sockets() -> frozenset[str]:
    """The sockets that this process holds, or one that multiprocessing keeps."""
    held = set()
    for pid in (os.getpid(), *_servants()):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                held.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    return frozenset(inode for inode in held if inode.isdigit())


def _listening() -> dict[str, str]:
    """The TCP ports on which somebody listens, by the inode of the socket."""
    ports = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _text(Path(table)).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = str(int(fields[1].rpartition(":")[2], 16))
    return ports


def _files() -> Iterator[Path]:
    """The files in the temporary folder, the shared memory and the repository."""
    for root in (Path(tempfile.gettempdir()), *shared_folders):
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if root != ROOT or not (name in NOT_OURS or name.endswith(".egg-info"))]
            yield from (Path(folder, name) for name in (*inner, *names))


def _held_by_others(path: Path) -> bool:
    """Whether a process outside the tests has this file of the shared memory open: the machine may run other things with torch."""
    if SHARED_MEMORY not in path.parents:
        return False
    ours = {pid for pid, _ in _descendants()} | {os.getpid(), *_servants()}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in ours:
            with suppress(OSError):
                if str(path) in _text(process / "maps") or any(fd.readlink() == path for fd in (process / "fd").glob("*")):
                    return True
    return not path.exists()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait until the condition is true, and return what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:g} seconds for {what}")


def judged(
    script: str | Path, variant: str, side: str = REPRO, *, method: str = "forkserver", ranks: int = 2, patience: float = PATIENCE
) -> Verdict:
    """The verdict on one variant of a script of tests/scripts, or of one at a path, on CPU ranks."""
    loaded = load(script if isinstance(script, Path) else SCRIPTS / side / f"{script}.py")
    return verdict_on(loaded, loaded.variants[variant], hardware.CPU, ranks, method, patience)


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it wrote."""

    code: int | None
    out: str
    err: str


def python(*arguments: str | Path, **environment: str) -> Finished:
    """Run ``python`` as a user does."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


def run_script(path: Path, *arguments: str, **environment: str) -> Finished:
    """The same for a script, in a process that has torch and Lightning imported already: quick."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start_script(path, arguments, environment, out, err)
        try:
            process.join(240)
            return Finished(process.exitcode, out.read_text(), err.read_text())
        finally:
            process.kill()
            process.join()
            process.close()


def start_script(path: Path, arguments: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> Any:
    """Start a script in a process that has torch and Lightning imported already, with its output in two files."""
    process = multiprocessing.get_context("forkserver").Process(target=_be_script, args=(path, arguments, environment, out, err))
    process.start()
    return process


def _be_script(path: Path, arguments: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> None:
    for number, file in ((1, out), (2, err)):
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [str(path), *arguments]
    os.environ.update(environment)
    runpy.run_path(str(path), run_name="__main__")


def verdict_lines(out: str) -> dict[str, str]:
    """What a script's output says of each variant, and of all of them."""
    lines = dict(re.findall(r"^(\w+): (reproduced|fixed|not reproduced|not fixed|crashed|not measured)$", out, re.MULTILINE))
    last = out.strip().splitlines()[-1]
    return {**lines, "all": last}
