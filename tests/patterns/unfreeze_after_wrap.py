"""What ``BackboneFinetuningDDP`` promises, on two CPU ranks: run as a plain script, with the pattern importable as ``pattern``."""

import copy
import logging
import os
import sys
import tempfile
import warnings
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from pattern import BackboneFinetuningDDP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

START = "fork" if sys.platform == "linux" else "spawn"


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.wrappers = []

    def training_step(self, inputs, _):
        return self.head(self.backbone(inputs)).square().mean()

    def on_train_batch_start(self, *_):
        self.wrappers.append(self.trainer.strategy.model)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


def trained(rank, strategy, devices):
    module = Network()
    callback = BackboneFinetuningDDP(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, callbacks=[callback], max_epochs=3, limit_train_batches=2, **quiet
    )
    trainer.fit(module, repeat(torch.full((4, 3), 1.0 + rank)))
    return module


def replicas_are_equal(rank):
    module = trained(rank, DDPStrategy(cluster_environment=LightningEnvironment()), devices=2)
    before = Network().backbone.weight
    assert not torch.equal(module.backbone.weight, before), "the backbone was never trained"
    for parameter in module.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(everyone, parameter.detach())
        assert torch.equal(*everyone)


def wrapped_again_once(rank):
    module = trained(rank, DDPStrategy(cluster_environment=LightningEnvironment()), devices=2)
    assert all(isinstance(wrapper, DistributedDataParallel) for wrapper in module.wrappers)
    changes = [a is not b for a, b in zip(module.wrappers, module.wrappers[1:])]
    assert changes == [False, True, False, False, False], changes


def without_ddp_nothing_is_wrapped(rank):
    module = trained(rank, "auto", devices=1)
    assert not any(isinstance(wrapper, DistributedDataParallel) for wrapper in module.wrappers)
    assert not torch.equal(copy.deepcopy(module).backbone.weight, Network().backbone.weight)


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(local, LOCAL_RANK=str(rank), NODE_RANK="0")
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=ranks)
    for check in (replicas_are_equal, wrapped_again_once):
        check(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, Path(folder)), nprocs=2, start_method=START)
    without_ddp_nothing_is_wrapped(0)
