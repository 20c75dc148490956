"""Moving a DDP model off its device and back ends gradient averaging, and nothing says so."""

from contextlib import ExitStack, contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.toys import adam, batch, toy, train, two_steps


@variant(needs="gpu")
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    model.cpu()
    model = fabric.setup(model.module)  # FIX: a new wrapper puts its hooks on the new nodes; the optimizer may stay
    return two_steps(fabric, model, optimizer, curve=50)


@variant(needs="gpu")
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    model.cpu()
    model = DistributedDataParallel(model.module.to(fabric.device))  # FIX: as above
    return two_steps(fabric, model, optimizer)


@variant
def on_cpu(fabric):  # without a GPU, cpu() moves nothing: a change of dtype and back replaces the same nodes
    model, optimizer = fabric.setup(*toy())
    model.double()
    model = fabric.setup(model.module.float())  # FIX: as above
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
    """Lend the memory of a wrapped model, its gradients and its optimizer's state to the ``with`` body, which must use none of them."""
    home = {p.device for p in model.parameters()}
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    for state in getattr(optimizer, "optimizer", optimizer).state.values():  # Fabric and the Trainer wrap the optimizer
        tensors += state.values()
    dense = (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided)
    storages = {s.data_ptr(): s for s in dense if s.device in home}  # several tensors may share one

    def refuse(*_):
        raise RuntimeError("the model was called while its memory is lent: call it outside of off_accelerator")

    def put_back(storage, copy):
        if not storage.nbytes():
            storage.resize_(copy.nbytes())
            storage.copy_(copy)

    with ExitStack() as afterwards:  # runs all that it holds, whatever fails
        for module in model.modules():
            afterwards.callback(module.register_forward_pre_hook(refuse).remove)
        for storage in storages.values():
            if storage.device.type == "cpu" and storage.is_shared():
                raise RuntimeError("a tensor in shared memory cannot be lent: other processes use it")
            copy = torch.UntypedStorage(storage.nbytes(), device=away).copy_(storage)
            afterwards.callback(put_back, storage, copy)
            storage.resize_(0)  # FIX: the memory goes; the parameters, their nodes and DDP's hooks stay
        torch.cuda.empty_cache()  # other libraries see the memory only now
        yield


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


@variant
def one_layer(fabric):  # a part of the parameters: one step trains wrongly, the next one raises
    model, optimizer = fabric.setup(*toy())
    model.module[0].double().float()
    model = fabric.setup(model.module)  # FIX: as in on_cpu
    return two_steps(fabric, model, optimizer)


if __name__ == "__main__":
    main()
