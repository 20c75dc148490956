"""A rank that decides on its own numbers to stop leaves the loop alone, and the others wait for it in their next collective."""

from lightning.pytorch import LightningModule
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement
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
    return stop  # BUG: no other rank hears of it


# --8<-- [end:any_rank]


@variant(Hangs({0: FINISHED}, others="loss.backward()"), needs="gloo")
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


@variant(Hangs({0: "fabric.barrier()"}, others="fabric.backward(loss)"), needs="gloo")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    for step, (inputs, targets) in enumerate(batches(fabric), start=1):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        if step >= 3 and loss.item() < TARGET:  # BUG: each rank looks at the loss of its own batch
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
        self.trainer.should_stop = stop  # BUG: an attribute of this rank's Trainer, and no other rank hears of it


@variant(Hangs({0: FINISHED}, others=".fit("), needs="gloo")
def with_trainer(fabric):
    module = StopsItself(batches(fabric))
    trainer(fabric, **EPOCHS).fit(module)
    return compared(fabric, module, 3)


if __name__ == "__main__":
    main()
