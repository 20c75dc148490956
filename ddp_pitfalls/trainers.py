"""A Trainer, and a Fabric with other DDP options, over the ranks that already run."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy


def trainer(fabric: Fabric, *, ddp: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A Trainer on the ranks of this Fabric that writes nothing; ``ddp`` are options of DistributedDataParallel."""
    warnings.filterwarnings("ignore", ".*does not have many workers")  # advice on speed, given where a machine has many cores
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    one = Trainer(strategy=DDPStrategy(**_ranks(fabric), **(ddp or {})), **_devices(fabric), **{**quiet, **options})
    # After a run it puts back the signal handlers that Python knows of, and Python does not know that of faulthandler, by which the
    # supervisor asks where a rank stands: the next question would end the rank.
    one._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return one


def fabric_with(fabric: Fabric, **ddp: Any) -> Fabric:
    """A Fabric on the same ranks, whose ``setup`` gives DistributedDataParallel these options."""
    other = Fabric(strategy=FabricDDPStrategy(**_ranks(fabric), **ddp), **_devices(fabric))
    other.launch()
    return other


def _ranks(fabric: Fabric) -> dict[str, Any]:
    """The ranks and their process group, as a strategy is told of them."""
    assert isinstance(fabric.strategy, FabricDDPStrategy)
    return {"cluster_environment": fabric.strategy.cluster_environment, "process_group_backend": dist.get_backend()}


def _devices(fabric: Fabric) -> dict[str, Any]:
    assert isinstance(fabric.strategy, FabricDDPStrategy)
    accelerator, nodes = fabric.device.type, fabric.strategy.num_nodes
    return {"accelerator": accelerator, "devices": fabric.world_size // nodes, "num_nodes": nodes}
