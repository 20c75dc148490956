"""find_unused_parameters=True makes DDP accept parameters that get no gradient: nothing tells of a branch that was cut off."""

from itertools import repeat

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.contrastive import Clip, Towers, clip_loss, sgd, shard, untrained, without_gradient
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.trainers import fabric_with, trainer


def gather(features):
    shards = all_gather(features)  # FIX: the graph is whole
    return torch.cat(shards)


@variant
def with_ddp(fabric):
    module = Clip(gather).to(fabric.device)
    model = DistributedDataParallel(module)  # FIX: should a branch be cut off again, the next forward raises
    return untrained(fabric, module, model, law=Clip(torch.detach))


@variant
def with_fabric(fabric):
    module = Clip(gather)
    fabric = fabric_with(fabric)  # FIX: as in with_ddp
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
    one = trainer(fabric, max_steps=2)  # FIX: as in with_ddp
    one.fit(module, repeat(shard(fabric)))
    return without_gradient(fabric, module, law=Clip(torch.detach))


@variant
def unused_on_purpose(fabric):
    module, law = Clip(), Clip()
    for one in module, law:
        one.towers.pretraining_head = nn.Linear(4, 4)
    module.to(fabric.device)
    module.towers.pretraining_head.requires_grad_(False)  # FIX: DDP expects no gradient of it, and goes on watching the rest
    model = DistributedDataParallel(module)
    return untrained(fabric, module, model, law)


@variant
def without_the_flag(fabric):
    module = Clip(gather).to(fabric.device)
    model = DistributedDataParallel(module)
    untrained(fabric, module, model, law=Clip(torch.detach), steps=1)  # the step that cuts off the towers passes
    return untrained(fabric, module, model, law=Clip(torch.detach), steps=1)  # the forward after it raises


@variant
def trainer_without_the_flag(fabric):
    module = Module()
    trainer(fabric, max_steps=2).fit(module, repeat(shard(fabric)))
    return without_gradient(fabric, module, law=Clip(torch.detach))


if __name__ == "__main__":
    main()
