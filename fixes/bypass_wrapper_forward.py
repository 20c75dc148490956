"""DDP averages gradients only after a forward of its own: a call that goes around the wrapper trains each rank alone."""

from unittest.mock import patch

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import replicas_differ, watch_forwards
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
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
    train(model, optimizer, mine(fabric))  # FIX: the wrapper prepares its reducer, and then calls the inner forward
    return compared(fabric, model, bypassed)


@variant
def with_fabric(fabric):
    module, optimizer = toy()
    model, optimizer = fabric.setup(module, optimizer)
    bypassed = watch_forwards(model)
    train(model, optimizer, mine(fabric), fabric.backward)  # FIX: the wrapper
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
    """Call a method of the module in a DDP wrapper, which the wrapper itself does not have. The method may call ``forward``."""
    module, real, entered = model.module, model.module.forward, False

    def forward(*args, **kwargs):
        nonlocal entered
        if entered:
            return real(*args, **kwargs)
        entered = True
        return getattr(module, method)(*args, **kwargs)

    with patch.object(module, "forward", forward):
        return model(*args, **kwargs)  # FIX: by way of the wrapper's forward


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


@variant(needs="lightning>=2.3")
def method_in_fabric(fabric):
    model = fabric.setup(Network())
    model.mark_forward_method("loss")  # FIX: calls of it go through the wrapper
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
    model = fabric.setup(Direct())
    model.mark_forward_method("loss")  # FIX: as in method_in_fabric
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
        self.manual_backward(loss)  # FIX: prepares DDP first
        self.optimizers().step()

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = ByHand()
    trainer(fabric, max_epochs=1).fit(module, iter(mine(fabric)))
    return compared(fabric, module)


@variant(protects="the Trainer runs training_step inside the wrapper's forward, so it may call any method")
def step_of_trainer(fabric):  # nothing to fix
    class Automatic(ByHand):
        def training_step(self, part, _):
            return self.network.loss(*part)

    module = Automatic()
    module.automatic_optimization = True
    trainer(fabric, max_epochs=1).fit(module, iter(mine(fabric)))
    return compared(fabric, module)


@variant(protects="Fabric sends the training_step of a LightningModule through the wrapper's forward")
def step_in_fabric(fabric):  # nothing to fix
    class InFabric(ByHand):
        def training_step(self, part, _):
            return self.network.loss(*part)

    module = InFabric()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for part in mine(fabric):
        optimizer.zero_grad()
        fabric.backward(model.training_step(part, 0))
        optimizer.step()
    return compared(fabric, module)


@variant(protects="manual_backward prepares DDP, also in a hook, which runs outside of the wrapper's forward")
def hook_of_trainer(fabric):  # nothing to fix
    class Hook(ByHand):
        def training_step(self, part, _):
            pass

        def on_train_batch_start(self, part, _):
            super().training_step(part, _)

    module = Hook()
    trainer(fabric, max_epochs=1).fit(module, iter(mine(fabric)))
    return compared(fabric, module)


if __name__ == "__main__":
    main()
