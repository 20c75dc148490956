"""What ``any_rank`` promises, on one to three CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import any_rank

START = "fork" if sys.platform == "linux" else "spawn"


def nobody_wants_to_stop(rank, ranks):
    assert any_rank(False) is False


def one_is_enough(rank, ranks):
    for who in range(ranks):
        assert any_rank(rank == who) is True


def all_may_want_to(rank, ranks):
    assert any_rank(True) is True


def a_comparison_of_tensors_will_do(rank, ranks):
    assert any_rank(torch.tensor(float(rank)) > 0.5) is (ranks > 1)


def all_leave_in_the_same_step(rank, ranks):
    left = next(step for step in range(10) if any_rank(step >= 5 - rank))
    assert left == 6 - ranks
    total = torch.ones(())
    dist.all_reduce(total)
    assert int(total) == ranks


CHECKS = [nobody_wants_to_stop, one_is_enough, all_may_want_to, a_comparison_of_tensors_will_do, all_leave_in_the_same_step]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, ranks)
    time.sleep(0.1)  # torch 2.0.1 can block where the group goes while its thread still lets go of a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
