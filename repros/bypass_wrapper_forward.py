"""DDP averages gradients only after a forward of its own: a call that goes around the wrapper trains each rank alone."""

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import replicas_differ, watch_forwards
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement, Raises
from ddp_pitfalls.toys import batch, everybody, sgd, toy, train, trained_alone, weights
from ddp_pitfalls.trainers import trainer


def mine(fabric):
    return [tuple(fabric.to_device(part) for part in batch(fabric.global_rank, step)) for step in range(2)]


def compared(fabric, module, bypassed=None):
    rank, ranks = fabric.global_rank, fabric.world_size
    together, alone = ([take(step) for step in range(2)] for take in (lambda s: everybody(ranks, s), lambda s: batch(rank, s)))
    differ = replicas_differ(module)
    assert bypassed is None or bypassed() == bool(differ), f"the check for a run of one's own says otherwise: {differ}"
    return Measurement("weights after two steps", weights(module), trained_alone(together), broken=trained_alone(alone))


@variant
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    bypassed = watch_forwards(model)
    train(model.module, optimizer, mine(fabric))  # BUG: the forward of the inner module; the wrapper never hears of it
    return compared(fabric, model, bypassed)


@variant
def with_fabric(fabric):
    module, optimizer = toy()
    model, optimizer = fabric.setup(module, optimizer)
    bypassed = watch_forwards(model)
    train(module, optimizer, mine(fabric), fabric.backward)  # BUG: setup returns the wrapper; the old name is still the inner module
    return compared(fabric, model, bypassed)


class Network(nn.Module):
    """Computes its loss in a method of its own."""

    def __init__(self):
        super().__init__()
        self.layers = toy()[0]

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, inputs, targets):
        return mse_loss(self(inputs), targets)


# --8<-- [start:call]
def call(model, method, *args, **kwargs):
    """Call a method of the module in a DDP wrapper, which the wrapper itself does not have."""
    return getattr(model.module, method)(*args, **kwargs)  # BUG: goes around the wrapper's forward


# --8<-- [end:call]


@variant
def another_method(fabric):
    model = DistributedDataParallel(Network().to(fabric.device))
    optimizer, bypassed = sgd(model.parameters()), watch_forwards(model)
    for inputs, targets in mine(fabric):
        optimizer.zero_grad()
        call(model, "loss", inputs, targets).backward()
        optimizer.step()
    return compared(fabric, model, bypassed)


@variant(Raises(RuntimeError, "You are calling the method `Network.loss()` from outside the model."), needs="lightning>=2.3")
def method_in_fabric(fabric):
    model = fabric.setup(Network())  # BUG: Fabric does not know that `loss` must go through the wrapper
    optimizer = sgd(model.parameters())
    for inputs, targets in mine(fabric):
        optimizer.zero_grad()
        fabric.backward(model.loss(inputs, targets))
        optimizer.step()
    return compared(fabric, model)


class Direct(Network):
    """Uses its parameters in the method, and calls no submodule."""

    def loss(self, inputs, targets):
        first, _, second = self.layers
        hidden = (inputs @ first.weight.T + first.bias).relu()
        return mse_loss(hidden @ second.weight.T + second.bias, targets)


@variant(needs="lightning>=2.3")
def unnoticed_by_fabric(fabric):
    model = fabric.setup(Direct())  # BUG: as in method_in_fabric; Fabric notices only a method that calls a submodule
    optimizer = sgd(model.parameters())
    for inputs, targets in mine(fabric):
        optimizer.zero_grad()
        fabric.backward(model.loss(inputs, targets))
        optimizer.step()
    return compared(fabric, model)


class ByHand(LightningModule):
    """Manual optimization."""

    def __init__(self):
        super().__init__()
        self.network, self.automatic_optimization = Network(), False

    def training_step(self, part, _):
        loss = self.network.loss(*part)
        self.optimizers().zero_grad()
        loss.backward()  # BUG: the Trainer leaves DDP unprepared until manual_backward is called
        self.optimizers().step()

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = ByHand()
    trainer(fabric, max_epochs=1).fit(module, iter(mine(fabric)))
    return compared(fabric, module)


if __name__ == "__main__":
    main()
