"""Moving a DDP model off its device and back ends gradient averaging, and nothing says so."""

from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.toys import adam, batch, toy, train, two_steps


@variant(needs="gpu")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    model.cpu()
    model, optimizer = fabric.setup(model.module, optimizer.optimizer)  # FIX: a new wrapper puts its hooks on the new nodes
    return two_steps(fabric, model, optimizer, curve=50)


@variant(needs="gpu")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    model.cpu()
    model = DistributedDataParallel(model.module.to(fabric.device))  # FIX: as above; the optimizer's parameters are the same objects
    return two_steps(fabric, model, optimizer)


@variant
def on_cpu(fabric):  # without a GPU, cpu() moves nothing: a change of dtype and back replaces the same nodes
    model, optimizer = fabric.setup(*toy())
    model.double()
    model, optimizer = fabric.setup(model.module.float(), optimizer.optimizer)  # FIX: as above
    return two_steps(fabric, model, optimizer, curve=50)


@variant
def on_cpu_with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module)
    model.double()
    model = DistributedDataParallel(model.module.float())  # FIX: as above
    return two_steps(fabric, model, optimizer)


# --8<-- [start:off_accelerator]
@contextmanager
def off_accelerator(model, optimizer, away="cpu"):
    """Lend the memory of a wrapped model, its gradients and its optimizer to the body of a ``with``; it must not use them."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}  # tied tensors share one
    copies = [(s, torch.UntypedStorage(s.nbytes(), device=away).copy_(s)) for s in storages.values()]
    try:
        for storage in storages.values():
            storage.resize_(0)  # FIX: the memory goes, the parameters, their nodes and DDP's hooks stay
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other libraries see the memory only now
        yield
    finally:
        for storage, copy in copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


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
    with off_accelerator(model, optimizer):  # FIX: as above; storages can go on a CPU too
        pass
    return two_steps(fabric, model, optimizer, after=1, make=adam)


if __name__ == "__main__":
    main()
