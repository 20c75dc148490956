"""What torchrun's ranks meet: a variant that fails, one that hangs, and one that comes after it."""

import time

import torch
import torch.distributed as dist

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Hangs, Measurement


@variant
def not_any_more(fabric):
    total = torch.ones(1)
    dist.all_reduce(total)
    return Measurement("sum over the ranks", total, healthy=[float(fabric.world_size)], broken=[1.0])


@variant(Hangs({0: "dist.barrier", 1: "dist.all_reduce"}))
def hangs(fabric):
    if fabric.global_rank == 0:
        dist.barrier()
    time.sleep(1)  # rank 1 is late, and hears of the end of rank 0's patience before its own is over
    dist.all_reduce(torch.ones(1))
    return Measurement("state", "broken", healthy="healthy", broken="broken")


@variant
def comes_after(fabric):
    return Measurement("state", "broken", healthy="healthy", broken="broken")


if __name__ == "__main__":
    main()
