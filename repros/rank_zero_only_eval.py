"""A forward through the wrapper broadcasts the model's buffers: under a rank-zero guard rank 0 waits for ranks that are elsewhere."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Dies, Hangs, Measurement
from ddp_pitfalls.toys import batch, sgd, toy, weights
from ddp_pitfalls.trainers import trainer


def normed():
    """The toy behind a BatchNorm, whose running statistics are buffers, and an optimizer for it."""
    model = nn.Sequential(nn.BatchNorm1d(10), *toy()[0])
    return model, sgd(model.parameters())


def batches(fabric, *steps):
    return [[part.to(fabric.device) for part in batch(fabric.global_rank, step)] for step in steps]


def held_out(fabric):
    return batches(fabric, 100, 101)


def train(fabric, model, optimizer, *steps):
    for inputs, targets in batches(fabric, *steps):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()


def compared(fabric, model, make=normed, steps=3):
    """The weights, against one process in the place of all ranks: BatchNorm sees the batch of one rank at a time."""

    def alone(ranks):
        model, optimizer = make()
        for step in range(steps):
            optimizer.zero_grad()
            for inputs, targets in (batch(rank, step) for rank in ranks):
                (mse_loss(model(inputs), targets) / len(ranks)).backward()
            optimizer.step()
        return weights(model)

    return Measurement(f"weights after {steps} steps", weights(model), alone(range(fabric.world_size)), alone([fabric.global_rank]))


# --8<-- [start:evaluate]
@torch.no_grad()
def evaluate(model, batches):
    """The mean loss of a wrapped model on these batches. One rank may call this alone."""
    training = model.training
    model.eval()
    losses = [mse_loss(model(inputs), targets) for inputs, targets in batches]  # BUG: waits for all ranks: forward begins with a broadcast
    model.train(training)
    return torch.stack(losses).mean()


# --8<-- [end:evaluate]


@variant(Hangs({0: "losses = ["}, others="dist.barrier()"), needs="gloo")
def with_ddp(fabric):
    module, optimizer = normed()
    model = DistributedDataParallel(module.to(fabric.device))
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    dist.barrier()  # where the others wait, and not at fault
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(Hangs({0: "losses = ["}, others="fabric.all_reduce("), needs="gloo")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    fabric.all_reduce(torch.ones(()))
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(Hangs({0: "losses = ["}, others=FINISHED), needs="gloo")
def after_training(fabric):
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1, 2)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    return compared(fabric, model)


@variant(Hangs({0: "loss = mse_loss(model(inputs), targets)"}, others="fabric.backward(loss)"), needs="gloo")
def with_gradients(fabric):  # the broadcast meets that of the others' next step: rank 0 comes through, and hangs in its own next step
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        model(held_out(fabric)[0][0])  # BUG: as above, and without torch.no_grad() the next forward broadcasts again
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(Dies("SIGABRT", "gloo::EnforceNotMet"), needs="gloo")
def after_the_first_step(fabric):  # the others' second forward begins with another broadcast, of DDP's buckets: the sizes do not match
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    train(fabric, model, optimizer, 1, 2)
    return compared(fabric, model)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.optimizer = normed()

    def training_step(self, batch, _):
        return mse_loss(self.network(batch[0]), batch[1])

    def test_step(self, batch, _):
        return mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer


@variant(Hangs({0: ".test("}, others=FINISHED), needs="gloo")
def with_trainer(fabric):
    module = Module()
    one = trainer(fabric, max_steps=3)
    one.fit(module, iter(batches(fabric, 0, 1, 2)))
    if one.is_global_zero:  # BUG: the Trainer waits for all ranks before it evaluates, whatever the model is
        one.test(module, iter(held_out(fabric)), verbose=False)
    return compared(fabric, module)


if __name__ == "__main__":
    main()
