"""What ``launch`` promises, with one job and with several at once: run as a plain script, with the pattern importable as ``pattern``."""

import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pattern import launch

START = "fork" if sys.platform == "linux" else "spawn"
JOBS = 3


def ranks_meet(folder):
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    assert int(total) == sum(range(ranks))
    (folder / f"rank-{rank}").touch()
    time.sleep(0.1)  # torch 2.0.1 can block where a group goes while its thread still lets go of a tensor


def one_job(folder):
    for processes in (1, 3):
        launch(partial(ranks_meet, folder), processes, START)
        assert len(list(folder.iterdir())) == processes


def an_error_of_a_rank_comes_out(folder):
    try:
        launch(fail, 1, START)
    except Exception as error:
        assert "this rank fails" in str(error)
    else:
        raise AssertionError("nothing was raised")


def fail():
    raise ValueError("this rank fails")


def until_all_run(folder, job):
    """Hold this job's port until every job has begun."""
    ranks_meet(folder / job)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*/rank-0"))) < JOBS:
        assert time.monotonic() < deadline, "a job did not start"
        time.sleep(0.02)


def start_job(folder, job):
    launch(partial(until_all_run, folder, job), 2, START)


def jobs_at_once(folder):
    names = [f"job-{number}" for number in range(JOBS)]
    for name in names:
        (folder / name).mkdir()
    jobs = [multiprocessing.get_context(START).Process(target=start_job, args=(folder, name)) for name in names]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * JOBS
    assert len(list(folder.glob("*/rank-*"))) == 2 * JOBS


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    for check in (one_job, an_error_of_a_rank_comes_out, jobs_at_once):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))
