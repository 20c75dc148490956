"""torch.load without map_location puts every rank's tensors on the GPU from which rank 0 saved them."""

import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_pitfalls.checks import devices_in_checkpoint
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Measurement, Raises
from ddp_pitfalls.toys import toy


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.optimizer = toy()

    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer


def checkpoint(fabric, tag=None):
    """The file that rank 0 saved. With a tag, its tensors claim to come from that device: torch writes it where the real one stands."""
    path = Path(tempfile.gettempdir(), "network.ckpt")
    module = Module().to(fabric.device)
    with patch("torch.serialization.location_tag", return_value=tag) if tag else nullcontext():
        fabric.save(path, {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.0.0"})
    fabric.barrier()
    return path


@variant(needs="2 gpus")
def memory_on_gpus(fabric):
    path = checkpoint(fabric)
    loaded = torch.load(path)  # BUG: without map_location a tensor goes where it was saved: on rank 0's GPU, from every rank
    held = [torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()) if gpu != fabric.device.index]
    assert loaded
    return Measurement("bytes on other ranks' GPUs", sum(held), 0, AnyOther("CUDA's allocator rounds the size of every tensor up"))


@variant(needs=("2 gpus", "nvidia-ml-py"))
def processes_on_gpu_0(fabric):
    path = checkpoint(fabric)
    before = torch.cuda.list_gpu_processes(0).count("process ")  # what the driver says, through nvidia-ml-py
    fabric.barrier()
    loaded = torch.load(path)  # BUG: as above
    fabric.barrier()
    after = torch.cuda.list_gpu_processes(0).count("process ")
    assert loaded
    return Measurement("processes that loading added on GPU 0", after - before, 0, fabric.world_size - 1)


def absent():
    """The first GPU that this machine does not have: on a machine without any, cuda:0."""
    return f"cuda:{torch.cuda.device_count()}"


@contextmanager
def stand_in_for_gpus():
    """Take every tensor that torch.load sends to a device, as CUDA would if that GPU were here, and note the device."""
    sent = []

    def restore(storage, location):
        sent.append(location)
        return storage

    with patch("torch.serialization.default_restore_location", restore), patch.object(CUDAAccelerator, "is_available", lambda: True):
        yield sent


def elsewhere(fabric, path, devices):
    """How many tensors are neither on the CPU nor on this rank's device."""
    away = sum(device not in ("cpu", str(fabric.device)) for device in devices)
    return Measurement("tensors on a GPU that is not this rank's", away, healthy=0, broken=devices_in_checkpoint(path)[absent()])


@variant
def with_fabric(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path)  # BUG: as above
    return elsewhere(fabric, path, sent)


@variant
def onto_the_cpu(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path)  # BUG: as above
    return elsewhere(fabric, path, sent)


@variant
def onto_own_device(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path)  # BUG: as above
    return elsewhere(fabric, path, sent)


@variant
def with_a_function(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path)  # BUG: as above
    return elsewhere(fabric, path, sent)


@variant
def with_load_from_checkpoint(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        Module.load_from_checkpoint(path)  # BUG: passes no map_location on, wherever a GPU is
    return elsewhere(fabric, path, sent)


@variant(needs="torch>=2.7")
def under_fake_tensors(fabric):  # fake tensors have a device and no memory: what torch itself would do, without the GPU
    path = checkpoint(fabric, absent())
    with FakeTensorMode():
        loaded = torch.load(path)  # BUG: as above
    return elsewhere(fabric, path, [str(tensor.device) for tensor in loaded["state_dict"].values()])


@variant(Raises(RuntimeError, "Attempting to deserialize object on"))
def without_that_gpu(fabric):
    path = checkpoint(fabric, absent())
    loaded = torch.load(path)  # BUG: the GPU that it was saved from is not on this machine
    return elsewhere(fabric, path, [str(tensor.device) for tensor in loaded["state_dict"].values()])


if __name__ == "__main__":
    main()
