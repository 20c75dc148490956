"""What ``Watch`` finds in training loops with one fault each, on which ranks it says so, and what it cannot see."""

import logging
import random
import re
import warnings
from collections import UserDict
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import FINDINGS, Fault, Watch, watch_fabric, watch_trainer
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import AnyOther, Measurement
from ddp_pitfalls.trainers import fabric_with, trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


def batch(fabric, step, size=4):
    generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
    return torch.randn(size, 8, generator=generator)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.01)


def step(fabric, model, optimizer, number, forward=None):
    optimizer.zero_grad()
    (forward or model)(batch(fabric, number)).square().mean().backward()
    optimizer.step()


def train(fabric, model, steps, forward=None, optimizer=None):
    optimizer = optimizer or sgd(model)
    for number in steps:
        step(fabric, model, optimizer, number, forward)


def watched(fabric, module=None, every=1, **options):
    """A wrapped model, its watch, and the list that gets what the watch says."""
    said = []
    model = DistributedDataParallel(Net() if module is None else module, **options.pop("ddp", {}))
    return model, Watch(model, every=every, tell=said.append, **options), said


MARKS = {  # what only the text of one kind has
    "hooks": r"does not (average|know)",
    "around": r"no forward since the last step went through DDP",
    "gradients": r"(?m)(^|^step \d+: )gradient of \S+: ",
    "parameters": r"(?m)(^|^step \d+: )[a-z]+\.weight: ",
    "buffers": r"buffer \S+: ",
    "idle": r"no gradient since the start",
    "samples": r"got the same batch",
    "random": r"drew the same random numbers",
    "steps": r"different numbers of steps",
    "model": r"other names, shapes",
}
assert set(MARKS) == set(FINDINGS)


def kinds(said):
    return sorted(kind for kind, pattern in MARKS.items() if any(re.search(pattern, text) for text in said))


def found(said, *expected, watch=None):
    """``watch`` is given where nothing is to be found: it must have looked."""
    assert expected or (watch is not None and watch.steps > 0), "nothing found by a watch that did not look"
    return Measurement("kinds of findings", kinds(said), healthy=sorted(expected), broken=AnyOther("any others: a miss or a false alarm"))


# Hooks


def after(change, *expected, steps=3):
    """Train, change the model in between, train on."""

    def run(fabric):
        model, _, said = watched(fabric)
        optimizer = sgd(model)
        train(fabric, model, range(2), optimizer=optimizer)
        assert said == []
        change(model.module, optimizer)
        train(fabric, model, range(2, 2 + steps), optimizer=optimizer)
        return found(said, *expected)

    return run


@variant
def cast(fabric):
    return after(lambda net, _: net.double().float(), "hooks", "gradients")(fabric)


@variant
def other_memory(fabric):
    def change(net, _):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.set_(parameter.clone())

    return after(change, "hooks", "gradients")(fabric)


@variant
def replaced(fabric):
    """With another optimizer, so that all parameters train, each rank alone."""
    model, _, said = watched(fabric)
    train(fabric, model, range(2))
    model.module.load_state_dict({name: value.clone() for name, value in model.module.state_dict().items()}, assign=True)
    train(fabric, model, range(2, 4))
    return found(said, "hooks", "gradients")


@variant
def added(fabric):
    model, _, said = watched(fabric)
    optimizer = sgd(model)
    train(fabric, model, range(2), optimizer=optimizer)
    model.module.second = nn.Sequential(model.module.second, nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(model.module.second[1].parameters())})
    train(fabric, model, range(2, 4), optimizer=optimizer)
    assert any("DDP does not know second.1.weight, second.1.bias, which" in text for text in said), said
    return found(said, "hooks", "gradients")


@variant
def unfrozen(fabric):
    module = Net()
    module.first.requires_grad_(False)
    model, _, said = watched(fabric, module)
    optimizer = sgd(model)
    train(fabric, model, range(2), optimizer=optimizer)
    module.first.requires_grad_(True)
    train(fabric, model, range(2, 4), optimizer=optimizer)
    return found(said, "hooks", "gradients")


