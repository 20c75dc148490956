"""A parameter that gets no gradient leaves DDP's reduction unfinished: no gradient is averaged in that step, and the next one raises."""

from itertools import repeat

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import parameters_without_gradient
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement, Raises
from ddp_pitfalls.toys import sgd, weights
from ddp_pitfalls.trainers import trainer


class Net(nn.Module):
    """Three layers; the loss of a step may leave out the first one."""

    def __init__(self, width=8):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, inputs, leave_out=True):
        hidden = inputs if leave_out else self.first(inputs).tanh()
        return self.third(self.second(hidden).tanh()).square().mean()


def inputs(*ranks, width=8):
    return torch.cat([torch.randn(4, width, generator=torch.Generator().manual_seed(rank)) for rank in ranks])


def train(model, optimizer, batch, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()


def trained(fabric, net):
    """The weights of the used layers after two steps, against training in one process on the batches of all ranks."""

    def used(net):
        return weights(nn.Sequential(net.second, net.third))

    def alone(*ranks):
        net = Net()
        train(net, sgd(net.parameters()), inputs(*ranks))
        return used(net)

    quantity = "weights of the second and the third layer after two steps"
    return Measurement(quantity, used(net), alone(*range(fabric.world_size)), alone(fabric.global_rank))


def averaged(fabric, net, broken, width=8):
    """What the gradients of the second and the third layer are, told by gradients that one process computes."""

    def alone(*ranks):
        net = Net(width)
        net(inputs(*ranks, width=width)).backward()
        return torch.stack([net.second.weight.grad, net.third.weight.grad])

    idle = [f"first.{name}" for name, parameter in net.first.named_parameters() if parameter.requires_grad]
    assert parameters_without_gradient(net) == idle
    own, mean = alone(fabric.global_rank), alone(*range(fabric.world_size))
    known = {"mean of all ranks": mean, "its own": own, "its own / number of ranks": own / fabric.world_size}
    value = [
        next((name for name, gradient in known.items() if torch.allclose(layer.weight.grad.cpu(), gradient[i], atol=1e-7)), "other")
        for i, layer in enumerate((net.second, net.third))
    ]
    return Measurement("gradients of the second and the third layer", value, ["mean of all ranks"] * 2, [broken] * 2)


@variant(Raises(RuntimeError, "Expected to have finished reduction in the prior iteration before starting a new one."))
def with_ddp(fabric):
    net = Net().to(fabric.device)
    model = DistributedDataParallel(net)  # BUG: DDP will wait for a gradient of the first layer
    train(model, sgd(net.parameters()), inputs(fabric.global_rank).to(fabric.device))
    return trained(fabric, net)


@variant(Raises(RuntimeError, "Expected to have finished reduction in the prior iteration before starting a new one."))
def with_fabric(fabric):
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))  # BUG: as above
    train(model, optimizer, inputs(fabric.global_rank).to(fabric.device))
    return trained(fabric, net)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        return self.net(batch)

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant(Raises(RuntimeError, "It looks like your LightningModule has parameters that were not used in producing the loss"))
def with_trainer(fabric):
    module = Module()
    trainer(fabric, max_steps=2).fit(module, repeat(inputs(fabric.global_rank)))  # BUG: as above
    return trained(fabric, module.net)


@variant
def first_step(fabric):
    net = Net().to(fabric.device)
    model = DistributedDataParallel(net)  # BUG: as above, and a script that takes one step never hears of it
    model(inputs(fabric.global_rank).to(fabric.device)).backward()
    return averaged(fabric, net, "its own")


@variant
def with_bucket_views(fabric):
    net = Net().to(fabric.device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)  # BUG: as above
    model(inputs(fabric.global_rank).to(fabric.device)).backward()
    return averaged(fabric, net, "its own / number of ranks")


@variant
def later_step(fabric):  # the layers are wide: the third one has a bucket of its own, and its gradient is complete
    net, batch = Net(width=600).to(fabric.device), inputs(fabric.global_rank, width=600).to(fabric.device)
    model = DistributedDataParallel(net)  # BUG: as above
    for leave_out in (False, False, True):
        net.zero_grad()
        model(batch, leave_out).backward()
    return averaged(fabric, net, "its own", width=600)


if __name__ == "__main__":
    main()
