"""A rank that decides on its own numbers to stop leaves the loop alone, and the others wait for it in their next collective."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_pitfalls.checks import ranks_that_differ
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.toys import batch, everybody, sgd, toy, trained_alone, weights
from ddp_pitfalls.trainers import trainer

TARGET = 0.92  # at the third step rank 0 has a lower loss than this, and no other rank has; the mean over all ranks is higher
STEPS = 4
EPOCHS = {"max_epochs": STEPS, "reload_dataloaders_every_n_epochs": 1, "use_distributed_sampler": False}  # of one batch each


def batches(fabric):
    return [[part.to(fabric.device) for part in batch(fabric.global_rank, step)] for step in range(STEPS)]


def compared(fabric, model, steps):
    """The weights, against training in one process for so many steps on the batches of all ranks."""
    healthy = trained_alone(everybody(fabric.world_size, step) for step in range(steps))
    return Measurement(f"weights after {steps} steps", weights(model), healthy, trained_alone(batches(fabric)[:steps]))


# --8<-- [start:any_rank]
def any_rank(stop, device="cpu"):
    """Whether any rank wants to stop. Every rank calls this in every step, with its own wish."""
    wish = torch.tensor(int(stop), device=device)
    dist.all_reduce(wish, op=dist.ReduceOp.MAX)  # FIX: every rank gets the same answer, and all of them stop in the same step
    return bool(wish)


# --8<-- [end:any_rank]


@variant(needs="gloo")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    for step, (inputs, targets) in enumerate(batches(fabric), start=1):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if any_rank(step >= 3 and loss.item() < TARGET, fabric.device):
            break
    return compared(fabric, model, 3)


@variant(needs="gloo")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    for step, (inputs, targets) in enumerate(batches(fabric), start=1):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        if step >= 3 and fabric.all_reduce(loss.detach()) < TARGET:  # FIX: all look at the mean of the losses
            break
    fabric.barrier()
    return compared(fabric, model, 4)


class Module(LightningModule):
    def __init__(self, batches):
        super().__init__()
        self.network, self.batches = toy()[0], iter(batches)

    def train_dataloader(self):
        return DataLoader([next(self.batches)], batch_size=None)

    def training_step(self, batch, _):
        loss = mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return sgd(self.parameters())


class StopsItself(Module):
    def on_train_epoch_end(self):
        stop = self.current_epoch >= 2 and bool(self.trainer.callback_metrics["loss"] < TARGET)
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)  # FIX: any rank, so all ranks


@variant(needs="gloo")
def with_trainer(fabric):
    module = StopsItself(batches(fabric))
    trainer(fabric, **EPOCHS).fit(module)
    return compared(fabric, module, 3)


@variant(protects="the Trainer's own EarlyStopping asks all ranks, and all stop where one would", needs="gloo")
def early_stopping_callback(fabric):
    module, callback = Module(batches(fabric)), EarlyStopping("loss", stopping_threshold=TARGET, check_on_train_epoch_end=True)
    trainer(fabric, min_epochs=3, callbacks=[callback], **EPOCHS).fit(module)
    return compared(fabric, module, 3)


@variant(protects="the check ranks_that_differ names the ranks that have decided otherwise, before one of them leaves", needs="gloo")
def told_by_the_check(fabric):
    others = ranks_that_differ(fabric.global_rank == 0)
    return Measurement("ranks that decide otherwise than rank 0", others, list(range(1, fabric.world_size)), broken=[])


if __name__ == "__main__":
    main()
