"""A call that saves ends with a barrier for all ranks, and under a rank-zero guard only rank 0 gets there."""

import tempfile
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement
from ddp_pitfalls.toys import batch, everybody, toy, trained_alone, two_steps, weights
from ddp_pitfalls.trainers import trainer

GLOO = ("gloo", "lightning>=2.1")  # NCCL's barrier is an all-reduce: what it meets in another collective, nobody has measured here


def path():
    return Path(tempfile.gettempdir(), "network.ckpt")


@variant(Hangs({0: "fabric.save"}, others="two_steps("), needs=GLOO)
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    if fabric.is_global_zero:  # BUG: rank 0 waits in fabric.save for ranks that train on
        fabric.save(path(), {"network": model.state_dict()})
    return two_steps(fabric, model, optimizer)


@variant(Hangs({}, others="fabric.all_reduce("), needs=GLOO)
def before_an_all_reduce(fabric):  # it begins with a barrier in Lightning, which lets rank 0 out of fabric.save
    if fabric.is_global_zero:  # BUG: rank 0 is one barrier ahead from here on, and another line seems to hang
        fabric.save(path(), {"step": 0})
    mean = fabric.all_reduce(torch.tensor(2.0**fabric.global_rank))
    return Measurement("mean of 2 ** rank", mean, (2**fabric.world_size - 1) / fabric.world_size, broken=2.0**fabric.global_rank)


@variant(Hangs({0: "fabric.save"}, others=FINISHED), needs="lightning>=2.1")
def at_the_end(fabric):
    if fabric.is_global_zero:  # BUG: the others leave, and rank 0 waits for them
        fabric.save(path(), {"step": 0})
    return Measurement("has this rank come to the end", "yes", healthy="yes", broken="no")


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.optimizer = toy()

    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:  # BUG: rank 0 waits in save_checkpoint for ranks that train on
            self.trainer.save_checkpoint(path())

    def configure_optimizers(self):
        return self.optimizer


@variant(Hangs({0: "save_checkpoint"}, others=".fit("), needs=GLOO)
def with_trainer(fabric):
    module, mine = Module(), batch(fabric.global_rank, step=0)
    trainer(fabric, max_steps=2).fit(module, repeat(mine))
    together, apart = trained_alone([everybody(fabric.world_size, step=0)] * 2), trained_alone([mine] * 2)
    return Measurement("weights after two steps", weights(module), together, apart)


# --8<-- [start:save_on_rank_0]
def save_on_rank_0(state, path):
    """Write a file on rank 0, and let no rank go on before it is there. Every rank calls this."""
    if dist.get_rank() == 0:
        torch.save(state, path)
        dist.barrier()  # BUG: only rank 0 gets here


# --8<-- [end:save_on_rank_0]


@variant(Hangs({0: "dist.barrier()"}, others="two_steps("), needs="gloo")
def with_torch(fabric):
    network, optimizer = toy()
    model = DistributedDataParallel(network.to(fabric.device))
    save_on_rank_0(network.state_dict(), path())
    return two_steps(fabric, model, optimizer)


if __name__ == "__main__":
    main()
