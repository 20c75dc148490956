"""A DistributedSampler fills up the shorter shards with samples from the front, and an evaluation counts those twice."""

import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Hangs, Measurement, Raises
from ddp_pitfalls.samples import Listed, given, times_seen
from ddp_pitfalls.trainers import trainer


# --8<-- [start:EvaluationSampler]
class EvaluationSampler(DistributedSampler):
    """The samples of this rank, in order."""

    def __init__(self, dataset, num_replicas=None, rank=None):
        super().__init__(dataset, num_replicas, rank, shuffle=False)  # BUG: fills up the shorter shards with samples 0, 1, 2, ...


# --8<-- [end:EvaluationSampler]


def test_set(fabric):
    return range(3 * fabric.world_size + 1)  # one sample more than the ranks can share


def is_right(samples):
    return (samples != 0).float()  # a model that is wrong about sample 0 alone


def compared(fabric, accuracy, broken=None):
    ranks = fabric.world_size
    padded = (4 * ranks - 2) / (4 * ranks)  # every rank has four samples, and sample 0 is the first that comes twice
    return Measurement("accuracy on the test set", float(accuracy), 3 * ranks / (3 * ranks + 1), broken or padded)


def counted(fabric, seen):
    ranks = fabric.world_size
    once, padded = [1] * (3 * ranks + 1), [2] * (ranks - 1) + [1] * (2 * ranks + 2)
    return times_seen(seen, once, padded)


def accuracy(fabric, loader):
    counts = torch.zeros(2, device=fabric.device)
    for samples in loader:
        counts += torch.tensor([is_right(samples).sum(), len(samples)], device=fabric.device)
    dist.all_reduce(counts)
    return counts[0] / counts[1]


@variant
def with_ddp(fabric):
    samples = test_set(fabric)
    loader = DataLoader(samples, batch_size=2, sampler=EvaluationSampler(samples))
    return compared(fabric, accuracy(fabric, loader))


@variant
def samples_counted(fabric):
    samples = test_set(fabric)
    loader = DataLoader(samples, batch_size=2, sampler=EvaluationSampler(samples))
    return counted(fabric, given(loader))


@variant
def with_fabric(fabric):
    samples = test_set(fabric)
    loader = DataLoader(samples, batch_size=2)  # BUG: setup_dataloaders puts in a DistributedSampler
    return compared(fabric, accuracy(fabric, fabric.setup_dataloaders(loader)))


@variant
def by_sample(fabric):
    samples = test_set(fabric)
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=2))
    order = fabric.all_gather(torch.cat(list(loader))).flatten()  # needs as many samples from each rank, so here the padding stays
    results = is_right(order)  # BUG: the results of the padding count too
    return compared(fabric, results.mean())


class Module(Listed):
    def __init__(self):
        super().__init__()
        self.accuracy = MeanMetric()

    def validation_step(self, samples, _):
        self.log("accuracy", self.accuracy(is_right(samples)), sync_dist=True)  # BUG: with uneven shards, see uneven_mean

    test_step = validation_step


@variant
def validation_in_fit(fabric):
    samples = test_set(fabric)
    loader = DataLoader(samples, batch_size=2)  # BUG: the Trainer puts in a DistributedSampler
    one = trainer(fabric, max_epochs=1)
    one.fit(Module(), DataLoader(samples, batch_size=2), loader)
    return compared(fabric, one.callback_metrics["accuracy"])


@variant(Raises("PossibleUserWarning", "Otherwise, multi-device settings use `DistributedSampler` that replicates some samples"))
def trainer_test(fabric):
    warnings.filterwarnings("error", "Using `DistributedSampler`")  # a warning may be overlooked, an error is not
    samples = test_set(fabric)
    loader = DataLoader(samples, batch_size=2)  # BUG: as in validation_in_fit
    result = trainer(fabric).test(Module(), loader, verbose=False)[0]
    return compared(fabric, result["accuracy"])


@variant(needs="lightning>=2.0.7")
def uneven_mean(fabric):
    samples, ranks = test_set(fabric), fabric.world_size
    mine = range(fabric.global_rank, len(samples), ranks)  # nothing is padded: rank 0 has four samples, the others three
    one = trainer(fabric, max_epochs=1, use_distributed_sampler=False)
    one.fit(Module(), DataLoader(samples, batch_size=2), DataLoader(samples, batch_size=2, sampler=mine))
    return compared(fabric, one.callback_metrics["accuracy"], broken=3 * ranks / (3 * ranks))


@variant(Hangs({0: "fabric.all_reduce(result"}, others=FINISHED))
def reduce_in_the_loop(fabric):
    samples = test_set(fabric)
    mine = range(fabric.global_rank, len(samples), fabric.world_size)
    counts = torch.zeros(2)
    for batch in DataLoader(samples, sampler=mine):
        result = torch.tensor([is_right(batch).sum(), len(batch)], device=fabric.device)
        counts += fabric.all_reduce(result, reduce_op="sum").cpu()  # BUG: rank 0 has one batch more than the others
    return compared(fabric, counts[0] / counts[1])


if __name__ == "__main__":
    main()
