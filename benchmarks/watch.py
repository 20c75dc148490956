"""What ``checks.Watch`` costs, as ratios to a training step and to gathering every gradient, in one run. For ``nox -s benchmark``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import Watch

RANKS = 2
LAYERS, WIDTH, BATCH = 80, 559, 96  # 25 million parameters in 160 tensors


def seconds(function: Callable[[], Any], times: int) -> float:
    """The median time of a call, on the slowest rank."""
    function()
    taken = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    slowest = torch.tensor(median(taken))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def gather_everything(model: nn.Module) -> None:
    """The naive check: every rank gets every gradient of every rank."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        everyone = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.grad)
        assert all(torch.equal(everyone[0], other) for other in everyone)


def measure(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, WIDTH)

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    plain = seconds(train, 15)
    watch = Watch(model, every=10**9, skip=["around"])  # the looks that are measured have no forward before them
    train()  # the first step is compared
    hooks = seconds(lambda: watch._look(optimizer), 200)
    gradients = seconds(lambda: watch._compare(whole=False), 15)
    whole = seconds(lambda: watch._compare(whole=True), 15)
    naive = seconds(lambda: gather_everything(model), 5)
    if rank == 0:
        print(f"{RANKS} ranks, {sum(p.numel() for p in model.parameters()):,} parameters in {len(list(model.parameters()))} tensors")
        for name, took, reference, bar in (
            ("the look at every step / the step", hooks, plain, "at most 0.1 %"),
            ("a comparison of gradients / the step", gradients, plain, "at most 5 %"),
            ("a comparison of parameters too, one in ten / the step", whole, plain, ""),
            ("gathering every gradient / the step", naive, plain, ""),
            ("a comparison of gradients / gathering every gradient", gradients, naive, ""),
            ("all of it, compared every 100 steps / the step", hooks + (0.9 * gradients + 0.1 * whole) / 100, plain, ""),
        ):
            print(f"{name:<58} {100 * took / reference:8.3f} %  {bar}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter, and then abort


def main() -> None:
    """Start the ranks."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(measure, args=(Path(folder),), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
