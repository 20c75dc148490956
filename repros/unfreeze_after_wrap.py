"""DDP hooks the parameters that require gradients when it wraps: what is unfrozen later, each rank trains alone."""

from itertools import repeat

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_pitfalls.checks import watch_gradient_hooks
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.toys import batch, everybody, toy, train, weights
from ddp_pitfalls.trainers import trainer


def in_one_process(batches):
    """A model for each batch: its backbone is frozen in the first of three steps, and the models share the gradient of the head only."""
    models = [toy() for _ in batches]
    for step in range(3):
        for (model, optimizer), part in zip(models, batches):
            model[0].requires_grad_(step > 0)
            optimizer.zero_grad()
            mse_loss(model(part[0]), part[1]).backward()
        for copies in zip(*(model[2].parameters() for model, _ in models)):
            mean = sum(p.grad for p in copies) / len(copies)
            for p in copies:
                p.grad = mean.clone()
        for _, optimizer in models:
            optimizer.step()
    return [weights(model) for model, _ in models]


def mine(fabric):
    return [fabric.to_device(part) for part in batch(fabric.global_rank, step=0)]


def compared(fabric, module):
    rank, ranks = fabric.global_rank, fabric.world_size
    (together,) = in_one_process([everybody(ranks, step=0)])
    apart = in_one_process([batch(r, step=0) for r in range(ranks)])
    return Measurement("weights after one step frozen and two unfrozen", weights(module), together, broken=apart[rank])


@variant
def with_ddp(fabric):
    module, optimizer = toy()
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module.to(fabric.device))
    train(model, optimizer, [mine(fabric)])
    module[0].requires_grad_(True)  # BUG: DDP looked at requires_grad once, when it wrapped
    train(model, optimizer, [mine(fabric)] * 2)
    return compared(fabric, model)


@variant
def with_fabric(fabric):
    module, optimizer = toy()
    module[0].requires_grad_(False)
    model, optimizer = fabric.setup(module, optimizer)
    train(model, optimizer, [mine(fabric)], fabric.backward)
    module[0].requires_grad_(True)  # BUG: as above
    train(model, optimizer, [mine(fabric)] * 2, fabric.backward)
    return compared(fabric, model)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.activation, self.head = toy()[0]

    def training_step(self, part, _):
        inputs, targets = part
        return mse_loss(self.head(self.activation(self.backbone(inputs))), targets)

    def configure_optimizers(self):
        return SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


# --8<-- [start:BackboneFinetuningDDP]
class BackboneFinetuningDDP(BackboneFinetuning):
    """Unfreezes ``backbone`` at the start of an epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)  # BUG: unfreezes what the Trainer wrapped frozen; nothing hooks it


# --8<-- [end:BackboneFinetuningDDP]


@variant
def with_trainer(fabric):
    module = Module()
    callback = BackboneFinetuningDDP(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, should_align=False, lambda_func=lambda _: 1)
    trainer(fabric, max_epochs=3, limit_train_batches=1, callbacks=[callback]).fit(module, repeat(mine(fabric)))
    return compared(fabric, module)


@variant
def unhooked(fabric):
    module = toy()[0]
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module.to(fabric.device))
    detached = watch_gradient_hooks(model)
    module[0].requires_grad_(True)  # BUG: as above
    names = ["module.0.weight", "module.0.bias"]
    return Measurement("parameters whose gradients DDP does not average", detached(), healthy=[], broken=names)


if __name__ == "__main__":
    main()
