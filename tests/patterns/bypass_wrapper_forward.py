"""What ``call`` promises, on two CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import call
from torch import nn
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.layer(inputs)

    def loss(self, inputs, *, power=1):
        return (self(inputs) ** power).mean() + self.forward(inputs).mean()

    def fails(self, inputs):
        raise KeyError("no loss")


def inputs(rank):
    return torch.full((4, 3), 1.0 + rank)


def gradient(rank, power):
    network = Network()
    network.loss(inputs(rank), power=power).backward()
    return network.layer.weight.grad


def gradients_are_averaged(rank, model):
    for power in (1, 2):
        model.zero_grad()
        call(model, "loss", inputs(rank), power=power).backward()
        mean = (gradient(0, power) + gradient(1, power)) / 2
        torch.testing.assert_close(model.module.layer.weight.grad, mean)


def forward_is_as_before(rank, model):
    call(model, "loss", inputs(rank))
    assert "forward" not in vars(model.module)
    torch.testing.assert_close(model(inputs(rank)), model.module.layer(inputs(rank)))


def forward_is_as_before_after_an_error(rank, model):
    try:
        call(model, "fails", inputs(rank))
    except KeyError:
        pass
    else:
        raise AssertionError("the error was lost")
    forward_is_as_before(rank, model)


def a_forward_of_the_instance_stays(rank, model):
    model.module.forward = special = lambda inputs: 2 * model.module.layer(inputs)
    call(model, "loss", inputs(rank)).backward()
    assert model.module.forward is special


CHECKS = [gradients_are_averaged, forward_is_as_before, forward_is_as_before_after_an_error, a_forward_of_the_instance_stays]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, DistributedDataParallel(Network()))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, Path(folder)), nprocs=2, start_method=START)
