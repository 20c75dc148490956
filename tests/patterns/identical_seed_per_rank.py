"""What ``SeedByRank`` promises, on two CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import logging
import os
import random
import sys
import tempfile
import warnings
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from pattern import SeedByRank
from torch import nn

START = "fork" if sys.platform == "linux" else "spawn"


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.initial, self.drawn = self.weight.detach().clone(), []

    def training_step(self, *_):
        self.drawn.append([*torch.rand(3).tolist(), random.random()])
        return 0 * self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained():
    seed_everything(7)
    module = Network()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy(cluster_environment=LightningEnvironment())
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, callbacks=[SeedByRank(7)], **quiet).fit(module, repeat(0))
    return module


def from_all_ranks(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def initialisation_agrees_and_noise_does_not():
    module = trained()
    first, second = from_all_ranks(module.initial.tolist())
    assert first == second
    first, second = from_all_ranks(module.drawn)
    assert not {number for step in first for number in step} & {number for step in second for number in step}


def the_same_again():
    assert trained().drawn == trained().drawn


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(local, LOCAL_RANK=str(rank), NODE_RANK="0")
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in (initialisation_agrees_and_noise_does_not, the_same_again):
        check()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, Path(folder)), nprocs=2, start_method=START)
