"""Which hardware tier is here, what a variant may need of it, and the Fabric for it. What differs by device stands here."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy
from packaging.requirements import InvalidRequirement, Requirement

from ddp_pitfalls import processes

FORKS = sys.platform == "linux"  # elsewhere a forked process may not use its system's libraries: macOS spawns
METHOD = "fork" if FORKS else "spawn"  # how ranks are started, unless a variant needs another way


@dataclass(frozen=True)
class Tier:
    """A kind of hardware to run ranks on, and the backend that goes with it."""

    name: str
    accelerator: str
    backend: str


CUDA = Tier("cuda", "cuda", "nccl")  # one GPU a rank
CUDA_SHARED = Tier("cuda-shared", "cuda", "gloo")  # all ranks on one GPU, which NCCL refuses
CPU = Tier("cpu", "cpu", "gloo")
TIERS = {tier.name: tier for tier in (CUDA, CUDA_SHARED, CPU)}


class Absent(Exception):
    """Something asked for by name is not here; the message says what is."""


class UnknownNeed(Exception):
    """A variant needs what nobody knows; the message says what it may need."""


def count_gpus() -> int:
    """The number of visible CUDA devices."""
    return len(gpu_names())


def gpu_names() -> list[str]:
    """The visible CUDA devices, listed in a throw-away process: a process that has used CUDA cannot fork."""
    if not torch.backends.cuda.is_built():
        return []
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context(METHOD)
    child = context.Process(target=_send_names, args=(sender,))
    with processes.signals_wait():
        child.start()
    sender.close()
    try:
        return list(receiver.recv())
    except EOFError:
        return []
    finally:
        child.join()


def _send_names(sender: Connection) -> None:
    processes.forget_signals()
    sender.send([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])


def choose(wanted: str, ranks: int, gpus: int) -> Tier:
    """The tier called ``wanted``, or for ``auto`` the best one here. Raises Absent where it is not here."""
    found = f"found {gpus} GPU{'' if gpus == 1 else 's'}"
    if wanted == "auto":
        if gpus >= ranks:
            return CUDA
        return CUDA_SHARED if gpus == 1 else CPU
    tier = TIERS[wanted]
    if tier is CUDA and gpus < ranks:
        fewer = ", or fewer --ranks" if gpus > 1 else ""
        raise Absent(f"tier cuda with {ranks} ranks needs {ranks} GPUs, {found}: use --accelerator cpu{fewer}")
    if tier is CUDA_SHARED and gpus < 1:
        raise Absent(f"tier cuda-shared needs a GPU, {found}: use --accelerator cpu")
    return tier


def missing(needs: Iterable[str], tier: Tier) -> str | None:
    """The first need that is not met here, as a sentence, or None. Raises UnknownNeed."""
    found = [(need, *_is_met(need, tier)) for need in needs]  # all of them: one that nobody knows may stand behind one that is not met
    return next((f"needs {NEEDS.get(need, need)}, and {here}" for need, met, here in found if not met), None)


def _is_met(need: str, tier: Tier) -> tuple[bool, str]:
    """Whether a need is met, and what is here instead."""
    if need == "gpu":
        return tier.accelerator == "cuda", f"the tier is {tier.name}"
    if need == "2 gpus":
        return tier is CUDA, f"the tier is {tier.name}"
    if need in ("gloo", "nccl"):
        return tier.backend == need, f"the backend is {tier.backend}"
    if need == "spawn":
        return True, ""  # the runner starts such a variant by spawning
    return _package_here(need)


NEEDS = {"gpu": "a GPU", "2 gpus": "two GPUs"}
PACKAGES = ("torch", "lightning", "nvidia-ml-py")  # which a variant may need, or a release of them: torch>=2.1


def _package_here(need: str) -> tuple[bool, str]:
    try:
        wanted = Requirement(need)
    except InvalidRequirement:
        wanted = None
    if wanted is None or wanted.name not in PACKAGES:
        raise UnknownNeed(f"unknown need {need!r}: it is one of gpu, 2 gpus, gloo, nccl, spawn, or a package: {', '.join(PACKAGES)}")
    try:
        here = released(wanted.name)
    except PackageNotFoundError:
        return False, "it is not installed"
    return wanted.specifier.contains(here, prereleases=True), f"{wanted.name} {here} is here"


def released(package: str) -> str:
    """The installed release of a package, without the build's suffix."""
    return version(package).split("+")[0]


def versions() -> dict[str, str]:
    """What a verdict depends on."""
    return {"torch": released("torch"), "lightning": released("lightning"), "python": platform.python_version()}


def rank_environment(tier: Tier, rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of one rank, as a launcher on one machine sets them; ``cuda-shared`` makes each rank a node of one device."""
    node, local = (rank, 0) if tier is CUDA_SHARED else (0, rank)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def fabric(tier: Tier, ranks: int) -> Fabric:
    """The launched Fabric of this rank; the process group is up already."""
    devices, nodes = (1, ranks) if tier is CUDA_SHARED else (ranks, 1)
    launched = Fabric(accelerator=tier.accelerator, devices=devices, num_nodes=nodes, strategy=strategy(tier))
    launched.launch()
    return launched


def strategy(tier: Tier, **options: Any) -> DDPStrategy:
    """Fabric's DDP, told where it runs: left to guess, Lightning would follow a SLURM allocation's variables."""
    return DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend=tier.backend, **options)


def nodes_and_devices(ranks: int) -> tuple[int, int]:
    """Under torchrun: the number of nodes, and the ranks on each."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return ranks // local, local
