"""Start the ranks of a variant, watch how each ends, find a hang, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from linecache import getline
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ddp_pitfalls import processes
from ddp_pitfalls.measure import FINISHED, Ended, Hangs, Kind, Notice, stands_as_documented
from ddp_pitfalls.rank import STACK_SIGNAL, Channels, Descriptor, Job, run

START = 180.0  # seconds for all ranks to enter the variant: spawned ranks import torch at once, on a busy machine
HANG_AFTER = 1.0  # seconds after that until the first look at where the ranks stand
LOOK_AGAIN = 0.25  # seconds until the second look, which must see the same
PATIENCE = 30.0  # seconds for a variant that is not documented to hang where it stands: a busy machine is slow, not stuck
AFTERMATH = 0.25  # seconds that the other ranks get to fail as well, once one has
LEAVE = 2.0  # seconds for a released rank to end by itself
OUTPUT_LIMIT = 100_000  # characters kept of what a rank wrote


@dataclass
class Rank:
    """The supervisor's side of one rank."""

    number: int
    process: BaseProcess
    messages: Connection
    out: int
    err: int
    stacks: int
    main_thread: int | None = None  # set once the rank has entered the variant
    outermost: str = ""  # how a dump of its threads ends: with the last frame of the main thread
    skip: tuple[int, int] = (0, 0)  # what stood in out and err by then
    notices: list[Notice] = field(default_factory=list)
    ended: Ended | None = None


def supervise(job: Job, kind: Kind, method: str, patience: float = PATIENCE) -> list[Ended]:
    """Run a variant on its ranks and say how each ended.

    ``kind`` is only used to stop waiting early where every rank stands as documented; ``method`` is fork, forkserver or spawn.
    """
    with started(job, method) as ranks:
        watch = _Watch(ranks, kind, str(job.script), patience)
        while not watch.over():
            _receive(ranks, timeout=watch.next_look())
        return _in_order([_whole(rank, watch.verdict_on(rank)) for rank in ranks])


@contextmanager
def started(job: Job, method: str) -> Iterator[list[Rank]]:
    """The ranks of a job, as processes; all of them, and their children, are gone afterwards."""
    context = multiprocessing.get_context(method)
    ranks: list[Rank] = []
    with ExitStack() as afterwards:
        with processes.signals_wait():
            folder = processes.make_folder()
            afterwards.callback(_clean_up, ranks, folder)
            for number in range(job.ranks):
                ours, theirs = multiprocessing.Pipe()
                out, err, stacks = (processes.anonymous_file() for _ in range(3))
                channels = Channels(theirs, Descriptor(out), Descriptor(err), Descriptor(stacks), str(folder.path))
                process = context.Process(target=run, args=(job, number, channels), daemon=False)  # type: ignore[attr-defined]
                ranks.append(Rank(number, process, ours, out, err, stacks))
                process.start()
                theirs.close()
        yield ranks


def _clean_up(ranks: Sequence[Rank], folder: processes.Folder) -> None:
    with processes.uninterrupted():
        _end(ranks)
        folder.remove()


def _end(ranks: Sequence[Rank]) -> None:
    released = [r for r in ranks if r.ended is not None and r.ended.how == "measured"]
    for rank in released:
        _say(rank, "leave")
    deadline = time.monotonic() + LEAVE
    for rank in released:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        if rank.process.pid is not None:
            processes.kill_group(rank.process)
            rank.process.join()
            rank.process.close()
        rank.messages.close()
        for fd in (rank.out, rank.err, rank.stacks):
            os.close(fd)


def _say(rank: Rank, message: Any) -> None:
    with suppress(OSError):  # it has gone, and its sentinel says so
        rank.messages.send(message)


def _receive(ranks: Sequence[Rank], timeout: float) -> None:
    """Wait for the next message or death of any rank that has not ended, and note it."""
    waiting: dict[Any, Rank] = {end: r for r in ranks if r.ended is None for end in (r.messages, r.process.sentinel)}
    for ready in wait(list(waiting), timeout):
        rank = waiting[ready]
        try:
            while rank.ended is None and rank.messages.poll():
                _note(ranks, rank, rank.messages.recv())
        except (EOFError, ConnectionResetError):
            rank.process.join(LEAVE)
        if rank.ended is None and not rank.process.is_alive():
            rank.ended = _death(rank, _failures(ranks))


def _note(ranks: Sequence[Rank], rank: Rank, message: tuple[Any, ...]) -> None:
    match message:
        case ("port", port):
            for other in ranks:
                if other is not rank:
                    _say(other, port)
        case ("entered", main_thread, out, err):
            rank.main_thread, rank.skip = main_thread, (out, err)
            rank.outermost = _read(rank.stacks).rstrip().rpartition("\n")[2]
        case ("notice", notice):
            rank.notices.append(notice)
        case ("ended", ended):
            rank.ended = replace(ended, order=_failures(ranks))


def _failures(ranks: Sequence[Rank]) -> int:
    return sum(r.ended is not None and r.ended.how != "measured" for r in ranks)


def _death(rank: Rank, order: int) -> Ended:
    code = rank.process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return Ended(rank.number, "died", message=f"was ended by {name}", signal=name, order=order)
    where = "in the variant" if rank.main_thread is not None else "before it entered the variant"
    return Ended(rank.number, "died", message=f"left {where} with exit code {code}, without a measurement", order=order)


