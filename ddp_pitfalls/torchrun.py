"""Run the variants of a script on the ranks that torchrun started, on one machine or several."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

from ddp_pitfalls import hardware
from ddp_pitfalls.measure import NOT_MEASURED, Ended, Hangs, Kind, Notice, Verdict, judge
from ddp_pitfalls.rank import Job, perform, use_folder
from ddp_pitfalls.report import conclusion, exit_code, heading, report
from ddp_pitfalls.script import Script, Variant
from ddp_pitfalls.supervise import START


def run(script: Script, wanted: Sequence[Variant], accelerator: str, patience: float) -> int:
    """Run the variants on this rank, print the verdicts on rank 0, and return the exit code, which is the same on every rank.

    Nobody but the process group finds a hang here: ``patience`` is how many seconds a collective may wait. A variant that fails
    leaves the process group unusable, so those after it are not measured.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    nodes, devices = hardware.nodes_and_devices(ranks)
    tier = _tier(accelerator, devices)
    timeout = timedelta(seconds=patience)
    store.set(f"arrived/{rank}", b"")
    store.wait([f"arrived/{r}" for r in range(ranks)], timedelta(seconds=START))  # importing torch may take longer than a collective
    dist.init_process_group(tier.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=ranks, timeout=timeout)

    def start() -> Fabric:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend=tier.backend)
        launched = Fabric(accelerator=tier.accelerator, devices=devices, num_nodes=nodes, strategy=strategy)
        launched.launch()
        return launched

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(heading(script, tier, ranks))
    verdicts: dict[str, Verdict] = {}
    spoiler = ""
    with _node_folder(store):
        for one in wanted:
            if reason := hardware.missing(one.needs, tier) or _after(spoiler, one):
                verdicts[one.name] = Verdict(NOT_MEASURED, reason)
            else:
                ended = _performed(Job(script.path, one.name, ranks, tier), rank, start, one.kind, patience)
                verdicts[one.name] = judge(script.side, one.kind, _shared(store, one.name, ended, ranks, patience))
                if any(end.how != "measured" for end in verdicts[one.name].ranks):
                    spoiler = one.name
            say(report(one, verdicts[one.name]))
        say(conclusion(script, list(verdicts.values())))
        _shared(store, "leaving", Ended(rank, "unfinished"), ranks, patience)  # whoever hosts the store leaves with the others
    return exit_code(list(verdicts.values()))


def _after(spoiler: str, wanted: Variant) -> str:
    """Why a variant cannot be measured any more, or nothing."""
    return f"needs a process group that {spoiler} has not spoilt: run it alone with --variant {wanted.name}" if spoiler else ""


def _tier(accelerator: str, devices: int) -> hardware.Tier:
    if accelerator == hardware.CUDA_SHARED.name:
        raise hardware.Absent("tier cuda-shared is for ranks that this script starts itself: leave torchrun away")
    tier = hardware.choose(accelerator, devices, hardware.count_gpus())
    return hardware.CPU if tier is hardware.CUDA_SHARED else tier


@contextmanager
def _node_folder(store: Any) -> Iterator[None]:
    """A folder for the files of the ranks on this node, made and removed by the first of them."""
    key = f"folder/{os.environ['GROUP_RANK']}"
    if first := os.environ["LOCAL_RANK"] == "0":
        store.set(key, tempfile.mkdtemp(prefix="ddp-pitfalls-"))
    folder = store.get(key).decode()
    use_folder(folder)
    try:
        yield
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _performed(job: Job, rank: int, start: Callable[[], Fabric], kind: Kind, patience: float) -> Ended:
    """Run the variant in this process. An error that comes when the process group's patience is over tells where the rank hung."""
    notices: list[Notice] = []
    entered: list[float] = []
    ended = perform(job, rank, start, lambda: entered.append(time.monotonic()), notices.append)
    if ended.how == "raised" and isinstance(kind, Hangs) and entered and time.monotonic() >= entered[0] + patience:
        ended = replace(ended, how="stuck")
    return replace(ended, notices=tuple(notices))


def _shared(store: Any, key: str, mine: Ended, ranks: int, patience: float) -> list[Ended]:
    """What every rank says under this key, through the launcher's store: it works when the process group does not."""
    store.set(f"{key}/{mine.rank}", pickle.dumps(mine))
    ends = []
    for rank in range(ranks):
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=3 * patience))
            ends.append(pickle.loads(store.get(f"{key}/{rank}")))
        except RuntimeError:
            ends.append(Ended(rank, "unfinished", message="has not said how it ended"))
    return ends
