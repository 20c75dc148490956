"""DDP averages gradients and leaves the data alone: with a plain DataLoader every rank goes through all the samples."""

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.samples import Listed, given, times_seen
from ddp_pitfalls.toys import batch, everybody, toy, train, trained_alone, weights
from ddp_pitfalls.trainers import trainer


def samples_for(fabric):
    return range(4 * fabric.world_size)


def counted(fabric, seen):
    ranks = fabric.world_size
    return times_seen(seen, healthy=[1] * 4 * ranks, broken=[ranks] * 4 * ranks)


@variant
def with_ddp(fabric):
    samples = samples_for(fabric)
    loader = DataLoader(samples, batch_size=2, sampler=DistributedSampler(samples))  # FIX: the ranks take turns
    return counted(fabric, given(loader))


@variant
def shuffled(fabric):
    samples = samples_for(fabric)
    loader = DataLoader(samples, batch_size=2, sampler=DistributedSampler(samples, shuffle=True))  # FIX: turns in one order
    return counted(fabric, given(loader))


@variant
def trained(fabric):
    module, optimizer = toy()
    model, ranks = DistributedDataParallel(module.to(fabric.device)), fabric.world_size
    data = TensorDataset(*everybody(ranks, step=0))
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data))  # FIX: one step on everybody's samples
    train(model, optimizer, loader)
    together, alone = [everybody(ranks, step=0)], [batch(rank, step=0) for rank in range(ranks)]
    return Measurement("weights after one epoch", weights(model), trained_alone(together), broken=trained_alone(alone))


@variant
def with_fabric(fabric):
    loader = DataLoader(samples_for(fabric), batch_size=2)
    loader = fabric.setup_dataloaders(loader)  # FIX: puts in a DistributedSampler
    return counted(fabric, given(loader))


@variant
def with_trainer(fabric):
    module, loader = Listed(), DataLoader(samples_for(fabric), batch_size=2)
    trainer(fabric, max_epochs=1).fit(module, loader)  # FIX: by default the Trainer puts in a DistributedSampler
    return counted(fabric, module.epochs[0])


@variant(needs="lightning>=2.0.3", protects="the Trainer puts in a DistributedSampler that shuffles where the loader shuffles")
def shuffled_by_trainer(fabric):  # nothing to fix
    module, loader = Listed(), DataLoader(samples_for(fabric), batch_size=2, shuffle=True)
    trainer(fabric, max_epochs=1).fit(module, loader)
    return counted(fabric, module.epochs[0])


if __name__ == "__main__":
    main()