def _in_order(ends: Sequence[Ended]) -> list[Ended]:
    """Deaths before errors: a rank that dies closes its connections, and the error of a peer that notices may be heard first."""
    failed = sorted((e for e in ends if e.how in ("died", "raised")), key=lambda e: (e.how != "died", e.order))
    orders = {end.rank: order for order, end in enumerate(failed)}
    return [replace(end, order=orders.get(end.rank, 0)) for end in ends]


def _whole(rank: Rank, ended: Ended) -> Ended:
    """The ending, with what the rank was told and what it wrote since it entered the variant."""
    out, err = (_read(fd, skip) for fd, skip in zip((rank.out, rank.err), rank.skip))
    return replace(ended, notices=tuple(rank.notices), output=err, printed=out)


def _read(fd: int, start: int = 0) -> str:
    return os.pread(fd, OUTPUT_LIMIT, start).decode(errors="replace")


class _Watch:
    """When to stop waiting, and what to say of a rank that has not ended by then."""

    def __init__(self, ranks: Sequence[Rank], kind: Kind, script: str, patience: float) -> None:
        self.ranks, self.kind, self.script, self.patience = ranks, kind, script, patience
        self.began = time.monotonic()
        self.entered: float | None = None
        self.failed: float | None = None
        self.look = START
        self.seen: dict[int, list[str]] = {}
        self.still = False
        self.stuck = False

    def next_look(self) -> float:
        """Seconds until there is something to do, whatever the ranks say."""
        now = time.monotonic()
        until = self.began + START if self.entered is None else self.entered + self.look
        if self.failed is not None:
            until = min(until, self.failed + AFTERMATH)
        return max(0.0, until - now)

    def over(self) -> bool:
        """Whether every rank has ended, one has failed, or the rest is stuck."""
        now = time.monotonic()
        if all(r.ended is not None for r in self.ranks):
            return True
        if self.failed is None and _failures(self.ranks):
            self.failed = now
        if self.failed is not None:
            return now >= self.failed + AFTERMATH
        if self.entered is None:
            if any(r.main_thread is None for r in self.ranks):
                return now >= self.began + START
            self.entered = now
            self.look = HANG_AFTER if isinstance(self.kind, Hangs) else max(HANG_AFTER, self.patience - LOOK_AGAIN)
        if now >= self.entered + self.look:
            self.stuck = self._stuck(now - self.entered)
            self.look = now - self.entered + LOOK_AGAIN
        return self.stuck

    def _stuck(self, waited: float) -> bool:
        """Look at where the ranks stand. They are stuck if two looks in a row agree, and stand as documented or have had all patience.

        A rank that computes is not asked before that: it does not hang, and in Python 3.11 a stack that is read while it changes can
        end the process.
        """
        running = [r for r in self.ranks if r.ended is None]
        if waited < self.patience - LOOK_AGAIN and not all(asleep(r) for r in running):
            self.seen = {}
            return False
        before, self.seen = self.seen, {r.number: ask(r) for r in running}
        self.still = before == self.seen and all(self.seen.values())
        if waited >= self.patience:
            return True
        return self.still and isinstance(self.kind, Hangs) and stands_as_documented(self.kind, self._lines(self.kind))

    def _lines(self, kind: Hangs) -> dict[int, str | None]:
        return {r.number: FINISHED if r.ended is not None else line_of(self.seen[r.number], self.script) for r in self.ranks}

    def verdict_on(self, rank: Rank) -> Ended:
        if rank.ended is not None:
            return rank.ended
        if rank.main_thread is None and self.failed is None:
            return Ended(rank.number, "died", message=f"did not enter the variant within {START:g} seconds")
        if not self.stuck:
            return Ended(rank.number, "unfinished", message="was stopped after another rank had failed")
        stack = self.seen.get(rank.number, [])
        line = line_of(stack, self.script)
        if not self.still:
            return Ended(rank.number, "unfinished", line=line, message=f"was still running after {self.patience:g} seconds")
        return Ended(rank.number, "stuck", line=line, message=stack[0].strip() if stack else "no stack", stack="\n".join(stack))


FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in ')


def line_of(stack: Sequence[str], script: str) -> str | None:
    """The innermost line of the script on a stack (innermost frame first)."""
    for entry in stack:
        if (frame := FRAME.search(entry)) and frame["file"] == script:
            return getline(script, int(frame["line"])).strip()
    return None


def asleep(rank: Rank) -> bool:
    """Whether the rank waits for something. Without /proc (macOS) nobody knows, and it may be."""
    try:
        stat = Path(f"/proc/{rank.process.pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(") ")[2].startswith(("S", "D"))


def ask(rank: Rank) -> list[str]:
    """The frames of the rank's main thread, innermost first: ``faulthandler`` writes them whatever the rank waits in."""
    start = os.fstat(rank.stacks).st_size
    assert rank.process.pid is not None
    try:
        os.kill(rank.process.pid, STACK_SIGNAL)
    except ProcessLookupError:
        return []
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.01)
        dump = _read(rank.stacks, start).rstrip()
        if dump.endswith((rank.outermost, "\n  ...")):  # whole; the second is for stacks of more than a hundred frames
            return main_thread_frames(dump, rank.main_thread or 0)
    return []


def main_thread_frames(dump: str, ident: int) -> list[str]:
    """The frames of one thread in a dump of all threads by ``faulthandler``."""
    frames: list[str] | None = None
    for line in dump.splitlines():
        if header := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
            if frames is not None:
                break
            frames = [] if int(header[1], 16) == ident else None
        elif frames is not None and line.strip():
            frames.append(line.strip())
    return frames or []
