"""Reentrant checkpointing runs a backward inside the backward, and DDP takes the end of a nested one for the end of the step."""

import copy
from itertools import repeat

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_pitfalls.checks import replicas_differ
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement, Raises
from ddp_pitfalls.toys import sgd
from ddp_pitfalls.trainers import fabric_with, trainer

FLAG = {"find_unused_parameters": True}


# --8<-- [start:checkpointed]
class Checkpointed(nn.Sequential):
    """Layers one after the other; backward computes what is inside them again, instead of keeping it."""

    def forward(self, inputs):
        for layer in self:
            inputs = checkpoint(layer, inputs, use_reentrant=True)  # BUG: a backward of its own for every layer
        return inputs


# --8<-- [end:checkpointed]


def layers(count=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def batch(rank, task=0):
    """Inputs (4, 8) that ask for a gradient, as the output of an embedding does: reentrant checkpointing needs that."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * task + rank)).requires_grad_()


def loss(model, inputs):
    return model(inputs).square().mean()


def backward(fabric, model, tasks=1):
    """One forward for each task, and one backward."""
    losses = [loss(model, batch(fabric.global_rank, task).to(fabric.device)) for task in range(tasks)]
    fabric.backward(sum(losses))


def gradient(*modules):
    return torch.cat([parameter.grad.flatten().cpu() for module in modules for parameter in module.parameters()])


def alone(chain, inputs):
    """The gradient of each layer of a chain in one process, without checkpointing; a layer that is used twice has one for each use."""
    chain = [copy.deepcopy(layer).cpu() for layer in chain]
    loss(nn.Sequential(*chain), inputs).backward()
    return [gradient(layer) for layer in chain]


def compared(fabric, model, parts):
    """The gradient, against the mean over the ranks of the sum of its parts.

    Broken is what comes of it if DDP averages the last part alone; or, if there is just one, this rank's own gradient.
    """
    everyone = [parts(rank) for rank in range(fabric.world_size)]
    own, mean = everyone[fabric.global_rank], [sum(part) / fabric.world_size for part in zip(*everyone)]
    value, healthy = gradient(model), sum(mean)
    assert bool(replicas_differ(model)) == (not torch.allclose(value, healthy, atol=1e-6)), "the check does not tell the same"
    return Measurement("gradient", value, healthy, sum(own[:-1], mean[-1] if own[:-1] else own[-1]))


def one_task(chain):
    return lambda rank: [torch.cat(alone(chain, batch(rank)))]


def two_tasks(chain):
    return lambda rank: [torch.cat(alone(chain, batch(rank, task))) for task in range(2)]


@variant(Raises(RuntimeError, "Expected to mark a variable ready only once."))
def with_ddp(fabric):
    net = Checkpointed(*layers()).to(fabric.device)
    model = DistributedDataParallel(net, **FLAG)
    backward(fabric, model)
    return compared(fabric, net, one_task(net))


@variant(Raises(RuntimeError, "Expected to mark a variable ready only once."))
def with_fabric(fabric):
    net = Checkpointed(*layers())
    model = fabric_with(fabric, **FLAG).setup(net)
    backward(fabric, model)
    return compared(fabric, net, one_task(net))


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Checkpointed(*layers())

    def training_step(self, batch, _):
        return loss(self.net, batch)

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant(Raises(RuntimeError, "Expected to mark a variable ready only once."))
def with_trainer(fabric):
    module = Module()
    trainer(fabric, ddp=FLAG, max_steps=1).fit(module, repeat(batch(fabric.global_rank)))
    return compared(fabric, module.net, one_task(layers()))


@variant
def two_forwards(fabric):  # without the flag
    net = Checkpointed(*layers()).to(fabric.device)
    model = DistributedDataParallel(net)
    backward(fabric, model, tasks=2)
    return compared(fabric, net, two_tasks(net))


@variant(Raises(RuntimeError, "Expected to mark a variable ready only once."))
def two_forwards_with_a_head(fabric):  # a layer that is not checkpointed keeps DDP from ending too early
    chain = layers(3)
    net = nn.Sequential(Checkpointed(*chain[:2]), chain[2]).to(fabric.device)
    model = DistributedDataParallel(net)
    backward(fabric, model, tasks=2)
    return compared(fabric, net, two_tasks(chain))


@variant
def layer_used_twice(fabric):
    chain = layers(1) * 2
    net = Checkpointed(*chain).to(fabric.device)
    model = DistributedDataParallel(net)
    backward(fabric, model)
    return compared(fabric, net, lambda rank: alone(chain, batch(rank)))


if __name__ == "__main__":
    main()
