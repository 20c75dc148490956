"""torch.load without map_location puts every rank's tensors on the GPU from which rank 0 saved them."""

import tempfile
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_pitfalls.checks import devices_in_checkpoint
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Measurement
from ddp_pitfalls.toys import batch, toy
from ddp_pitfalls.trainers import trainer


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
    loaded = fabric.load(path)  # FIX: onto the CPU, from where load_state_dict copies to this rank's GPU
    held = [torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()) if gpu != fabric.device.index]
    assert loaded
    return Measurement("bytes on other ranks' GPUs", sum(held), 0, AnyOther("CUDA's allocator rounds the size of every tensor up"))


@variant(needs=("2 gpus", "nvidia-ml-py"))
def processes_on_gpu_0(fabric):
    path = checkpoint(fabric)
    before = torch.cuda.list_gpu_processes(0).count("process ")  # what the driver says, through nvidia-ml-py
    fabric.barrier()
    loaded = torch.load(path, map_location=fabric.device)  # FIX: onto this rank's own GPU
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
        fabric.load(path)  # FIX: onto the CPU, as every load by a strategy of Lightning
    return elsewhere(fabric, path, sent)


@variant
def onto_the_cpu(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path, map_location="cpu")  # FIX: load_state_dict copies from there to wherever the model is
    return elsewhere(fabric, path, sent)


@variant
def onto_own_device(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path, map_location=fabric.device)  # FIX: the model is there already
    return elsewhere(fabric, path, sent)


@variant
def with_a_function(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        torch.load(path, map_location=lambda storage, tag: storage)  # FIX: a storage comes in on the CPU, and may stay
    return elsewhere(fabric, path, sent)


@variant
def with_load_from_checkpoint(fabric):
    path = checkpoint(fabric, absent())
    with stand_in_for_gpus() as sent:
        Module.load_from_checkpoint(path, map_location="cpu")  # FIX: as for torch.load
    return elsewhere(fabric, path, sent)


@variant(protects="the Trainer loads the file of ckpt_path onto the CPU")
def with_ckpt_path(fabric):
    path, data = Path(tempfile.gettempdir(), "trainer.ckpt"), repeat(batch(fabric.global_rank, step=0))
    before, after = trainer(fabric, max_steps=1), trainer(fabric, max_steps=2)
    before.fit(Module(), data)
    with patch("torch.serialization.location_tag", return_value=absent()):
        before.save_checkpoint(path)
    fabric.barrier()
    with stand_in_for_gpus() as sent:
        after.fit(Module(), data, ckpt_path=path)  # FIX: as with_fabric, and the optimizer's state with it
    return elsewhere(fabric, path, sent)


@variant(needs="torch>=2.7")
def under_fake_tensors(fabric):  # fake tensors have a device and no memory: what torch itself would do, without the GPU
    path = checkpoint(fabric, absent())
    with FakeTensorMode():
        loaded = torch.load(path, map_location="cpu")  # FIX: as above
    return elsewhere(fabric, path, [str(tensor.device) for tensor in loaded["state_dict"].values()])


@variant
def without_that_gpu(fabric):
    path = checkpoint(fabric, absent())
    loaded = torch.load(path, map_location="cpu")  # FIX: as above
    return elsewhere(fabric, path, [str(tensor.device) for tensor in loaded["state_dict"].values()])


if __name__ == "__main__":
    main()
