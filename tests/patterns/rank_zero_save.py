"""What ``save_on_rank_0`` promises, on two and three CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pattern import save_on_rank_0

START = "fork" if sys.platform == "linux" else "spawn"


class SlowToSave:
    """The file takes a while to write: its bytes come when it is pickled."""

    def __reduce__(self):
        time.sleep(0.3)
        return str, ("saved",)


def every_rank_finds_the_whole_file(rank, path):
    save_on_rank_0({"slow": SlowToSave(), "step": 7}, path)
    assert torch.load(path, weights_only=False) == {"slow": "saved", "step": 7}


def only_rank_0_writes(rank, path):
    save_on_rank_0({"rank": rank}, path)
    assert torch.load(path) == {"rank": 0}


def all_ranks_go_on_together(rank, path):
    for step in range(3):
        save_on_rank_0({"step": step}, path)
        total = torch.ones(())
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()


CHECKS = [every_rank_finds_the_whole_file, only_rank_0_writes, all_ranks_go_on_together]


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in CHECKS:
        check(rank, folder / check.__name__)
    time.sleep(0.1)  # torch 2.0.1 can block where the group goes while its thread still lets go of a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(ranks, Path(folder)), nprocs=ranks, start_method=START)
