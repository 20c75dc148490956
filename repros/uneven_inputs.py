"""A rank with fewer batches than the others leaves the loop first, and the others wait for it in their next collective."""

import torch
from lightning.pytorch import LightningModule
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import ranks_that_differ
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement
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
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()  # BUG: it waits for the gradients of a rank that has left the loop
        optimizer.step()


# --8<-- [end:train_on_all]


@variant(Hangs({0: FINISHED}, others="loss.backward()"), needs="gloo")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    train_on_all(model, optimizer, batches(fabric))
    return compared(fabric, model, 0, 1, 2)


# --8<-- [start:shortest]
def shortest(length, device="cpu"):
    """The smallest number of batches that any rank has. Every rank calls this, with its own number, before the loop."""
    smallest = torch.tensor(length, device=device)
    return int(smallest)  # BUG: each rank goes by its own number


# --8<-- [end:shortest]


@variant(Hangs({0: FINISHED}, others="train(model, optimizer, second"), needs="gloo")
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


@variant(Hangs({0: FINISHED}, others=".fit("), needs="gloo")
def with_trainer(fabric):
    module, mine = Module(), batches(fabric)
    trainer(fabric, max_epochs=1, limit_train_batches=shortest(len(mine), fabric.device)).fit(module, iter(mine))
    return compared(fabric, module, 0, 1)


# --8<-- [start:in_step]
def in_step(batches, device="cpu"):
    """Yield this rank's batches until the first rank has none left: for streams, whose number of batches nobody knows."""
    yield from batches  # BUG: each rank goes by its own stream


# --8<-- [end:in_step]


@variant(Hangs({0: FINISHED}, others="train("), needs="gloo")
def from_a_stream(fabric):
    model, optimizer = fabric.setup(*toy())
    train(model, optimizer, in_step(iter(batches(fabric)), fabric.device), fabric.backward)
    return compared(fabric, model, 0, 1)


if __name__ == "__main__":
    main()
