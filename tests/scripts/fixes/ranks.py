"""What every rank must find, however it was started."""

import os
import random
import tempfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement


def gathered(fabric, mine):
    everybody = [None] * fabric.world_size
    dist.all_gather_object(everybody, mine)
    return everybody


@variant
def generators(fabric):
    drawn = (float(torch.rand(1)), float(numpy.random.rand()), random.random())
    distinct = [len(set(values)) for values in zip(*gathered(fabric, drawn))]
    return Measurement("distinct draws", distinct, healthy=[fabric.world_size] * 3, broken=[1] * 3)


@variant
def files(fabric):
    Path(tempfile.gettempdir(), f"rank{fabric.global_rank}").touch()
    dist.barrier()
    found = sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())
    return Measurement("files", found, healthy=[f"rank{r}" for r in range(fabric.world_size)], broken=[f"rank{fabric.global_rank}"])


@variant
def size(fabric):
    launched = [fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank]
    rank = dist.get_rank()
    return Measurement("world size and ranks", launched, healthy=[dist.get_world_size(), rank, rank, 0], broken=[1, 0, 0, 0])


@variant
def address(fabric):
    port = int(os.environ["MASTER_PORT"])
    same_port = len(set(gathered(fabric, port))) == 1
    return Measurement("address", f"{os.environ['MASTER_ADDR']} {port > 0} {same_port}", healthy="127.0.0.1 True True", broken="none")


@variant(needs="spawn")
def spawned(fabric):
    parts = Path("/proc/self/cmdline").read_text() if Path("/proc/self/cmdline").exists() else "spawn_main"
    return Measurement("started by", "spawn" if "spawn_main" in parts else "fork", healthy="spawn", broken="fork")


if __name__ == "__main__":
    main()
