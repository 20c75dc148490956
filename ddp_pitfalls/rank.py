"""What runs inside one rank: its process group and Fabric, the variant, and the report to the supervisor."""

from __future__ import annotations

import faulthandler
import linecache
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from ddp_pitfalls import hardware, processes, under_watch
from ddp_pitfalls.measure import Ended, Measurement, Notice
from ddp_pitfalls.script import load

STACK_SIGNAL = signal.SIGUSR2  # Lightning keeps SIGUSR1 for SLURM
CHATTER = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning", "torch.distributed")
AGEING = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)  # notices about an API, not about a mistake
OF_THE_MACHINE = r"This DataLoader will create \d+ worker process"  # advice that depends on the number of cores
GROUP_TIMEOUT = 1800.0  # seconds, torch's default with gloo: the supervisor is the one that finds a hang


class Descriptor:
    """An open file that goes to a rank, however the rank is started: inherited by a fork, passed on to a spawned process."""

    def __init__(self, fd: int) -> None:
        self._passed: Any = None
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, passed: Any) -> None:
        self.fd = passed.detach()


@dataclass(frozen=True)
class Job:
    """One variant of one script, on so many ranks of a tier."""

    script: Path
    variant: str
    ranks: int
    tier: hardware.Tier
    watched: bool = False  # by checks.Watch


@dataclass(frozen=True)
class Channels:
    """What connects a rank with its supervisor: messages, standard output, error output, stacks, and the folder for files."""

    messages: Connection
    out: Descriptor
    err: Descriptor
    stacks: Descriptor
    folder: str


def run(job: Job, rank: int, channels: Channels) -> None:
    """Live the whole life of a rank that the supervisor started.

    It reports how it ended, then stays until it is released: a rank that leaves closes its connections, and a peer that hangs
    would get an error instead.
    """
    processes.die_with_supervisor()
    processes.forget_signals()
    os.dup2(channels.out.fd, 1)
    os.dup2(channels.err.fd, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    use_folder(channels.folder)
    faulthandler.disable()  # what enabled it in the supervisor may have named another place than this rank's error output
    faulthandler.register(STACK_SIGNAL, file=channels.stacks.fd, all_threads=True)
    lock = threading.Lock()

    def say(*message: Any) -> None:
        with lock:
            channels.messages.send(message)

    def start() -> Fabric:
        reseed()
        os.environ.update(hardware.rank_environment(job.tier, rank, job.ranks, port=0))
        join_group(job, rank, channels.messages)
        return hardware.fabric(job.tier, job.ranks)

    def entered() -> None:
        faulthandler.dump_traceback(channels.stacks.fd)  # shows the supervisor what a whole one looks like
        say("entered", threading.main_thread().ident, os.fstat(1).st_size, os.fstat(2).st_size)

    ended = perform(job, rank, start, entered, lambda notice: say("notice", notice))
    sys.stdout.flush()
    sys.stderr.flush()
    say("ended", ended)
    channels.messages.recv()
    if ended.how == "measured" and dist.is_initialized():
        dist.destroy_process_group()


def perform(job: Job, rank: int, start: Callable[[], Fabric], entered: Callable[[], None], notice: Callable[[Notice], None]) -> Ended:
    """Run the variant once ``start`` has made the Fabric, and say how it ended."""
    quiet()
    torch.set_num_threads(1)
    try:
        variant = load(job.script).variants[job.variant]
        launched = start()
        hear_warnings(notice)
        look = under_watch.watch_every_model(notice) if job.watched else None
        entered()
        measurement = variant.function(launched)
        if look is not None:
            look()
        if not isinstance(measurement, Measurement):
            raise TypeError(f"{job.variant} returned {type(measurement).__name__}, not a Measurement")
    except (Exception, SystemExit) as error:
        return raised(rank, error, job.script)
    return Ended(rank, "measured", measurement)


def raised(rank: int, error: BaseException, script: Path) -> Ended:
    """The ending of a rank whose variant raised."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(script):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Ended(rank, "raised", error_types=names, message=str(error), line=line, stack=text)


def join_group(job: Job, rank: int, messages: Connection) -> None:
    """Initialise the process group. Rank 0 lets the system choose a port, which nobody else can then take, and tells the others."""
    port = 0 if rank == 0 else messages.recv()
    store = dist.TCPStore("127.0.0.1", port, job.ranks, rank == 0, wait_for_workers=False)
    if rank == 0:
        messages.send(("port", store.port))
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group(job.tier.backend, store=store, rank=rank, world_size=job.ranks)


def use_folder(folder: str) -> None:
    """Make ``tempfile.gettempdir()`` a folder that the ranks of this run share with nobody else, and that goes with them."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def reseed() -> None:
    """Forked ranks start with one generator state; processes that are started one by one do not."""
    torch.seed()
    numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    random.seed()


def quiet() -> None:
    """Without this, Lightning reports what it set up as error output."""
    for name in CHATTER:
        logging.getLogger(name).setLevel(logging.WARNING)


def hear_warnings(notice: Callable[[Notice], None]) -> None:
    """Pass every warning on, instead of printing it, but for those that tell of an ageing API."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        notice(Notice(category.__name__, str(message)))

    warnings.showwarning = show
    for category in AGEING:
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", OF_THE_MACHINE)
