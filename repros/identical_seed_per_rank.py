"""One seed on all ranks gives them one stream of random numbers: equal dropout masks, equal augmentation."""

import random
from itertools import repeat

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from ddp_pitfalls.checks import generators_alike
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.samples import from_all_ranks
from ddp_pitfalls.trainers import trainer

SEED = 42


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.dropout = nn.Parameter(torch.rand(4)), nn.Dropout()

    def forward(self, inputs):
        return self.dropout(inputs)


def mask(model, device):
    """Which of twelve inputs the dropout lets through, as text."""
    return "".join(str(int(kept > 0)) for kept in model(torch.ones(12, device=device)))


def in_one_process(seed, draw):
    with isolate_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        return draw()


def compared(fabric, what, mine, draw, broken=None):
    """What all ranks drew. Healthy is the first draw after seeding by SEED + rank; broken the draw ``broken`` after SEED, on all ranks."""
    healthy = [in_one_process(SEED + rank, draw) for rank in range(fabric.world_size)]
    same = [in_one_process(SEED, broken or draw)] * fabric.world_size
    return Measurement(f"{what}, by rank", from_all_ranks(mine), healthy, broken=same)


def compared_masks(fabric, mine, before=tuple):
    def draw():
        return mask(nn.Dropout(), fabric.device)

    def later():
        before()
        return draw()

    alike = "torch" in generators_alike()
    found = compared(fabric, "dropout mask", mine, draw, later)
    assert alike == (len(set(found.value)) < len(found.value)), "the check for a run of one's own says otherwise"
    return found


@variant
def with_ddp(fabric):
    torch.manual_seed(SEED)  # BUG: the same on all ranks, and dropout draws from it
    model = DistributedDataParallel(Network().to(fabric.device))
    return compared_masks(fabric, mask(model, fabric.device), before=Network)


@variant
def with_fabric(fabric):
    fabric.seed_everything(SEED)  # BUG: as above; Fabric does not add the rank
    model = fabric.setup(Network())
    return compared_masks(fabric, mask(model, fabric.device), before=Network)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.mask = Network(), ""

    def training_step(self, *_):
        self.mask = mask(self.network, self.device)
        return 0 * self.network.bias.sum()

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


# --8<-- [start:SeedByRank]
class SeedByRank(Callback):
    """Seeds every rank at the start of the training, when the model is made."""

    def __init__(self, seed):
        self.seed = seed

    def on_train_start(self, trainer, pl_module):
        seed_everything(self.seed, workers=True)  # BUG: as above; nor does the Trainer


# --8<-- [end:SeedByRank]


@variant
def with_trainer(fabric):
    seed_everything(SEED)
    module = Module()
    trainer(fabric, max_steps=1, callbacks=[SeedByRank(SEED)]).fit(module, repeat(0))
    return compared_masks(fabric, module.mask)


@variant
def undone_by_trainer(fabric):
    seed_everything(SEED)
    module = Module()
    torch.manual_seed(SEED + fabric.global_rank)  # BUG: fit goes back to the seed of seed_everything
    trainer(fabric, max_steps=1).fit(module, repeat(0))
    return compared_masks(fabric, module.mask)


class Crops(Dataset):
    """Augments with the generators of Python and of torch."""

    def __len__(self):
        return 4

    def __getitem__(self, _):
        return torch.tensor([random.randrange(100), torch.randint(100, ()).item()])


def crops(loader):
    return [pair for batch in loader for pair in batch.tolist()]


@variant
def augmentation(fabric):
    fabric.seed_everything(SEED)  # BUG: Python's generator is seeded alike as well
    mine = [left for left, _ in crops(DataLoader(Crops()))]
    return compared(fabric, "augmentation", mine, lambda: [random.randrange(100) for _ in range(4)])


@variant
def workers(fabric):
    torch.manual_seed(SEED)  # BUG: a loader draws the seed of its workers from this generator
    loader = DataLoader(Crops(), num_workers=1)

    def draw():
        base = torch.empty((), dtype=torch.int64).random_().item()  # the loader draws it, and a worker adds its own number
        return in_one_process(base, lambda: [Crops()[number].tolist() for number in range(4)])

    return compared(fabric, "augmentation in a worker", crops(loader), draw)


if __name__ == "__main__":
    main()
