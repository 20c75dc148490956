"""find_unused_parameters=True makes DDP accept parameters that get no gradient: nothing tells of a branch that was cut off."""

from itertools import repeat

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.contrastive import Clip, Towers, clip_loss, sgd, shard, untrained, without_gradient
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Raises
from ddp_pitfalls.trainers import fabric_with, trainer


def gather(features):
    shards = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, features)  # BUG: the towers are cut off the loss: see all-gather-no-grad
    return torch.cat(shards)


@variant
def with_ddp(fabric):
    module = Clip(gather).to(fabric.device)
    model = DistributedDataParallel(module, find_unused_parameters=True)  # BUG: DDP would have found it
    return untrained(fabric, module, model, law=Clip(torch.detach))


@variant
def with_fabric(fabric):
    module = Clip(gather)
    fabric = fabric_with(fabric, find_unused_parameters=True)  # BUG: as in with_ddp
    return untrained(fabric, module, fabric.setup(module), law=Clip(torch.detach), steps=50)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.towers = Towers()

    def training_step(self, batch, _):
        images, texts, scale = self.towers(*batch)
        return clip_loss(gather(images), gather(texts), scale)

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = Module()
    one = trainer(fabric, ddp={"find_unused_parameters": True}, max_steps=2)  # BUG: as in with_ddp
    one.fit(module, repeat(shard(fabric)))
    return without_gradient(fabric, module, law=Clip(torch.detach))


@variant
def unused_on_purpose(fabric):
    module, law = Clip(), Clip()
    for one in module, law:
        one.towers.pretraining_head = nn.Linear(4, 4)
    module.to(fabric.device)
    model = DistributedDataParallel(module, find_unused_parameters=True)  # BUG: for the sake of one head, nothing is watched any more
    return untrained(fabric, module, model, law)


@variant(Raises(RuntimeError, "Expected to have finished reduction in the prior iteration before starting a new one."))
def without_the_flag(fabric):
    module = Clip(gather).to(fabric.device)
    model = DistributedDataParallel(module)
    untrained(fabric, module, model, law=Clip(torch.detach), steps=1)  # the step that cuts off the towers passes
    return untrained(fabric, module, model, law=Clip(torch.detach), steps=1)  # the forward after it raises


@variant(Raises(RuntimeError, "It looks like your LightningModule has parameters that were not used in producing the loss"))
def trainer_without_the_flag(fabric):
    module = Module()
    trainer(fabric, max_steps=2).fit(module, repeat(shard(fabric)))
    return without_gradient(fabric, module, law=Clip(torch.detach))


if __name__ == "__main__":
    main()
