"""What ``off_accelerator`` promises, on a CPU: run as a plain script, with the pattern importable as ``pattern``."""

import copy
import tempfile
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from pattern import off_accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def step(model, optimizer, set_to_none=True):
    optimizer.zero_grad(set_to_none=set_to_none)
    model(INPUTS).square().mean().backward()
    optimizer.step()


def trained(model):
    optimizer = adam(model)
    step(model, optimizer)
    return model, optimizer


def tensors(model, optimizer):
    """Everything that holds memory: parameters, buffers, gradients, optimizer state."""
    found = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found + [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def held(model, optimizer):
    return [t.untyped_storage().nbytes() for t in tensors(model, optimizer)]


def values(model, optimizer):
    return [t.detach().clone() for t in tensors(model, optimizer)]


def equal(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted))


@contextmanager
def raises(kind, words):
    try:
        yield
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error!r}"
        assert error.__context__ is None, f"and while that was handled: {error.__context__!r}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def unchanged(model, optimizer):
    """The same values before and after, and a model that works."""
    before = values(model, optimizer)
    yield
    assert equal(values(model, optimizer), before)
    step(model, optimizer)


def memory_goes_and_comes_back():
    model, optimizer = trained(layers())
    with unchanged(model, optimizer):
        before = held(model, optimizer)
        with off_accelerator(model, optimizer):
            assert before and not any(held(model, optimizer))
        assert held(model, optimizer) == before


def parameters_stay_the_same_objects():
    model, optimizer = trained(layers())
    before = [id(p) for p in model.parameters()]
    with off_accelerator(model, optimizer):
        pass
    assert [id(p) for p in model.parameters()] == before


def body_raises():
    model, optimizer = trained(layers())
    with unchanged(model, optimizer), raises(KeyError, "index"), off_accelerator(model, optimizer):
        raise KeyError("index")


def before_the_first_step():
    model = layers()
    with unchanged(model, optimizer := adam(model)), off_accelerator(model, optimizer):
        assert not any(held(model, optimizer))


def used_twice_and_nested():
    model, optimizer = trained(layers())
    with unchanged(model, optimizer):
        for _ in range(2):
            with off_accelerator(model, optimizer):
                with off_accelerator(model, optimizer):
                    assert not any(held(model, optimizer))
                assert not any(held(model, optimizer)), "the inner one has put back what the outer one lent"


def two_optimizers():
    model = layers()
    one, two = torch.optim.Adam(model[0].parameters()), torch.optim.Adam(model[2].parameters())
    model(INPUTS).square().mean().backward()
    one.step()
    two.step()
    before = values(model, one) + values(model, two)
    with off_accelerator(model, one), off_accelerator(model, two):
        assert not any(held(model, one) + held(model, two))
    assert equal(values(model, one) + values(model, two), before)


def tied_parameters():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    model, optimizer = trained(model)
    with unchanged(model, optimizer), off_accelerator(model, optimizer):
        assert not any(held(model, optimizer))
    assert model[1].weight is model[0].weight


def parameters_that_view_one_storage():
    flat = torch.randn(72)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[0].weight, model[1].weight = (nn.Parameter(part.view(6, 6)) for part in flat.split(36))
    model, optimizer = trained(model)
    with unchanged(model, optimizer), off_accelerator(model, optimizer):
        assert not flat.untyped_storage().nbytes()
    with torch.no_grad():
        flat.zero_()
    assert not model[0].weight.any() and not model[1].weight.any()


def transposed_parameter():
    model = nn.Linear(6, 3)
    model.weight = nn.Parameter(torch.randn(6, 3).t())
    model, optimizer = trained(model)
    with unchanged(model, optimizer), off_accelerator(model, optimizer):
        pass
    assert model.weight.stride() == (1, 3)


def empty_and_meta_tensors():
    model = layers()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    model.register_buffer("nowhere", torch.empty(3, device="meta"))
    optimizer = adam(model)
    step(model, optimizer)
    with off_accelerator(model, optimizer):
        pass
    step(model, optimizer)


def sparse_gradients():
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    for lent in (False, True):
        optimizer.zero_grad()
        model(torch.tensor([0, 2])).sum().backward()
        if lent:
            with off_accelerator(model, optimizer):
                assert not model.weight.untyped_storage().nbytes()
        optimizer.step()
    assert model.weight.isfinite().all()


def a_graph_that_waits_for_its_backward():
    model, optimizer = trained(layers())
    twin = copy.deepcopy(model)
    loss, twin_loss = (m(INPUTS).square().mean() for m in (model, twin))
    with off_accelerator(model, optimizer):
        pass
    for one in (model, twin):
        one.zero_grad()
    loss.backward()
    twin_loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters()))