@variant
def frozen_is_no_fault(fabric):
    model, watch, said = watched(fabric, ddp={"find_unused_parameters": True})
    train(fabric, model, range(2))
    model.module.first.requires_grad_(False)
    train(fabric, model, range(2, 4))
    return found(said, watch=watch)


# Between ranks


@variant
def around_from_the_start(fabric):
    model, _, said = watched(fabric)
    train(fabric, model, range(3), forward=model.module)
    return found(said, "around", "gradients")


@variant
def never_synchronised(fabric):
    model, _, said = watched(fabric)
    with model.no_sync():
        train(fabric, model, range(2))
    return found(said, "around", "gradients")


@variant
def softmax_head(fabric):
    """Its gradients sum to zero on every rank."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(8, 5, bias=False)

    model, _, said = watched(fabric, Head(), skip=["around"])
    head, optimizer = model.module.head, sgd(model)
    loss = nn.functional.cross_entropy(head(batch(fabric, 0)), torch.arange(4))
    loss.backward()
    assert head.weight.grad.sum().abs() < 1e-6
    optimizer.step()
    return found(said, "gradients")


@variant
def weights_of_one_rank(fabric):
    """Gradients cannot show it: they are averaged."""
    model, watch, said = watched(fabric)
    train(fabric, model, range(1))
    if fabric.global_rank == 1:
        with torch.no_grad():
            model.module.first.weight[0, 0] += 1
    train(fabric, model, range(1, 5))
    unseen = kinds(said)
    watch.comparisons = 10  # the parameters' turn
    train(fabric, model, range(5, 6))
    assert unseen == [], unseen
    assert "first.weight: up to 1 away from rank 0 on rank 1" in said[0], said
    return found(said, "parameters")


@variant
def gradient_on_one_rank_only(fabric):
    model, _, said = watched(fabric)
    optimizer = sgd(model)
    model(batch(fabric, 0)).square().mean().backward()
    if fabric.global_rank == 1:
        model.module.first.weight.grad = None
    optimizer.step()
    assert "gradient of first.weight: none on rank 1" in said[0], said
    return found(said, "gradients")


@variant
def buffers_of_each_rank(fabric):
    module = Net()
    module.register_buffer("scale", torch.full((3,), float(fabric.global_rank)))
    model, _, said = watched(fabric, module, ddp={"broadcast_buffers": False})
    train(fabric, model, range(2))
    return found(said, "buffers")


@variant
def idle(fabric):
    module = Net()
    module.third = nn.Linear(8, 8)
    model, _, said = watched(fabric, module, every=3, ddp={"find_unused_parameters": True})
    train(fabric, model, range(3))
    assert said == []
    train(fabric, model, range(3, 9))
    assert "no gradient since the start for third.weight, third.bias" in said[0], said
    return found(said, "idle")


@variant
def one_batch_for_all(fabric):
    model, _, said = watched(fabric)
    optimizer = sgd(model)
    for number in range(2):
        assert said == []
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
    return found(said, "samples")


@variant
def equal_masks(fabric):
    module = nn.Sequential(nn.Dropout(), Net())
    model, _, said = watched(fabric, module)
    torch.manual_seed(5)
    train(fabric, model, range(1))
    assert "drew the same random numbers from torch between" in said[0], said
    return found(said, "random")


@variant
def unseen_equal_draws_of_python(fabric):
    """They often are equal on purpose: a branch that all ranks take together."""

    class Skips(Net):
        def forward(self, inputs):
            return super().forward(nn.functional.dropout(inputs)) * random.random()

    model, watch, said = watched(fabric, Skips())
    random.seed(5)
    torch.manual_seed(fabric.global_rank)
    train(fabric, model, range(1))
    return found(said, watch=watch)


@variant
def one_batch_in_a_mapping(fabric):
    @dataclass(slots=True)
    class Batch:
        parts: UserDict

    class Unpacks(Net):
        def forward(self, batch):
            return super().forward(batch.parts["inputs"][0])

    model, _, said = watched(fabric, Unpacks())
    optimizer = sgd(model)
    for number in range(2):
        optimizer.zero_grad()
        samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        model(Batch(UserDict(inputs=[samples]))).square().mean().backward()
        optimizer.step()
    return found(said, "samples")


@variant
def compared_by_hand(fabric):
    """By a watch that is made between forward and step, and after a short run, in which only step 1 was compared."""
    module = Net()
    module.third = nn.Linear(8, 8)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer, said = sgd(model), []
    model(batch(fabric, 0)).square().mean().backward()
    watch = Watch(model, tell=said.append)
    watch.check()
    optimizer.step()
    assert said == [], said
    train(fabric, model, range(1, 20), optimizer=optimizer)
    watch.check()
    return found(said, "idle")


@variant
def twice_the_gradient(fabric):
    """The sum of 32 bits would be the same: each number adds 2 to the power of 23, and there are 512 of them."""
    model, _, said = watched(fabric, nn.Linear(8, 64))
    optimizer = sgd(model)
    model(batch(fabric, 0)).square().mean().backward()
    model.module.weight.grad.mul_(1 + fabric.global_rank % 2)
    optimizer.step()
    return found(said, "gradients")


@variant
def another_fault_of_the_same_kind(fabric):
    model, _, said = watched(fabric)
    optimizer = sgd(model)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(fabric, number)).square().mean().backward()
        for parameter in list(model.parameters())[: number and 2 * number - 1]:
            parameter.grad.mul_(1 + fabric.global_rank)
        optimizer.step()
    told = [re.findall(r"gradient of (\S+): ", text) for text in said]
    assert told == [["first.weight"], ["first.bias", "second.weight"], ["second.bias"]], said
    return found(said, "gradients")


@variant
def adapter_added_to_a_frozen_model(fabric):
    model, _, said = watched(fabric, ddp={"find_unused_parameters": True})
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    model.module.second = nn.Sequential(model.module.second, nn.Linear(4, 4))
    train(fabric, model, range(3), optimizer=sgd(model.module.second[1]))
    assert "DDP does not know second.1.weight" in said[0], said
    return found(said, "hooks", "gradients")


@variant
def a_step_more_on_one_rank(fabric):
    """It steps without a new backward: nothing hangs, and the ranks differ from then on."""
    model, watch, said = watched(fabric, every=100)
    optimizer = sgd(model)
    train(fabric, model, range(2), optimizer=optimizer)
    if fabric.global_rank == 1:
        optimizer.step()
    watch.check()
    return found(said, "around", "steps", "parameters")


@variant
def another_model(fabric):
    model, watch, said = watched(fabric, every=100)
    train(fabric, model, range(2))
    if fabric.global_rank == 1:
        model.module.own = nn.Parameter(torch.ones(3))
        model.module.first.requires_grad_(False)
    watch.check()
    return found(said, "hooks", "model")


@variant
def around_beside_through(fabric):
    """In every step one forward and backward through DDP, and another around it."""
    model, _, said = watched(fabric)
    optimizer = sgd(model)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(fabric, number)).square().mean().backward()
        with model.no_sync():
            model.module(batch(fabric, number)).abs().mean().backward()
        optimizer.step()
    return found(said, "gradients")


@variant
def forward_called_directly(fabric):
    """DDP averages, but no hook runs: a false alarm that the page names."""
    model, _, said = watched(fabric)
    train(fabric, model, range(3), forward=lambda inputs: model.forward(inputs))
    return found(said, "around")


@variant
def ranks_that_do_not_meet(fabric):
    """Rank 0 leaves out a step and waits; the comparison of the others ends with the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(Net(), process_group=group)
    watch, optimizer, told = Watch(model, every=1), sgd(model), ""
    train(fabric, model, range(1), optimizer=optimizer)
    model(batch(fabric, 1)).square().mean().backward()
    try:
        optimizer.step() if fabric.global_rank else watch.stop()
    except Fault as error:
        told = str(error)
    expected = "step 2: the ranks did not meet: one has made another number of steps, or has ended" if fabric.global_rank else ""
    return Measurement("fault", told, healthy=expected, broken=AnyOther("another one, or none"))


