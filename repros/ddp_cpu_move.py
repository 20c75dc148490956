"""Moving a DDP model off its device and back ends gradient averaging, and nothing says so."""

from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Raises
from ddp_pitfalls.toys import adam, batch, toy, train, two_steps


@variant(needs="gpu")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    model.cpu()
    fabric.to_device(model)  # BUG: a move gives every parameter a new autograd node, and DDP's hooks stay on the old ones
    return two_steps(fabric, model, optimizer, curve=50)


@variant(needs="gpu")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    model.cpu()
    model.to(fabric.device)  # BUG: as above
    return two_steps(fabric, model, optimizer)


@variant
def on_cpu(fabric):  # without a GPU, cpu() moves nothing: a change of dtype and back replaces the same nodes
    model, optimizer = fabric.setup(*toy())
    model.double()
    model.float()  # BUG: as above
    return two_steps(fabric, model, optimizer, curve=50)


@variant
def on_cpu_with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module)
    model.double()
    model.float()  # BUG: as above
    return two_steps(fabric, model, optimizer)


# --8<-- [start:off_accelerator]
@contextmanager
def off_accelerator(model, optimizer, away="cpu"):
    """Lend the memory of a wrapped model to the body of a ``with``."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    model.to(away)
    try:
        yield
    finally:
        model.to(device, dtype)  # BUG: as above; and the optimizer's state never left


# --8<-- [end:off_accelerator]


@variant(needs="gpu")
def lend_the_gpu(fabric):
    model, optimizer = fabric.setup(*toy(adam))
    train(model, optimizer, [batch(fabric.global_rank, step=0)], fabric.backward)
    with off_accelerator(model, optimizer):
        pass  # build the index
    return two_steps(fabric, model, optimizer, after=1, make=adam)


@variant
def lend_on_cpu(fabric):
    model, optimizer = fabric.setup(*toy(adam))
    train(model, optimizer, [batch(fabric.global_rank, step=0)], fabric.backward)
    with off_accelerator(model, optimizer, away=torch.float64):  # BUG: a dtype stands for another device, as in on_cpu
        pass
    return two_steps(fabric, model, optimizer, after=1, make=adam)


@variant(Raises(RuntimeError, "Expected to have finished reduction in the prior iteration"))
def one_layer(fabric):  # a part of the parameters: one step trains wrongly, the next one raises
    model, optimizer = fabric.setup(*toy())
    model.module[0].double().float()  # BUG: as in on_cpu
    return two_steps(fabric, model, optimizer)


if __name__ == "__main__":
    main()
