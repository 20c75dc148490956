"""What ``train_on_all``, ``shortest`` and ``in_step`` promise, on one to three CPU ranks: run as a plain script beside ``pattern``."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import in_step, shortest, train_on_all
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def batches(rank):
    """Rank 0 has two batches, every other rank has one more than the rank before it."""
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)) for _ in range(2 + rank)]


def all_ranks_are_still_together(ranks):
    total = torch.ones(())
    dist.all_reduce(total)
    assert int(total) == ranks


def the_smallest_length(rank, ranks):
    assert shortest(5 + rank) == 5
    assert shortest(5 - rank) == 6 - ranks
    assert shortest(0 if rank == ranks - 1 else 3) == 0


def a_stream_ends_with_the_shortest(rank, ranks):
    assert list(in_step(iter(range(10 * rank, 10 * rank + 3 + rank)))) == [10 * rank, 10 * rank + 1, 10 * rank + 2]
    all_ranks_are_still_together(ranks)


def a_rank_without_any_batch(rank, ranks):
    assert list(in_step([] if rank == 0 else [1, 2])) == []
    all_ranks_are_still_together(ranks)


def any_value_can_be_a_batch(rank, ranks):
    assert list(in_step([None, 0, False])) == [None, 0, False]


def every_batch_is_trained_on(rank, ranks):
    module = layer()
    train_on_all(DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1), batches(rank))
    alone = layer()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(1 + ranks):
        present = [batches(other)[step] for other in range(ranks) if step < 2 + other]
        optimizer.zero_grad()
        (sum(mse_loss(alone(inputs), targets) for inputs, targets in present) / len(present)).backward()
        optimizer.step()
    assert torch.allclose(module.weight, alone.weight, atol=1e-6) and torch.allclose(module.bias, alone.bias, atol=1e-6)
    all_ranks_are_still_together(ranks)


CHECKS = [
    the_smallest_length,
    a_stream_ends_with_the_shortest,
    a_rank_without_any_batch,
    any_value_can_be_a_batch,
    every_batch_is_trained_on,
]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    time.sleep(0.1)  # torch 2.0.1 can block where the group goes while its thread still lets go of a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
