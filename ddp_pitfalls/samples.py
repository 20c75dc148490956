"""Datasets whose samples are their own numbers, and which of them the ranks were given. A ``range`` is such a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD

from ddp_pitfalls.checks import fingerprints, ranks_that_differ, repeated_samples, watch_epochs
from ddp_pitfalls.measure import AnyOther, Measurement


def given(loader: Iterable[Tensor]) -> list[int]:
    """The samples of one pass through a loader, in their order."""
    return [int(sample) for batch in loader for sample in batch]


def permutation(count: int, seed: int) -> list[int]:
    """The samples 0 to ``count - 1`` as a generator of its own shuffles them: the independent reference for what is shuffled."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def from_all_ranks(mine: Any) -> list[Any]:
    """What each rank has, on every rank, in the order of the ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def times_seen(samples: Iterable[int], healthy: Sequence[int], broken: Sequence[int]) -> Measurement:
    """How often each sample was seen in one epoch, by all ranks together, from what this rank was given: ``healthy[i]`` is for sample i.

    The check for a run of one's own must tell the same.
    """
    samples = list(samples)
    times = Counter(sample for rank in from_all_ranks(samples) for sample in rank)
    found = repeated_samples(samples)
    assert found == {sample: n for sample, n in times.items() if n > 1}, f"the check says {found}, and counted are {dict(times)}"
    assert sorted(found.values()) == sorted(repeated_samples(fingerprints(torch.tensor(samples))).values())
    value = [times[sample] for sample in range(len(healthy))]
    return Measurement("how often each sample is seen in one epoch, by all ranks together", value, healthy, broken)


def orders(fabric: Fabric, epochs: Iterable[Sequence[int]], broken: Sequence[int]) -> Measurement:
    """The samples of this rank in epochs 0, 1, 2 ..., shuffled anew in each, against a permutation whose seed is the number of the epoch.

    Broken is what it has when the epochs are those of ``broken``. The check for a run of one's own must tell the same.
    """
    epochs = [list(epoch) for epoch in epochs]
    same_as = watch_epochs()
    for number, epoch in enumerate(epochs):
        assert same_as(epoch) == (epochs.index(epoch) if epoch in epochs[:number] else None)
    rank, ranks = fabric.global_rank, fabric.world_size

    def of(numbers: Iterable[int]) -> list[list[int]]:
        return [permutation(len(epochs[0]) * ranks, seed=number)[rank::ranks] for number in numbers]

    return Measurement("samples of this rank, by epoch", epochs, of(range(len(epochs))), of(broken))


Split = tuple[Sequence[int], Sequence[int]]  # the samples to train on, and those to validate on


def leaked(fabric: Fabric, split: Split, broken: Sequence[Split] | str) -> Measurement:
    """The validation samples of this rank that some rank trains on. Healthy is none; broken follows from the split of each rank.

    Where those cannot be known beforehand, ``broken`` is the reason. The check for a run of one's own must tell the same.
    """
    splits = from_all_ranks(split)

    def leaks(splits: Sequence[Split]) -> list[int]:
        return sorted(set(splits[fabric.global_rank][1]) & {sample for train, _ in splits for sample in train})

    assert bool(ranks_that_differ(sorted(split[1]))) == any(set(val) != set(splits[0][1]) for _, val in splits)
    wrong = AnyOther(broken) if isinstance(broken, str) else leaks(broken)
    return Measurement("validation samples of this rank that some rank trains on", leaks(splits), [], wrong)


class Listed(LightningModule):
    """Trains a single number, and lists which samples it was given: ``epochs[i]`` holds those of epoch ``i``."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """A loss whose gradient is zero, from a batch of sample numbers, (batch,)."""
        self.epochs[-1] += batch.tolist()
        return 0 * self.number

    def predict_step(self, batch: Tensor, _: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)
