"""What ``step_loss`` promises, on one to three CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import step_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"


def layer():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def tokens(rank, number):
    count = 1 + 3 * rank + 2 * number
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def gradient_is_that_of_all_tokens(rank, ranks, micro_batches=2):
    model = DistributedDataParallel(layer())
    counts = [len(tokens(rank, number)) for number in range(micro_batches)]
    for number in range(micro_batches):
        with model.no_sync() if number < micro_batches - 1 else torch.enable_grad():
            step_loss(model(tokens(rank, number)).square().squeeze(1), counts).backward()
    alone = layer()
    alone(torch.cat([tokens(r, n) for r in range(ranks) for n in range(micro_batches)])).square().mean().backward()
    torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)


def losses_add_up_to_the_mean(rank, ranks):
    losses = torch.arange(1.0, 2 + rank)
    part = step_loss(losses, [len(losses)])
    dist.all_reduce(part)
    everything = torch.cat([torch.arange(1.0, 2 + r) for r in range(ranks)])
    torch.testing.assert_close(part / ranks, everything.mean())


def a_rank_without_tokens(rank, ranks):
    losses = torch.ones(4 if rank == 0 else 0, requires_grad=True)
    part = step_loss(losses, [len(losses)]).detach()
    assert part.isfinite() and float(part) == (ranks if rank == 0 else 0)


CHECKS = [gradient_is_that_of_all_tokens, losses_add_up_to_the_mean, a_rank_without_tokens]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
