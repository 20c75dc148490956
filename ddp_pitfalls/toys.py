"""The toy model, each rank's own batch, and the same training in one process, which is the reference for what a rank should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from ddp_pitfalls.checks import replicated_part
from ddp_pitfalls.measure import Measurement, Series

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

sgd: MakeOptimizer = partial(SGD, lr=0.1, momentum=0.9)
adam: MakeOptimizer = partial(Adam, lr=0.01)


def toy(make: MakeOptimizer = sgd) -> tuple[nn.Module, Optimizer]:
    """A perceptron 10-10-5 with the same weights wherever it is made, and an optimizer for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    return model, make(model.parameters())


def batch(rank: int, step: int) -> Batch:
    """The inputs (20, 10) and targets (20, 5) of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)


def everybody(ranks: int, step: int) -> Batch:
    """The batches of all ranks at one step, as one."""
    inputs, targets = zip(*(batch(rank, step) for rank in range(ranks)))
    return torch.cat(inputs), torch.cat(targets)


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], backward: Callable[[Tensor], None] = Tensor.backward) -> None:
    """One optimizer step a batch, on the model's device."""
    device = next(model.parameters()).device
    for inputs, targets in batches:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)))
        optimizer.step()


def trained_alone(batches: Iterable[Batch], make: MakeOptimizer = sgd) -> Tensor:
    """The weights after training the toy on these batches in this process alone, without torch.distributed. Shape (165,)."""
    model, optimizer = toy(make)
    train(model, optimizer, batches)
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    """All parameters in one CPU vector of float32."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().float()


def two_steps(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer, *, after: int = 0, make: MakeOptimizer = sgd, curve: int = 0
) -> Measurement:
    """Train two steps and compare this rank's weights with training in one process.

    Healthy is what one process gets from everybody's batches. Broken is what it gets when, from step ``after`` on, it sees this rank's
    batches alone: ``after`` steps were done before the mistake. The optimizer must be the one that ``make`` gives.
    With ``curve`` steps, training goes on so long, and the distance between the replicas is the series of the measurement.
    """
    assert_replicated(model)
    rank, ranks = fabric.global_rank, fabric.world_size
    steps = range(after, after + 2)
    train(model, optimizer, (batch(rank, step) for step in steps), fabric.backward)
    together = [everybody(ranks, step) for step in range(after + 2)]
    apart = together[:after] + [batch(rank, step) for step in steps]
    return Measurement(
        quantity="weights after two steps",
        value=weights(model),
        healthy=trained_alone(together, make),
        broken=trained_alone(apart, make),
        series=distance_curve(fabric, model, optimizer, range(after + 2, after + curve)) if curve else None,
    )


def distance_curve(fabric: Fabric, model: nn.Module, optimizer: Optimizer, steps: Sequence[int]) -> Series:
    """Train on, and after every step take the largest distance of a replica's parameters from those of rank 0."""
    points = [_distance(fabric, model)]
    for step in steps:
        train(model, optimizer, [batch(fabric.global_rank, step)], fabric.backward)
        points.append(_distance(fabric, model))
    return Series("distance between the replicas' parameters", points)


def _distance(fabric: Fabric, model: nn.Module) -> float:
    mine = weights(model).to(fabric.device)
    replicas = [torch.empty_like(mine) for _ in range(fabric.world_size)]
    dist.all_gather(replicas, mine)
    return max(float((replica - replicas[0]).norm()) for replica in replicas)


def assert_replicated(model: nn.Module) -> DistributedDataParallel:
    """The DDP wrapper in ``model``. Raises ValueError where there is none: its gradients were never averaged, and it proves nothing."""
    wrapper = replicated_part(model)
    if wrapper is None:
        raise ValueError("the model is not wrapped in DistributedDataParallel: nothing would be averaged in the first place")
    return wrapper
