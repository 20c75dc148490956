"""No sampler can share out an IterableDataset: every rank, and every worker of every rank, goes through the whole stream."""

from itertools import islice

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.samples import Listed, given, times_seen
from ddp_pitfalls.trainers import trainer

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}  # the default on Linux before Python 3.14


# --8<-- [start:Stream]
class Stream(IterableDataset):
    """The share of one worker of one rank. Shares are equally long: what is left for an incomplete round at the end goes to nobody."""

    def __init__(self, samples):
        self.samples = samples
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()  # FIX: asked for in the rank, not in a worker

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        share, shares = self.rank * workers + number, self.ranks * workers
        for turn in zip(*[iter(self.samples)] * shares):  # FIX: in every round each worker of each rank has its turn
            yield turn[share]


# --8<-- [end:Stream]


def samples_for(fabric):
    return range(4 * fabric.world_size)


def counted(fabric, seen, shares):
    samples = samples_for(fabric)
    return times_seen(seen, healthy=[1] * len(samples), broken=[shares] * len(samples))


@variant
def with_ddp(fabric):
    loader = DataLoader(Stream(samples_for(fabric)), batch_size=2)
    return counted(fabric, given(loader), fabric.world_size)


@variant
def with_workers(fabric):
    loader = DataLoader(Stream(samples_for(fabric)), batch_size=2, **WORKERS)
    return counted(fabric, given(loader), 2 * fabric.world_size)


class OneOfTheWorkers(Stream):
    def __iter__(self):
        worker = get_worker_info()
        first, step = self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers  # FIX: worker and rank
        yield from islice(self.samples, first, None, step)


@variant
def shared_by_worker(fabric):
    loader = DataLoader(OneOfTheWorkers(samples_for(fabric)), batch_size=2, **WORKERS)
    return counted(fabric, given(loader), fabric.world_size)


@variant
def with_fabric(fabric):
    loader = fabric.setup_dataloaders(DataLoader(Stream(samples_for(fabric)), batch_size=2))
    return counted(fabric, given(loader), fabric.world_size)


@variant
def with_trainer(fabric):
    module, loader = Listed(), DataLoader(Stream(samples_for(fabric)), batch_size=2)
    trainer(fabric, max_epochs=1).fit(module, loader)
    return counted(fabric, module.epochs[0], fabric.world_size)


if __name__ == "__main__":
    main()
