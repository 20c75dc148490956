"""A forward through the wrapper broadcasts the model's buffers: under a rank-zero guard rank 0 waits for ranks that are elsewhere."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import on_one_rank
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
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
    losses = [mse_loss(model.module(inputs), targets) for inputs, targets in batches]  # FIX: not through DDP
    model.train(training)
    return torch.stack(losses).mean()


# --8<-- [end:evaluate]


@variant(needs="gloo")
def with_ddp(fabric):
    module, optimizer = normed()
    model = DistributedDataParallel(module.to(fabric.device))
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    dist.barrier()  # where the others wait, and not at fault
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(needs="gloo")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    fabric.all_reduce(torch.ones(()))
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(needs="gloo")
def after_training(fabric):
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1, 2)
    if fabric.is_global_zero:
        evaluate(model, held_out(fabric))
    return compared(fabric, model)


@variant(needs="gloo")
def with_gradients(fabric):  # the broadcast meets that of the others' next step: rank 0 comes through, and hangs in its own next step
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        model.module(held_out(fabric)[0][0])  # FIX: as above
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(needs="gloo")
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


@variant(needs="gloo")
def with_trainer(fabric):
    module = Module()
    one = trainer(fabric, max_steps=3)
    one.fit(module, iter(batches(fabric, 0, 1, 2)))
    one.test(module, iter(held_out(fabric)), verbose=False)  # FIX: on every rank, each with its part of the data
    return compared(fabric, module)


@variant(protects="a model without buffers has nothing to broadcast, and forward waits for nobody", needs="gloo")
def without_buffers(fabric):
    model, optimizer = fabric.setup(*toy())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        model(held_out(fabric)[0][0])
    fabric.barrier()
    train(fabric, model, optimizer, 2)
    return compared(fabric, model, make=toy)


@variant(protects="with torch.no_grad(), and no collective before the next step, it takes that step's broadcast", needs="gloo")
def nothing_between(fabric):
    model, optimizer = fabric.setup(*normed())
    train(fabric, model, optimizer, 0, 1)
    if fabric.is_global_zero:
        model.eval()
        with torch.no_grad():
            model(held_out(fabric)[0][0])
        model.train()
    train(fabric, model, optimizer, 2)
    return compared(fabric, model)


@variant(protects="inside a LightningModule its layers are the bare ones: calling them goes around DDP", needs="gloo")
def inside_a_module(fabric):
    inputs = held_out(fabric)[0][0]

    class CallsItself(Module):
        def on_train_batch_end(self, *_):
            if self.trainer.is_global_zero:
                with torch.no_grad():
                    self.network(inputs)
            self.trainer.strategy.barrier()

    module = CallsItself()
    trainer(fabric, max_steps=3).fit(module, iter(batches(fabric, 0, 1, 2)))
    return compared(fabric, module)


@variant(protects="the check on_one_rank raises in the forward that would wait", needs="gloo")
def told_by_the_check(fabric):
    model, optimizer = fabric.setup(*normed())
    told = "nothing"
    with on_one_rank(model):
        evaluate(model, held_out(fabric))
        try:
            model(held_out(fabric)[0][0])
        except RuntimeError as error:
            told = str(error)
    train(fabric, model, optimizer, 0, 1)
    buffers = "0.running_mean, 0.running_var, 0.num_batches_tracked"
    healthy = f"one rank called the DDP wrapper, which waits for all ranks to broadcast {buffers}: call its module"
    return Measurement("what this rank is told", told, healthy, broken="nothing")


if __name__ == "__main__":
    main()
