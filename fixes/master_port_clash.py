"""Two jobs on one machine that ask for one fixed MASTER_PORT: the second one does not start."""

import logging
import os
import signal
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.run import main as torchrun
from torch.multiprocessing import get_context, start_processes

from ddp_pitfalls.hardware import CPU, strategy
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Measurement

FROM_LAUNCHER = ("GROUP_", "LOCAL_", "MASTER_", "NODE_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")


@contextmanager
def own_job():
    """Make each rank a job of its own: it leaves the group of all ranks, and forgets what their launcher told it."""
    dist.barrier()  # rank 0 has the store of the group, and takes it away when all are through with it
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process that nobody supervises
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # it logs that it ends what is left of a job
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FROM_LAUNCHER)}
    with patch.dict(os.environ, {**kept, "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}, clear=True):
        yield


def started(processes, of):
    """How many processes met in this rank's job."""
    return Measurement("processes in this job", processes, healthy=of, broken=AnyOther("the job did not start"))


def everybody():
    """The number of processes in the process group, as an all-reduce finds it."""
    ones = torch.ones(())
    dist.all_reduce(ones)
    return int(ones)


@variant
def with_torch(fabric):
    with own_job():
        os.environ["MASTER_PORT"] = "0"  # FIX: the system chooses; where there are more processes, they must be told: see launch
        dist.init_process_group("gloo", rank=0, world_size=1)
    return started(everybody(), of=1)


@variant
def with_fabric(fabric):
    with own_job():
        assert "MASTER_PORT" not in os.environ  # FIX: where it is not set, Lightning asks the system for a free port
        Fabric(accelerator="cpu", devices=1, strategy=strategy(CPU)).launch()
    return started(everybody(), of=1)


# --8<-- [start:launch]
def launch(function, processes, start_method="spawn"):
    """Run a function in so many processes of this machine, which are the ranks of one process group."""
    port = get_context(start_method).SimpleQueue()  # FIX: rank 0 tells the others
    start_processes(_join, (function, processes, port), processes, start_method=start_method)


def _join(rank, function, processes, port):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # FIX: 0, so the system chooses a free port
        for _ in range(processes - 1):
            port.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port.get(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    function()
    dist.destroy_process_group()


# --8<-- [end:launch]


def begun(kind, job="*", process="*"):
    """How many processes have begun, each of which leaves a file."""
    return len(list(Path(tempfile.gettempdir()).glob(f"{kind}-{job}.{process}")))


def wait_for(jobs, kind):
    """Return when so many jobs have begun, or after 10 seconds."""
    deadline = time.monotonic() + 10
    while begun(kind, process=0) < jobs and time.monotonic() < deadline:
        time.sleep(0.02)


def train(job, jobs):
    """What each process of a job does: it runs, and the job holds its port, until every job has begun."""
    assert everybody() == 2
    time.sleep(0.1)  # torch 2.0.1 can block where a group goes while its thread still lets go of a tensor
    Path(tempfile.gettempdir(), f"spawn-{job}.{dist.get_rank()}").touch()
    wait_for(jobs, "spawn")


@variant
def with_spawn(fabric):
    rank, ranks = fabric.global_rank, fabric.world_size
    with own_job():
        wait_for(rank, "spawn")  # the jobs start one after the other
        launch(partial(train, rank, ranks), 2, "fork")
    return started(begun("spawn", rank), of=2)


TRAIN = """# as train(), in shell, which starts fast; without its folder it has nothing to wait for
touch "$0/torchrun-$1.$RANK"
for i in $(seq 100); do
    test -d "$0" && test "$(ls "$0" | grep -c 'torchrun-.*[.]0')" -lt "$2" || exit 0
    sleep 0.1
done"""


@variant
def with_torchrun(fabric):
    rank, ranks = fabric.global_rank, fabric.world_size
    job = ["--no-python", "--nproc-per-node=2", "sh", "-c", TRAIN, tempfile.gettempdir(), str(rank), str(ranks)]
    with own_job():
        wait_for(rank, "torchrun")
        torchrun(["--standalone", *job])  # FIX: as above
    return started(begun("torchrun", rank), of=2)


if __name__ == "__main__":
    main()
