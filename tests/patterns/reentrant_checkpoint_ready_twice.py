"""What ``Checkpointed`` promises, on one and two CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import Checkpointed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"


def layers(count=2):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]


def batch(rank, task=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * task + rank))


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def alone(net, ranks, tasks):
    for rank in range(ranks):
        (sum(net(batch(rank, task)).square().mean() for task in range(tasks)) / ranks).backward()
    return gradients(net)


def as_in_one_process(make, rank, ranks, tasks=1, **options):
    """The gradients of a chain of layers under DDP are those of one process without checkpointing."""
    chain = make()
    model = DistributedDataParallel(Checkpointed(*chain), **options)
    sum(model(batch(rank, task)).square().mean() for task in range(tasks)).backward()
    assert torch.allclose(gradients(model), alone(nn.Sequential(*make()), ranks, tasks), atol=1e-6)


def one_forward(rank, ranks):
    as_in_one_process(layers, rank, ranks)


def with_the_flag(rank, ranks):
    as_in_one_process(layers, rank, ranks, find_unused_parameters=True)


def two_forwards(rank, ranks):
    as_in_one_process(layers, rank, ranks, tasks=2)


def a_layer_used_twice(rank, ranks):
    as_in_one_process(lambda: layers(1) * 2, rank, ranks)


def nothing_inside_a_layer_is_kept(rank, ranks):
    calls = []
    net = Checkpointed(*layers())
    for layer in net:
        layer[0].register_forward_hook(lambda *_: calls.append(1))
    loss = net(batch(rank)).square().mean()
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 4, "backward computes each layer again"


CHECKS = [one_forward, with_the_flag, two_forwards, a_layer_used_twice, nothing_inside_a_layer_is_kept]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    time.sleep(0.1)  # torch 2.0.1 can block where the group goes while its thread still lets go of a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