@variant
def a_thousand_forwards_without_a_step(fabric):
    heard = logged()
    model = DistributedDataParallel(nn.Linear(1, 1))
    watch = Watch(model)
    for _ in range(1001):
        model(torch.ones(1, 1))
    assert watch.steps == 0
    return Measurement("log records", [text.partition(",")[0] for text in heard], healthy=["1000 forwards"], broken=AnyOther("others"))


# How it is told


@variant
def all_ranks_raise_together(fabric):
    """What one rank alone found is raised on all of them, in the same words."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.module.first.requires_grad_(fabric.global_rank == 0)
    Watch(model, every=3, tell="raise", skip=["model", "gradients", "parameters"])
    model.module.first.requires_grad_(True)
    told = []
    try:
        train(fabric, model, range(9), forward=model.module)
    except Fault as error:
        told.append(str(error))
    everyone = [None] * fabric.world_size
    dist.all_gather_object(everyone, told)
    assert everyone.count(told) == fabric.world_size, everyone
    others = ", ".join(map(str, range(1, fabric.world_size)))
    assert (
        f"rank{'s' if fabric.world_size > 2 else ''} {others}: DDP does not average the gradient of first.weight, first.bias" in told[0]
    ), told
    assert "docs/pitfalls/unfreeze-after-wrap.md" in told[0]
    return found(told, "hooks")


@variant
def rank_0_warns_once(fabric):
    """Of each of two findings: gradients at the first step, the forward at the second."""
    model = DistributedDataParallel(Net())
    Watch(model, every=1, tell="warn")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(fabric, model, range(4), forward=model.module)
    return Measurement("warnings", len(heard), healthy=2 if fabric.global_rank == 0 else 0, broken=AnyOther("more or fewer"))


def logged():
    """The records that the logger of the checks gets from now on."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("ddp_pitfalls.checks")
    logger.addHandler(handler)
    logger.propagate = False
    return heard


