"""What ``Stream`` promises: run as a plain script, with the pattern importable as ``pattern``."""

from collections import Counter
from unittest.mock import patch

import torch.distributed as dist
from pattern import Stream
from torch.utils.data import DataLoader


def stream(samples, rank, ranks):
    with patch("torch.distributed.get_rank", return_value=rank), patch("torch.distributed.get_world_size", return_value=ranks):
        return Stream(samples)


def epoch(count, ranks, workers):
    """The samples of every rank."""
    found = []
    for rank in range(ranks):
        loader = DataLoader(stream(range(count), rank, ranks), batch_size=2, num_workers=workers)
        found.append([int(sample) for batch in loader for sample in batch])
    return found


def every_sample_once():
    for ranks, workers in ((1, 0), (1, 2), (2, 0), (2, 2), (3, 1)):
        times = Counter(sample for rank in epoch(12, ranks, workers) for sample in rank)
        assert times == Counter(range(12)), (ranks, workers, times)


def shares_are_equally_long():
    for count in range(13):
        found = epoch(count, ranks=3, workers=0)
        assert {len(rank) for rank in found} == {count // 3}
        assert sorted(sample for rank in found for sample in rank) == list(range(count // 3 * 3))
    assert [len(rank) for rank in epoch(11, ranks=2, workers=2)] == [4, 4]


def two_epochs_of_one_loader():
    loader = DataLoader(stream(range(8), 1, 2), batch_size=2, num_workers=1, persistent_workers=True)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second == [[1, 3], [5, 7]]


def workers_without_a_process_group():
    loader = DataLoader(stream(range(4), 1, 2), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in loader] == [[1, 3]]


def made_too_early():
    try:
        Stream(range(4))
    except (RuntimeError, ValueError) as error:
        assert "process group" in str(error)
    else:
        raise AssertionError("nothing was raised without a process group")


def rank_and_ranks_are_those_of_the_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert list(Stream(range(3))) == [0, 1, 2]
    dist.destroy_process_group()


if __name__ == "__main__":
    every_sample_once()
    shares_are_equally_long()
    two_epochs_of_one_loader()
    workers_without_a_process_group()
    made_too_early()
    rank_and_ranks_are_those_of_the_process_group()
