"""Run many scripts from one warm process: torch and Lightning are imported once, and every script gets a fork of it."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_pitfalls import processes
from ddp_pitfalls.measure import CRASHED, NOT_MEASURED, NOT_REPRODUCED, REPRO, Silent, Verdict
from ddp_pitfalls.results import Environment, VariantResult, variant_result

if TYPE_CHECKING:
    from ddp_pitfalls.hardware import Tier

WARM = ("ddp_pitfalls.launch", "lightning.pytorch")  # what the warm process imports
JOBS = (os.cpu_count() or 1) + 4  # scripts at a time: those that show a hang only wait
SILENCE = 300.0  # seconds without a word from a script, over which a variant may not take, after which it is ended


class NotHere(Exception):
    """What was asked for is not on this machine, for no script; the message says what there is."""


@dataclass(frozen=True)
class Asked:
    """How to run the scripts."""

    ranks: int = 2
    accelerator: str = "auto"
    method: str = ""  # how ranks are started; nothing for the way of this system
    patience: float = 30.0  # seconds, as in supervise
    watched: bool = False  # by checks.Watch: only what fails silently, and what is fixed


@dataclass(frozen=True)
class Outcome:
    """One variant of one script: its verdict, the same for people, and what a results file keeps of it."""

    variant: str
    verdict: Verdict
    report: str
    seconds: float
    kept: VariantResult
    news: str = ""


@dataclass
class ScriptRun:
    """One script: where it ran, its outcomes so far, and the reason where it could not be run to its end."""

    pitfall: str
    path: Path
    environment: Environment | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""

    @property
    def side(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        """The script as people write it."""
        return f"{self.side}/{self.path.name}"

    @property
    def as_documented(self) -> bool:
        return not self.problem and all(o.verdict.as_documented or o.verdict.word == NOT_MEASURED for o in self.outcomes)


def run(scripts: Sequence[tuple[str, Path]], asked: Asked, jobs: int) -> Iterator[ScriptRun]:
    """Run scripts, ``jobs`` at a time, each in a process of its own, and yield every one when it has ended.

    Whatever a script does, the others go on; when this process ends, all of them and their ranks end. Raises NotHere where the
    machine lacks what was asked for.
    """
    waiting = [ScriptRun(pitfall, path) for pitfall, path in scripts]
    with _running() as running:
        while waiting or running:
            while waiting and len(running) < jobs:
                _start(running, waiting.pop(0), asked)
            ready = wait(list(running), timeout=max(0.0, min(p.heard for p in running.values()) + SILENCE - time.monotonic()))
            for receiver in [r for r in running if r in ready]:
                _hear(running[receiver])
            for receiver, process in list(running.items()):
                if time.monotonic() >= process.heard + SILENCE:
                    process.run.problem = f"has said nothing for {SILENCE:g} seconds, and was ended"
                    process.over = True
                if process.over:
                    _stop(running.pop(receiver))
                    yield process.run


@dataclass
class _Process:
    run: ScriptRun
    process: Any
    receiver: Connection
    heard: float
    over: bool = False


@contextmanager
def _running() -> Iterator[dict[Connection, _Process]]:
    running: dict[Connection, _Process] = {}
    try:
        yield running
    finally:
        for process in running.values():
            _stop(process)


def _start(running: dict[Connection, _Process], script: ScriptRun, asked: Asked) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=perform, args=(script.path, asked, sender))
    process.start()
    sender.close()
    running[receiver] = _Process(script, process, receiver, time.monotonic())


def _hear(process: _Process) -> None:
    """The next message: the environment, an outcome, a problem, or None at the end. Raises NotHere.

    Only the pipe tells that a script has gone: its process may outlive the warm process that started it.
    """
    process.heard = time.monotonic()
    try:
        message = process.receiver.recv()
    except (EOFError, OSError):
        message = "its process was ended from outside, or left without a word"
    if isinstance(message, NotHere):
        raise message
    if isinstance(message, Outcome):
        process.run.outcomes.append(message)
    elif isinstance(message, Environment):
        process.run.environment = message
    else:
        process.run.problem = message or ""
        process.over = True


def _stop(process: _Process) -> None:
    processes.kill_group(process.process)
    process.process.join()
    process.process.close()
    process.receiver.close()


def perform(path: Path, asked: Asked, sender: Connection) -> None:
    """Run one script in this process, and send its Environment, an Outcome for each variant, then None; NotHere where the tier is not
    here; a string where it cannot be run.
    """
    from ddp_pitfalls import hardware
    from ddp_pitfalls.script import BadScript

    processes.die_with_supervisor()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    try:
        for message in _messages(path, asked):
            sender.send(message)
        sender.send(None)
    except (hardware.Absent, BadScript, processes.NoRoom) as error:
        sender.send(str(error))
    except Exception as error:
        sender.send(f"{path}: {type(error).__name__}: {error}")
    os._exit(0)


def _messages(path: Path, asked: Asked) -> Iterator[Environment | Outcome | NotHere]:
    from ddp_pitfalls import hardware, launch
    from ddp_pitfalls.report import report
    from ddp_pitfalls.script import load

    script = load(path)
    launch.refuse_threads()
    gpus = hardware.gpu_names()
    try:
        tier = hardware.choose(asked.accelerator, asked.ranks, len(gpus))
    except hardware.Absent as error:
        yield NotHere(str(error))
        return
    yield environment(tier, asked.ranks, gpus)
    for variant in script.variants.values():
        if asked.watched and not isinstance(variant.kind, Silent):
            continue
        began = time.monotonic()
        method = asked.method or hardware.METHOD
        verdict = launch.verdict_on(script, variant, tier, asked.ranks, method, asked.patience, asked.watched)
        seconds = time.monotonic() - began
        news = news_of(verdict, hardware.versions()) if script.side == REPRO else ""
        kept = variant_result(variant.kind, verdict, bool(variant.varies), variant.protects)
        yield Outcome(variant.name, verdict, report(variant, verdict), seconds, kept, news)


def environment(tier: Tier, ranks: int, gpus: Sequence[str]) -> Environment:
    """What the ranks of this process run on, as a results file names it."""
    from ddp_pitfalls import hardware

    here = hardware.versions()
    devices = ", ".join(gpus) if tier.accelerator == "cuda" else f"{os.cpu_count()} CPU cores"
    return Environment(here["torch"], here["lightning"], tier.name, tier.backend, ranks, here["python"], f"{platform.machine()}, {devices}")


def news_of(verdict: Verdict, versions: dict[str, str]) -> str:
    """A sentence for a pitfall that does not show any more: this is what the project is there to notice."""
    here = f"torch {versions['torch']} and lightning {versions['lightning']}"
    if verdict.word == NOT_REPRODUCED:
        return f"no longer reproduces with {here}: fixed upstream, or the script needs care"
    if verdict.word == CRASHED:
        return f"fails in another way with {here}: the library has changed, or the script needs care"
    return ""
