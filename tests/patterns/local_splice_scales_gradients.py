"""What ``gather_features`` promises, on two and three CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import gather_features
from torch import nn
from torch.nn.functional import cross_entropy, normalize

START = "fork" if sys.platform == "linux" else "spawn"


def loss(features):
    """A loss over all features, the same on every rank: (batch, 3) to a scalar."""
    return cross_entropy(features @ features.T, torch.arange(len(features)))


def layer():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def batch(ranks):
    return torch.randn(4 * ranks, 5, generator=torch.Generator().manual_seed(1))


def gradient_is_that_of_one_process(rank, ranks):
    alone, model = layer(), layer()
    loss(normalize(alone(batch(ranks)), dim=1)).backward()
    loss(gather_features(normalize(model(batch(ranks).chunk(ranks)[rank]), dim=1))).backward()
    for mine, reference in zip(model.parameters(), alone.parameters()):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / ranks, reference.grad)  # what DDP does, without its start-up time


def values_are_those_of_all_ranks_in_order(rank, ranks):
    everything = batch(ranks)
    assert torch.equal(gather_features(everything.chunk(ranks)[rank].clone().requires_grad_()), everything)


def other_uses_of_the_features_are_not_scaled(rank, ranks):
    features = torch.ones(2, 3, requires_grad=True)
    gather_features(features)
    features.sum().backward()
    assert torch.equal(features.grad, torch.ones(2, 3))


def features_without_a_gradient(rank, ranks):
    assert not gather_features(torch.ones(2, 3)).requires_grad
    with torch.no_grad():
        assert not gather_features(torch.ones(2, 3, requires_grad=True)).requires_grad


def transposed_features(rank, ranks):
    features = torch.arange(6.0).reshape(3, 2).T.requires_grad_()  # (2, 3), not contiguous
    gathered = gather_features(features)
    assert torch.equal(gathered, features.detach().repeat(ranks, 1))
    gathered.sum().backward()
    assert torch.equal(features.grad, torch.full((2, 3), float(ranks)))


CHECKS = [
    gradient_is_that_of_one_process,
    values_are_those_of_all_ranks_in_order,
    other_uses_of_the_features_are_not_scaled,
    features_without_a_gradient,
    transposed_features,
]


def run(rank, ranks, store):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    dist.barrier()  # a rank that leaves early takes its connections with it


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2, 3):
            mp.start_processes(run, args=(ranks, (Path(folder) / str(ranks)).as_uri()), nprocs=ranks, start_method=START)
