"""Gathering without gradients and putting the own features back gives the towers 1/ranks of their gradient."""

from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.contrastive import (
    Clip,
    LocalClip,
    TimesRanks,
    Towers,
    by_recipe,
    clip_loss,
    compared,
    divided,
    gradient_ratios,
    sgd,
    shard,
    two_steps,
)
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.trainers import trainer


@variant
def with_fabric(fabric):
    def gather(features):
        shards = list(fabric.all_gather(features, sync_grads=True))  # FIX: every rank's gradient for these features is summed
        return torch.cat(shards)

    module = Clip(gather)
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    return two_steps(fabric, model, optimizer, law=Clip(partial(divided, fabric.world_size)), curve=50)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.towers = Towers()

    def gather(self, features):
        shards = list(self.all_gather(features, sync_grads=True))  # FIX: as in with_fabric
        return torch.cat(shards)

    def training_step(self, batch, _):
        images, texts, scale = self.towers(*batch)
        return clip_loss(self.gather(images), self.gather(texts), scale)

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = Module()
    trainer(fabric, max_steps=2).fit(module, repeat(shard(fabric)))
    return compared(fabric, module, law=Clip(partial(divided, fabric.world_size)))


# --8<-- [start:gather_features]
def gather_features(features):
    """The features of all ranks, (ranks * batch, ...), for a loss that every rank computes over all of them."""
    features = features.contiguous()
    shards = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, features)
    mine = features.view_as(features)
    if mine.requires_grad:
        mine.register_hook(lambda gradient: gradient * dist.get_world_size())  # FIX: DDP will divide it by as much
    shards[dist.get_rank()] = mine
    return torch.cat(shards)


# --8<-- [end:gather_features]


@variant
def with_ddp(fabric):
    model = DistributedDataParallel(Clip(gather_features).to(fabric.device))
    return gradient_ratios(fabric, model, law=Clip(partial(divided, fabric.world_size)))


@variant
def times_ranks(fabric):  # a remedy in use: right for the towers, and too much for what does not come through the gather
    module = Clip(gather_features)  # FIX: only what comes through the gather is scaled
    model = DistributedDataParallel(module.to(fabric.device))
    return gradient_ratios(fabric, model, law=TimesRanks(partial(divided, fabric.world_size), fabric.world_size))


@variant
def local_loss(fabric):
    def gather(features):
        shards = all_gather(features)  # FIX: the gradient as a counterpart comes from all ranks
        return torch.cat(shards)

    model = DistributedDataParallel(LocalClip(gather, fabric.global_rank).to(fabric.device))
    return gradient_ratios(fabric, model, law=LocalClip(torch.detach))


@variant
def by_optimizer(fabric):
    return by_recipe(fabric, gather_features, law=partial(divided, fabric.world_size))


if __name__ == "__main__":
    main()
