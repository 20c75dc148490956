"""Training loops without a fault, each with another feature of DDP: ``Watch`` says nothing in two hundred steps."""

import copy
import io
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_pitfalls.checks import Watch, watch_fabric, watch_trainer
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Measurement
from ddp_pitfalls.toys import toy
from ddp_pitfalls.trainers import fabric_with, trainer

STEPS, EVERY = 200, 5


class Net(nn.Module):
    """With tied and frozen parameters, buffers that a forward changes, one that is no number, dropout, and a layer used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.tied = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout()
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, inputs):
        hidden = self.dropout(self.norm(self.first(inputs))).tanh()
        return self.frozen(self.tied(self.second(self.second(hidden))))


def batch(fabric, step, size=4):
    generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
    return torch.randn(size, 8, generator=generator)


def train(fabric, model, optimizer, *, steps=STEPS, accumulate=1, autocast=False, backward=torch.Tensor.backward, step=None):
    torch.manual_seed(fabric.global_rank)  # dropout draws
    for number in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    loss = model(batch(fabric, accumulate * number + micro)).square().mean()
                backward(loss)
        (step or optimizer.step)()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def silent(said, steps, watch=None):
    if watch is not None:
        assert watch.steps == steps, watch.steps
    return Measurement("what the watch said", said, healthy=[], broken=AnyOther("any text is a false alarm"))


def watched(fabric, *, module=None, hook=None, make=sgd, options=None, **ddp):
    model = DistributedDataParallel(Net() if module is None else module, **ddp)
    if hook is not None:
        model.register_comm_hook(*hook)
    said = []
    watch = Watch(model, every=EVERY, tell=said.append)
    train(fabric, model, make(model), **(options or {}))
    return silent(said, STEPS, watch)


@variant
def plain(fabric):
    return watched(fabric)


@variant
def accumulated(fabric):
    return watched(fabric, options={"accumulate": 3})


@variant
def mixed_precision(fabric):
    return watched(fabric, options={"autocast": True})


@variant
def low_precision(fabric):
    return watched(fabric, module=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16(), options={"autocast": True})


@variant
def bucket_views(fabric):
    return watched(fabric, gradient_as_bucket_view=True, options={"accumulate": 2})


@variant
def static_graph(fabric):
    return watched(fabric, static_graph=True)


@variant
def small_buckets(fabric):
    return watched(fabric, bucket_cap_mb=0.0001)


@variant
def buffers_not_broadcast(fabric):
    module = nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8))
    module.register_buffer("scale", torch.ones(3))
    return watched(fabric, module=module, broadcast_buffers=False)


class Branch(nn.Module):
    """Uses one of two layers, by turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.turn = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), 0

    def forward(self, inputs):
        self.turn += 1
        return self.layers[self.turn % 2](inputs)


@variant
def unused_by_turns(fabric):
    return watched(fabric, module=Branch(), find_unused_parameters=True)


@variant
def compressed(fabric):
    return watched(fabric, hook=(None, default_hooks.fp16_compress_hook))


@variant
def power_sgd(fabric):
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=10)
    return watched(fabric, module=nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), hook=(state, powerSGD_hook.powerSGD_hook))


@variant
def sharded_optimizer(fabric):
    return watched(fabric, make=lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01))


@variant
def sparse_gradients(fabric):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(16, 8, sparse=True)

        def forward(self, inputs):
            return self.table(inputs.abs().mul(4).long().clamp(max=15))

    return watched(fabric, module=Words(), make=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))


@variant
def complex_and_double(fabric):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
            self.wide, self.one = nn.Parameter(torch.randn(8).double()), nn.Parameter(torch.tensor(1.0))

        def forward(self, inputs):
            return (inputs.to(torch.complex64) @ self.turn).abs() + self.wide.float() * self.one

    return watched(fabric, module=Mixed())


@variant
def checkpointed(fabric):
    class Saving(Net):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    return watched(fabric, module=Saving())


@variant
def scaled(fabric):
    module = DistributedDataParallel(nn.Linear(8, 8))
    optimizer, said = sgd(module), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1e34, growth_interval=3)  # it grows until a step overflows and is left out
    watch = Watch(module, every=EVERY, tell=said.append)

    def step():
        scaler.step(optimizer)
        scaler.update()

    train(fabric, module, optimizer, backward=lambda loss: scaler.scale(1000 * loss).backward(), step=step)
    assert 0 < watch.steps < STEPS, watch.steps
    return silent(said, STEPS)


@variant
def by_closure(fabric):
    module = DistributedDataParallel(Net())
    optimizer, said = sgd(module), []
    watch = Watch(module, every=EVERY, tell=said.append)
    torch.manual_seed(fabric.global_rank)
    for number in range(STEPS):

        def closure(number=number):
            optimizer.zero_grad()
            loss = module(batch(fabric, number)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)
    return silent(said, STEPS, watch)


