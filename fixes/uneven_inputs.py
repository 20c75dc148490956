"""A rank with fewer batches than the others leaves the loop first, and the others wait for it in their next collective."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import ranks_that_differ
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.toys import batch, everybody, sgd, toy, train, trained_alone, weights
from ddp_pitfalls.trainers import trainer


def batches(fabric, epoch=0):
    """The batches of this rank in an epoch: rank 0 has two, the others have three."""
    steps = range(10 * epoch, 10 * epoch + (2 if fabric.global_rank == 0 else 3))
    return [[part.to(fabric.device) for part in batch(fabric.global_rank, step)] for step in steps]


def compared(fabric, model, *steps):
    """The weights, against training in one process on the batches of all ranks at these steps; at step 2 rank 0 has none."""
    ranks = fabric.world_size
    third = [torch.cat(parts) for parts in zip(*(batch(rank, step=2) for rank in range(1, ranks)))]
    healthy = trained_alone(third if step == 2 else everybody(ranks, step) for step in steps)
    broken = trained_alone(batch(fabric.global_rank, step) for step in steps)
    return Measurement("weights after training", weights(model), healthy, broken)


# --8<-- [start:train_on_all]
def train_on_all(model, optimizer, batches):
    """Train a DistributedDataParallel model on every batch of every rank, however many each rank has."""
    with Join([model], divide_by_initial_world_size=False):  # FIX: a rank that is done answers the others' collectives with zeros
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()


# --8<-- [end:train_on_all]


@variant(needs="gloo")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    train_on_all(model, optimizer, batches(fabric))
    return compared(fabric, model, 0, 1, 2)


# --8<-- [start:shortest]
def shortest(length, device="cpu"):
    """The smallest number of batches that any rank has. Every rank calls this, with its own number, before the loop."""
    smallest = torch.tensor(length, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)  # FIX: the ranks agree before the first step
    return int(smallest)


# --8<-- [end:shortest]


@variant(needs="gloo")
def with_fabric(fabric):  # rank 0 begins its second epoch while the others are in their first, and nobody hangs before the last epoch
    model, optimizer = fabric.setup(*toy())
    first, second = batches(fabric), batches(fabric, epoch=1)
    assert ranks_that_differ(len(first)) == list(range(1, fabric.world_size))  # a check for every run: nobody hangs yet
    train(model, optimizer, first[: shortest(len(first), fabric.device)], fabric.backward)
    train(model, optimizer, second[: shortest(len(second), fabric.device)], fabric.backward)
    return compared(fabric, model, 0, 1, 10, 11)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = toy()[0]

    def training_step(self, batch, _):
        return mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant(needs="gloo")
def with_trainer(fabric):
    module, mine = Module(), batches(fabric)
    trainer(fabric, max_epochs=1, limit_train_batches=shortest(len(mine), fabric.device)).fit(module, iter(mine))
    return compared(fabric, module, 0, 1)


# --8<-- [start:in_step]
def in_step(batches, device="cpu"):
    """Yield this rank's batches until the first rank has none left: for streams, whose number of batches nobody knows."""
    batches, end = iter(batches), object()
    while True:
        batch = next(batches, end)
        more = torch.tensor(int(batch is not end), device=device)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)  # FIX: before every step the ranks agree whether all of them have a batch
        if not more:
            return
        yield batch


# --8<-- [end:in_step]


@variant(needs="gloo")
def from_a_stream(fabric):
    model, optimizer = fabric.setup(*toy())
    train(model, optimizer, in_step(iter(batches(fabric)), fabric.device), fabric.backward)
    return compared(fabric, model, 0, 1)


@variant(protects="Join with throw_on_early_termination=True raises on every rank when the first one runs out of batches")
def thrown_by_join(fabric):
    module, optimizer = toy()
    model, told = DistributedDataParallel(module.to(fabric.device)), "nothing"
    try:
        with Join([model], throw_on_early_termination=True):
            train(model, optimizer, batches(fabric))
    except RuntimeError as error:
        told = str(error)
    detected = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    healthy = "Rank 0 exhausted all inputs." if fabric.global_rank == 0 else detected
    return Measurement("what this rank is told", told, healthy, broken="nothing")


if __name__ == "__main__":
    main()
