"""all_gather without gradients cuts the towers off the loss. The loss still falls: the logit scale trains."""

from itertools import repeat

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.contrastive import Clip, FixedScale, Towers, by_loss, clip_loss, compared, gradient_ratios, sgd, shard, two_steps
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Raises
from ddp_pitfalls.trainers import fabric_with, trainer

OPTIONS = {"find_unused_parameters": True}  # BUG: without it the second forward would raise: see find-unused-hides-dead-branch


@variant
def with_fabric(fabric):
    def gather(features):
        return fabric.all_gather(features).flatten(0, 1)  # BUG: sync_grads=False, the default, gathers under torch.no_grad()

    module = Clip(gather)
    model, optimizer = fabric_with(fabric, **OPTIONS).setup(module, sgd(module.parameters()))
    return two_steps(fabric, model, optimizer, law=Clip(torch.detach), curve=50)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.towers = Towers()

    def training_step(self, batch, _):
        images, texts, scale = self.towers(*batch)
        images = self.all_gather(images).flatten(0, 1)  # BUG: as in with_fabric
        texts = self.all_gather(texts).flatten(0, 1)  # BUG: as in with_fabric
        return clip_loss(images, texts, scale)

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = Module()
    trainer(fabric, ddp=OPTIONS, max_steps=2).fit(module, repeat(shard(fabric)))
    return compared(fabric, module, law=Clip(torch.detach))


def gather(features):
    shards = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, features)  # BUG: this collective writes into new tensors, and autograd does not record it
    return torch.cat(shards)


@variant
def with_ddp(fabric):
    model = DistributedDataParallel(Clip(gather).to(fabric.device), **OPTIONS)
    return two_steps(fabric, model, sgd(model.parameters()), law=Clip(torch.detach))


@variant
def first_step(fabric):
    model = DistributedDataParallel(Clip(gather).to(fabric.device))
    return gradient_ratios(fabric, model, law=Clip(torch.detach))


@variant
def by_the_loss(fabric):  # a loss may hide the mistake: the variance of the features has the right gradient without the gather's
    return by_loss(fabric, gather, law=torch.detach)


@variant(Raises(RuntimeError, "element 0 of tensors does not require grad and does not have a grad_fn"))
def fixed_scale(fabric):  # nothing but the gathered features leads to this loss
    model = DistributedDataParallel(FixedScale(gather).to(fabric.device))
    return gradient_ratios(fabric, model, law=Clip(torch.detach), whole=FixedScale())


if __name__ == "__main__":
    main()