@variant
def two_optimizers(fabric):
    module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    said, both = [], [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in module.module]
    watch = Watch(module, every=EVERY, tell=said.append)
    train(fabric, module, both[0], step=lambda: [one.step() for one in both])
    return silent(said, STEPS, watch)


@variant
def another_optimizer_later(fabric):
    module, said = DistributedDataParallel(Net()), []
    watch = Watch(module, every=EVERY, tell=said.append)
    first = sgd(module)
    train(fabric, module, first, steps=STEPS // 2)
    train(fabric, module, sgd(module), steps=STEPS - STEPS // 2)
    return silent(said, STEPS, watch)


@variant
def an_optimizer_that_calls_another_step(fabric):
    """Its parent's; and one that wants a number, not a closure."""

    class Noting(torch.optim.SGD):
        def step(self, loss, size):
            assert (loss, size) == (0.5, 4)
            return super().step()

    module, said = DistributedDataParallel(nn.Linear(8, 8)), []
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # from now on the parent's step looks too
    optimizer = Noting(module.parameters(), lr=0.01)
    watch = Watch(module, every=EVERY, tell=said.append)
    train(fabric, module, optimizer, step=lambda: optimizer.step(0.5, 4))
    return silent(said, STEPS, watch)


@variant
def two_steps_in_a_forward(fabric):
    """Lightning's manual optimization."""

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = nn.Linear(8, 8), False

        def training_step(self, number, _):
            for part in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.net(batch(fabric, 2 * number + part)).square().mean())
                self.optimizers().step()

        def configure_optimizers(self):
            return sgd(self.net)

    said = []
    callback = watch_trainer(every=EVERY, tell=said.append, skip=["samples"])
    trainer(fabric, max_epochs=1, callbacks=[callback]).fit(Module(), range(STEPS // 2))
    return silent(said, STEPS, callback.watch)


@variant
def frozen_after_wrapping(fabric):
    model, said = DistributedDataParallel(Net(), find_unused_parameters=True), []
    watch = Watch(model, every=EVERY, tell=said.append)
    model.module.second.requires_grad_(False)
    train(fabric, model, sgd(model))
    return silent(said, STEPS, watch)


@variant
def equal_seeds_without_noise(fabric):
    """A loader draws the seed of its workers between two forwards of one step, the same on all ranks."""
    model, said = DistributedDataParallel(nn.Linear(8, 8)), []
    optimizer = sgd(model)
    watch = Watch(model, every=EVERY, tell=said.append)
    torch.manual_seed(7)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 8))
        next(iter(torch.utils.data.DataLoader([1])))
        model(batch(fabric, number)).square().mean().backward()
        optimizer.step()
    return silent(said, STEPS, watch)


@variant
def odd_inputs(fabric):
    """Sparse, nested, quantized, and none."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, *inputs):
            return self.net(inputs[-1])

    model, said = DistributedDataParallel(Last()), []
    optimizer = sgd(model)
    watch = Watch(model, every=EVERY, tell=said.append)
    warnings.simplefilter("ignore")  # nested tensors are new, quantized ones old
    odd = [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.empty(0), None]
    odd += [torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)]
    for number in range(STEPS):
        optimizer.zero_grad()
        model(*odd, batch(fabric, number)).square().mean().backward()
        optimizer.step()
    return silent(said, STEPS, watch)


@variant
def buffers_made_on_demand(fabric):
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, inputs):
            name = f"mask_of_{fabric.global_rank}"
            if not hasattr(self, name):
                self.register_buffer(name, torch.full((8,), 1.0 + fabric.global_rank))
            return self.net(inputs) * getattr(self, name)

    return watched(fabric, module=Masks(), broadcast_buffers=False)


@variant
def scripted(fabric):
    warnings.simplefilter("ignore")  # torch.jit is on its way out
    torch.manual_seed(0)
    return watched(fabric, module=nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8)))


@variant
def two_models(fabric):
    said = []
    models = [DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2)]
    watches = [Watch(model, every=EVERY, tell=said.append) for model in models]
    for model in models * 2:
        train(fabric, model, sgd(model), steps=STEPS // 2)
    assert [watch.steps for watch in watches] == [STEPS, STEPS]
    return silent(said, STEPS)


@variant
def evaluated_and_copied(fabric):
    """Between the steps: an evaluation with and without the wrapper, a copy of the model, a saved one, a step without a backward."""
    model = DistributedDataParallel(Net())
    optimizer, said = sgd(model), []
    watch = Watch(model, every=EVERY, tell=said.append)
    for _ in range(STEPS // 20):
        train(fabric, model, optimizer, steps=20)
        model.eval()
        with torch.no_grad():
            model(batch(fabric, 0))
            model.module(batch(fabric, 1))
        mean = copy.deepcopy(model.module)
        mean(batch(fabric, 2)).sum().backward()
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model, io.BytesIO())
        model.train()
        optimizer.zero_grad()
        optimizer.step()
    return silent(said, STEPS, watch)


@variant
def wrapped_again(fabric):
    module, said = Net(), []
    first = DistributedDataParallel(module)
    Watch(first, every=EVERY, tell=said.append)
    train(fabric, first, sgd(first), steps=STEPS // 2)
    again = DistributedDataParallel(module.double().float())
    watch = Watch(again, every=EVERY, tell=said.append)
    train(fabric, again, sgd(again), steps=STEPS // 2)
    return silent(said, STEPS // 2, watch)


@variant
def under_join(fabric):
    """There it does not look: a rank that is done would not answer."""
    model, said = DistributedDataParallel(nn.Linear(8, 8)), []
    watch = Watch(model, every=EVERY, tell=said.append)
    with Join([model]):
        train(fabric, model, sgd(model), steps=STEPS - fabric.global_rank)
    return silent(said, 0, watch)


@variant
def compiled_inside(fabric):
    return watched(fabric, module=torch.compile(Net(), backend="aot_eager"))


@variant
def compiled_outside(fabric):
    model, said = DistributedDataParallel(Net()), []
    compiled = torch.compile(model, backend="aot_eager")
    watch = Watch(compiled, every=EVERY, tell=said.append)
    train(fabric, compiled, sgd(model))
    return silent(said, STEPS, watch)


@variant
def one_rank(fabric):
    groups = [dist.new_group([rank]) for rank in range(fabric.world_size)]
    return watched(fabric, process_group=groups[fabric.global_rank])


@variant
def named_and_skipped(fabric):
    """A parameter of each rank's own, which DDP does not know, one that is idle on purpose, and equal random numbers."""
    module, said = Net(), []
    module.own = nn.Parameter(torch.full((3,), float(fabric.global_rank)))
    module.idle = nn.Linear(8, 8)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [".own"])
    model = DistributedDataParallel(module, find_unused_parameters=True)
    watch = Watch(model, every=EVERY, tell=said.append, ignore=["idle.*"], skip=["random"])
    torch.manual_seed(7)
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        (model(batch(fabric, number)).square().mean() + module.own.square().sum()).backward()
        optimizer.step()
    return silent(said, STEPS, watch)


