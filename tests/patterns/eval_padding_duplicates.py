"""What ``EvaluationSampler`` promises: run as a plain script, with the pattern importable as ``pattern``."""

import torch.distributed as dist
from pattern import EvaluationSampler
from torch.utils.data import DataLoader, DistributedSampler


def shards(count, ranks):
    return [list(EvaluationSampler(range(count), ranks, rank)) for rank in range(ranks)]


def every_sample_once_in_order():
    for count in (0, 1, 2, 3, 7, 8, 16, 17):
        for ranks in (1, 2, 3, 4, 8):
            found = shards(count, ranks)
            assert sorted(sample for shard in found for sample in shard) == list(range(count))
            assert all(shard == sorted(shard) for shard in found)


def shards_differ_by_one_at_most():
    lengths = {len(shard) for shard in shards(17, 4)}
    assert lengths == {4, 5}


def lengths_are_those_of_the_shards():
    for rank, shard in enumerate(shards(7, 2)):
        sampler = EvaluationSampler(range(7), 2, rank)
        loader = DataLoader(range(7), batch_size=3, sampler=sampler)
        assert len(sampler) == len(shard)
        assert len(loader) == len(list(loader)) == (2 if rank == 0 else 1)


def libraries_take_it_for_a_distributed_sampler():
    sampler = EvaluationSampler(range(7), 2, 1)
    assert isinstance(sampler, DistributedSampler)
    sampler.set_epoch(5)
    assert list(sampler) == list(sampler) == [1, 3, 5]


def rank_and_ranks_are_those_of_the_process_group():
    try:
        EvaluationSampler(range(7))
    except (RuntimeError, ValueError) as error:
        assert "process group" in str(error)
    else:
        raise AssertionError("nothing was raised without a process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert list(EvaluationSampler(range(3))) == [0, 1, 2]
    dist.destroy_process_group()


if __name__ == "__main__":
    every_sample_once_in_order()
    shards_differ_by_one_at_most()
    lengths_are_those_of_the_shards()
    libraries_take_it_for_a_distributed_sampler()
    rank_and_ranks_are_those_of_the_process_group()
