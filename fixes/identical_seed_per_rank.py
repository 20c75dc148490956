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
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Network().to(fabric.device))
    torch.manual_seed(SEED + fabric.global_rank)  # FIX: after the model is made alike, the noise is seeded by rank
    return compared_masks(fabric, mask(model, fabric.device), before=Network)


@variant
def with_fabric(fabric):
    fabric.seed_everything(SEED)
    model = fabric.setup(Network())
    fabric.seed_everything(SEED + fabric.global_rank)  # FIX: as above
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
        seed_everything(self.seed + trainer.global_rank, workers=True)  # FIX: as above


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
    seed_everything(SEED + fabric.global_rank)  # FIX: now that is the seed to which fit goes back
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
    fabric.seed_everything(SEED + fabric.global_rank)  # FIX: as above
    mine = [left for left, _ in crops(DataLoader(Crops()))]
    return compared(fabric, "augmentation", mine, lambda: [random.randrange(100) for _ in range(4)])


@variant
def workers(fabric):
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED + fabric.global_rank)
    loader = DataLoader(Crops(), num_workers=1, generator=generator)  # FIX: the loader has one of its own, seeded by rank

    def draw():
        base = torch.empty((), dtype=torch.int64).random_().item()  # the loader draws it, and a worker adds its own number
        return in_one_process(base, lambda: [Crops()[number].tolist() for number in range(4)])

    return compared(fabric, "augmentation in a worker", crops(loader), draw)


@variant(protects="DDP broadcasts the parameters of rank 0 when it wraps")
def initialised_apart(fabric):  # nothing to fix
    torch.manual_seed(SEED + fabric.global_rank)
    model = DistributedDataParallel(Network().to(fabric.device))
    firsts = [in_one_process(SEED + rank, lambda: Network().bias.tolist()) for rank in range(fabric.world_size)]
    return Measurement("initial bias", model.module.bias, healthy=firsts[0], broken=firsts[-1])


@variant(protects="Fabric's seed_everything has workers=True by default, and setup_dataloaders then seeds workers by rank")
def workers_of_fabric(fabric):  # nothing to fix
    fabric.seed_everything(SEED)
    loader = fabric.setup_dataloaders(DataLoader(Crops(), num_workers=1), use_distributed_sampler=False)
    streams = {str(one) for one in from_all_ranks(crops(loader))}
    return Measurement("different streams of augmentation", len(streams), healthy=fabric.world_size, broken=1)


@variant(protects="with seed_everything(seed, workers=True) the Trainer seeds workers by rank")
def workers_of_trainer(fabric):  # nothing to fix
    class Listed(Module):
        def training_step(self, batch, number):
            drawn.append(batch)
            return super().training_step(batch, number)

    drawn = []
    seed_everything(SEED, workers=True)
    trainer(fabric, max_epochs=1, use_distributed_sampler=False).fit(Listed(), DataLoader(Crops(), num_workers=1))
    streams = {str(one) for one in from_all_ranks(crops(drawn))}
    return Measurement("different streams of augmentation", len(streams), healthy=fabric.world_size, broken=1)


if __name__ == "__main__":
    main()