@variant
def in_fabric(fabric):
    said = []
    other = fabric_with(fabric)
    other._callbacks = [watch_fabric(every=EVERY, tell=said.append)]
    model = other.setup(Net())
    optimizer = other.setup_optimizers(sgd(model))
    torch.manual_seed(fabric.global_rank)
    for number in range(2 * STEPS):
        with other.no_backward_sync(model, enabled=number % 2 == 0):
            other.backward(model(batch(fabric, number)).square().mean())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    [watch] = [hook.__self__ for hook in model._forward_module._forward_pre_hooks.values()]
    return silent(said, STEPS, watch)


@variant
def in_trainer(fabric):
    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, number, _):
            return self.net(batch(fabric, number)).square().mean()

        def configure_optimizers(self):
            return sgd(self.net)

        def on_train_start(self):
            torch.manual_seed(fabric.global_rank)

    said = []
    callback = watch_trainer(every=EVERY, tell=said.append)
    one = trainer(fabric, max_epochs=1, callbacks=[callback], accumulate_grad_batches=2, gradient_clip_val=0.1)
    one.fit(Module(), range(2 * STEPS))
    assert callback.watch.comparisons == STEPS // EVERY + 1
    return silent(said, STEPS, callback.watch)


@variant
def ends_within_an_accumulation(fabric):
    """There gradients are not averaged yet, and the Trainer's callback compares no more."""

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8)

        def training_step(self, number, _):
            self.trainer.should_stop = number == STEPS
            return self.net(batch(fabric, number)).square().mean()

        def configure_optimizers(self):
            return sgd(self.net)

    said = []
    callback = watch_trainer(every=EVERY, tell=said.append)
    one = trainer(fabric, max_epochs=-1, callbacks=[callback], accumulate_grad_batches=3)
    one.fit(Module(), range(2 * STEPS))
    return silent(said, callback.watch.steps, callback.watch)


@variant
def without_ddp(fabric):
    """What has no DDP wrapper is left alone by the callbacks."""
    watch_fabric().on_after_setup(fabric, toy()[0])
    callback = watch_trainer()
    callback.on_train_start(SimpleNamespace(strategy=SimpleNamespace(model=toy()[0])), None)
    callback.on_train_end(None, None)
    assert callback.watch is None
    return silent([], 0)


if __name__ == "__main__":
    main()