@variant
def rank_0_logs(fabric):
    heard = logged()
    model = DistributedDataParallel(Net())
    Watch(model, every=1, tell="log")
    train(fabric, model, range(4), forward=model.module)
    return Measurement("log records", len(heard), healthy=2 if fabric.global_rank == 0 else 0, broken=AnyOther("more or fewer"))


@variant
def a_rank_logs_at_once(fabric):
    """Between two comparisons, since it may never come to the next."""
    heard = logged()
    model, _, said = watched(fabric, every=100)
    train(fabric, model, range(2))
    train(fabric, model, range(2, 4), forward=model.module)
    assert said == []
    told = [
        text for text in heard if text.startswith(f"rank {fabric.global_rank}, step 3: no forward since the last step went through DDP")
    ]
    return Measurement("log records", len(told), healthy=1, broken=AnyOther("more or fewer"))


@variant
def in_fabric(fabric):
    other = fabric_with(fabric)
    other._callbacks = [watch_fabric(every=2, skip=["gradients"])]
    model = other.setup(Net())
    train(fabric, model, range(2))
    told = []
    try:
        train(fabric, model, range(2, 4), forward=model.module)
    except Fault as error:
        told.append(str(error))
    return found(told, "around")


@variant
def in_trainer(fabric):
    """The step after the last comparison is compared at the end of the training."""

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, number, _):
            if number == 3:
                self.net.double().float()
            return self.net(batch(fabric, number)).square().mean()

        def configure_optimizers(self):
            return sgd(self.net)

    said = []
    trainer(fabric, max_epochs=1, callbacks=[watch_trainer(every=100, tell=said.append)]).fit(Module(), range(4))
    return found(said, "gradients", "hooks")


