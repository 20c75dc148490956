"""What ``f1_of_all_ranks`` promises, on one to three CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import f1_of_all_ranks

START = "fork" if sys.platform == "linux" else "spawn"


def by_hand(predicted, true):
    both = sum(p and t for p, t in zip(predicted, true))
    return 2 * both / (sum(predicted) + sum(true))


def samples(rank):
    """Unequally many on each rank."""
    return [1, 0, 1, 1, 0][: 3 + rank], [1, 1, 1, 0, 0][: 3 + rank]


def the_score_of_all_samples(rank, ranks):
    predicted, true = ([value for r in range(ranks) for value in samples(r)[part]] for part in (0, 1))
    assert math.isclose(f1_of_all_ranks(*map(torch.tensor, samples(rank))), by_hand(predicted, true))


def a_rank_without_samples(rank, ranks):
    part = torch.tensor([1, 1, 0] if rank == 0 else [], dtype=torch.long)
    assert f1_of_all_ranks(part, part) == 1


def no_positives_at_all(rank, ranks):
    assert f1_of_all_ranks(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)) == 0


CHECKS = [the_score_of_all_samples, a_rank_without_samples, no_positives_at_all]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
