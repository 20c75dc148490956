"""A random split that every rank draws for itself is another one on every rank: one trains on what another validates on."""

import random

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, random_split

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.samples import Listed, leaked, permutation
from ddp_pitfalls.trainers import trainer

SAMPLES, SIZES = range(40), [32, 8]
UNSEEDED = "every process starts with a seed of its own"


def halves(order):
    return order[: SIZES[0]], order[SIZES[0] :]


@variant(varies=UNSEEDED)
def with_ddp(fabric):
    train, val = random_split(SAMPLES, SIZES, generator=torch.Generator().manual_seed(0))  # FIX: one seed, for this split alone
    return leaked(fabric, (train.indices, val.indices), UNSEEDED)


@variant(varies=UNSEEDED)
def with_random(fabric):
    files = list(SAMPLES)
    random.Random(0).shuffle(files)  # FIX: as above
    return leaked(fabric, halves(files), UNSEEDED)


@variant
def seeded_by_rank(fabric):
    fabric.seed_everything(fabric.global_rank)  # for dropout and augmentation that differ between the ranks
    train, val = random_split(SAMPLES, SIZES, generator=torch.Generator().manual_seed(0))  # FIX: as above
    broken = [halves(permutation(40, seed=rank)) for rank in range(fabric.world_size)]
    return leaked(fabric, (train.indices, val.indices), broken)


@variant
def one_draw_more(fabric):
    fabric.seed_everything(0)
    if fabric.is_global_zero:
        torch.rand(1)  # anything that only rank 0 does: a preview, a sanity check
    train, val = random_split(SAMPLES, SIZES, generator=torch.Generator().manual_seed(0))  # FIX: as above
    later = torch.Generator().manual_seed(0)
    torch.rand(1, generator=later)
    others = [halves(permutation(40, seed=0))] * (fabric.world_size - 1)
    broken = [halves(torch.randperm(40, generator=later).tolist()), *others]
    return leaked(fabric, (train.indices, val.indices), broken)


class Data(LightningDataModule):
    def setup(self, stage):
        self.train, self.val = random_split(SAMPLES, SIZES, torch.Generator().manual_seed(0))  # FIX: as above

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4)


@variant(varies=UNSEEDED)
def with_trainer(fabric):
    data = Data()
    trainer(fabric, max_steps=1).fit(Listed(), datamodule=data)
    return leaked(fabric, (data.train.indices, data.val.indices), UNSEEDED)


@variant(protects="one seed_everything on all ranks gives all ranks one split, as long as no rank draws a number more")
def seeded_alike(fabric):  # nothing to fix
    fabric.seed_everything(0)
    train, val = random_split(SAMPLES, SIZES)
    return leaked(fabric, (train.indices, val.indices), UNSEEDED)


if __name__ == "__main__":
    main()