@variant
def wrong_options(fabric):
    model = DistributedDataParallel(Net())
    told = []
    both = nn.ModuleList([model, DistributedDataParallel(Net())])
    for wrong in ({"model": Net()}, {"model": both}, {"every": 0}, {"tell": "shout"}, {"skip": ["hook"]}):
        try:
            Watch(**{"model": model, **wrong})
        except ValueError as error:
            told.append(str(error).partition(":")[0])
    none, two = "the model has no DistributedDataParallel wrapper", "the model has 2 DistributedDataParallel wrappers"
    expected = [none, two, "every=0", "tell='shout'", "skip=['hook']"]
    return Measurement("errors", told, healthy=expected, broken=AnyOther("other errors, or none"))


@variant
def stopped(fabric):
    model, watch, said = watched(fabric)
    watch.stop()
    train(fabric, model, range(3), forward=model.module)
    assert watch.steps == 0
    return Measurement("kinds of findings", kinds(said), healthy=[], broken=AnyOther("a watch that has not stopped"))


# What it cannot see


@variant
def unseen_between_comparisons(fabric):
    """A gradient of one rank's own in a step between two comparisons."""
    model, watch, said = watched(fabric, every=4)
    optimizer = sgd(model)
    for number in range(9):
        optimizer.zero_grad()
        model(batch(fabric, number)).square().mean().backward()
        if number == 2:
            model.module.first.weight.grad.mul_(1 + fabric.global_rank)
        optimizer.step()
    return found(said, watch=watch)


@variant
def unseen_where_all_are_wrong_alike(fabric):
    model, watch, said = watched(fabric)
    optimizer = sgd(model)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(fabric, number)).square().mean().mul(100).backward()
        optimizer.step()
    return found(said, watch=watch)


@variant
def unseen_in_another_order(fabric):
    """The sum of the bits does not tell where a number stands."""
    model, watch, said = watched(fabric)
    optimizer = sgd(model)
    model(batch(fabric, 0)).square().mean().backward()
    if fabric.global_rank == 1:
        model.module.first.weight.grad.copy_(model.module.first.weight.grad.flip(0))
    optimizer.step()
    return found(said, watch=watch)


@variant
def hooks_lost_before(fabric):
    """The check of the hooks knows only what it has seen; the gradients tell."""
    model = DistributedDataParallel(Net())
    model.double().float()
    said = []
    Watch(model, every=1, tell=said.append)
    train(fabric, model, range(2))
    return found(said, "gradients")


@variant
def unseen_same_samples_in_another_order(fabric):
    model, watch, said = watched(fabric)
    optimizer = sgd(model)
    for number in range(3):
        samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).roll(fabric.global_rank, 0)
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    return found(said, watch=watch)


@variant
def unseen_repeats_within_a_rank(fabric):
    model, watch, said = watched(fabric)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(fabric, 0).repeat(2, 1)).square().mean().backward()
        optimizer.step()
    return found(said, watch=watch)


@variant
def unseen_gradient_of_zeros(fabric):
    """Nor a parameter that has no gradient any more, once it had one."""

    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.never, self.once, self.steps = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), 0

        def forward(self, inputs):
            self.steps += 1
            out = super().forward(inputs) + 0 * self.never
            return out + self.once if self.steps == 1 else out

    model, watch, said = watched(fabric, Partly(), ddp={"find_unused_parameters": True})
    train(fabric, model, range(4))
    assert not model.module.never.grad.any()
    return found(said, watch=watch)


@variant
def unseen_draws_of_the_data(fabric):
    """Random numbers that the ranks draw alike outside forward and step: augmentation, for example."""
    model, watch, said = watched(fabric)
    torch.manual_seed(5)
    optimizer = sgd(model)
    for number in range(3):
        noise = torch.randn(1)
        optimizer.zero_grad()
        model(batch(fabric, number) + noise).square().mean().backward()
        optimizer.step()
    return found(said, watch=watch)


if __name__ == "__main__":
    main()
