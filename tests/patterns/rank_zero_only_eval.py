"""What ``evaluate`` promises, on one and two CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric import Fabric
from pattern import evaluate
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"
INPUTS, TARGETS = (torch.randn(6, width, generator=torch.Generator().manual_seed(width)) for width in (4, 2))
BATCHES = [(INPUTS[:3], TARGETS[:3]), (INPUTS[3:], TARGETS[3:])]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def one_rank_alone(rank):
    module = layers()
    model = DistributedDataParallel(module)
    for number in range(3):
        model(INPUTS + rank).sum().backward()
        if rank == 0:
            loss = evaluate(model, BATCHES)
            module.eval()
            assert torch.allclose(loss, mse_loss(module(INPUTS), TARGETS)) and not loss.requires_grad
            module.train()
        dist.barrier()
        assert int(module[0].num_batches_tracked) == number + 1, "the evaluation has changed the statistics"


def the_mode_stays_as_it_was(rank):
    for training in (True, False):
        model = DistributedDataParallel(layers()).train(training)
        evaluate(model, BATCHES)
        assert {m.training for m in model.modules()} == {training}


CHECKS = [one_rank_alone, the_mode_stays_as_it_was]


def with_fabric():
    module = layers()
    model = Fabric(accelerator="cpu", devices=1).setup(module)
    loss = evaluate(model, BATCHES)
    assert torch.allclose(loss, mse_loss(module.eval()(INPUTS), TARGETS))


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank)
    time.sleep(0.1)  # torch 2.0.1 can block where the group goes while its thread still lets go of a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
    with_fabric()