def memory_that_cannot_be_resized():
    with tempfile.NamedTemporaryFile() as file:
        outside = [
            (torch.ones(6, 6).share_memory_(), "a tensor in shared memory cannot be lent"),
            (torch.from_file(file.name, shared=True, size=36).view(6, 6), "a tensor in shared memory cannot be lent"),
            (torch.frombuffer(bytearray(144), dtype=torch.float32).view(6, 6), "not resizable"),
        ]
        for foreign, words in outside:
            for at in (0, 2):  # as the first storage, and after others are gone
                model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
                model[at].weight = nn.Parameter(foreign)
                model, optimizer = trained(model)
                with unchanged(model, optimizer), raises(RuntimeError, words), off_accelerator(model, optimizer):
                    raise AssertionError("the body ran")
                assert model[at].weight.untyped_storage().data_ptr() == foreign.untyped_storage().data_ptr()


def one_cannot_be_put_back():
    model, optimizer = trained(layers())
    before = values(model, optimizer)
    lost = model[0].weight
    with raises(RuntimeError, "not resizable"), off_accelerator(model, optimizer):
        lost.detach().numpy()  # pins the storage at its size, which is zero now
    assert not lost.untyped_storage().nbytes()
    found = tensors(model, optimizer)
    assert all(now is lost or torch.equal(now, then) for now, then in zip(found, before)), "the others were not put back"


def model_called_in_the_body():
    model, optimizer = trained(layers())
    words = "the model was called while its memory is lent"
    with unchanged(model, optimizer), raises(RuntimeError, words), off_accelerator(model, optimizer):
        model(INPUTS)
    with unchanged(model, optimizer), raises(RuntimeError, words), off_accelerator(model, optimizer):
        model[0](INPUTS)
    assert not any(m._forward_pre_hooks for m in model.modules())


def copies_are_let_go():
    model, optimizer = trained(layers())
    with off_accelerator(model, optimizer) as lent:
        assert lent is None
    storage = model[0].weight.untyped_storage()
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None and storage.nbytes()


def fabric_wrappers():
    fabric = Fabric(accelerator="cpu", devices=1)
    module = layers()
    model, optimizer = fabric.setup(module, adam(module))
    step(model, optimizer)
    with unchanged(model, optimizer.optimizer), off_accelerator(model, optimizer):
        assert not any(held(module, optimizer.optimizer))
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())  # gives the inner optimizer a new state
    with unchanged(model, optimizer.optimizer), off_accelerator(model, optimizer):
        assert not any(held(module, optimizer.optimizer))
    with unchanged(model, optimizer.optimizer), raises(RuntimeError, "the model was called"), off_accelerator(model, optimizer):
        model(INPUTS)


def gradients_are_still_averaged():
    """DDP hands every bucket of gradients to the hook: with one rank, that they arrive there shows that they would be averaged."""
    seen = []

    def double(_, bucket):
        seen.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(2))
        return future

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        for set_to_none in (True, False):
            runs = []
            for lend in (False, True):
                module = layers()
                model, optimizer = DistributedDataParallel(module, **options), adam(module)
                model.register_comm_hook(None, double)
                seen.clear()
                for _ in range(4):  # the second step is where DDP builds its buckets anew
                    step(model, optimizer, set_to_none)
                    if lend:
                        with off_accelerator(model, optimizer):
                            assert not any(held(model, optimizer)), options
                assert sum(seen) == 4 * sum(p.numel() for p in model.parameters()), options
                runs.append(values(model, optimizer))
            assert equal(*runs), f"lending has changed the training with {options}"


def buckets_go_with_the_gradients_that_view_them():
    model = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
    model, optimizer = trained(model)
    bucket = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in model.parameters()}
    assert sum(s.nbytes() for s in bucket.values()) >= sum(4 * p.numel() for p in model.parameters())
    with off_accelerator(model, optimizer):
        assert not any(s.nbytes() for s in bucket.values())
    assert all(s.nbytes() for s in bucket.values())


ALONE = [
    memory_goes_and_comes_back,
    parameters_stay_the_same_objects,
    body_raises,
    before_the_first_step,
    used_twice_and_nested,
    two_optimizers,
    tied_parameters,
    parameters_that_view_one_storage,
    transposed_parameter,
    empty_and_meta_tensors,
    sparse_gradients,
    a_graph_that_waits_for_its_backward,
    memory_that_cannot_be_resized,
    one_cannot_be_put_back,
    model_called_in_the_body,
    copies_are_let_go,
    fabric_wrappers,
]
IN_A_GROUP = [gradients_are_still_averaged, buckets_go_with_the_gradients_that_view_them]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in ALONE:
        check()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=0, world_size=1)
        for check in IN_A_GROUP:
            check()
        dist.destroy_process_group()
