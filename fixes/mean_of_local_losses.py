"""Each rank averages over its own tokens, and DDP averages the averages: a token counts more where there are few."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.nn.parallel import DistributedDataParallel

from ddp_pitfalls.checks import loss_means
from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Measurement
from ddp_pitfalls.toys import batch, sgd, toy, weights
from ddp_pitfalls.trainers import trainer


def tokens(rank, micro_batch):
    """Inputs and targets of 2 to 20 tokens: more on later ranks, and more in the second micro-batch."""
    return tuple(part[: min(20, 2 + 4 * rank + 9 * micro_batch)] for part in batch(rank, step=micro_batch))


def mine(fabric, micro_batches):
    return [tuple(map(fabric.to_device, tokens(fabric.global_rank, number))) for number in range(micro_batches)]


def losses_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean(dim=1)


def in_one_process(parts, means):
    """Trained on the mean of the means over some groups of tokens."""
    model, optimizer = toy()
    for _ in range(2):
        optimizer.zero_grad()
        groups = [torch.cat([losses_of(model, *part) for part in group]) for group in means(parts)]
        (sum(losses.mean() for losses in groups) / len(groups)).backward()
        optimizer.step()
    return weights(model)


def all_tokens(parts):
    return [[part for rank in parts for part in rank]]


def micro_batches(parts):
    return [[part] for rank in parts for part in rank]


def ranks(parts):
    return parts


def compared(fabric, module, count, broken=micro_batches):
    parts = [[tokens(rank, number) for number in range(count)] for rank in range(fabric.world_size)]
    healthy, broken = (in_one_process(parts, means) for means in (all_tokens, broken))
    return Measurement("weights after two steps", weights(module), healthy, broken)


# --8<-- [start:step_loss]
def step_loss(losses, counts):
    """The part of a micro-batch in the loss of a step, from its tokens' losses, (tokens,).

    ``counts`` are the numbers of tokens in all micro-batches of the step on this rank. Every rank must call it equally often.
    """
    everyone = torch.tensor(float(sum(counts)), device=losses.device)
    dist.all_reduce(everyone)
    return losses.sum() * dist.get_world_size() / everyone  # FIX: one denominator for all tokens; DDP will divide by the ranks


# --8<-- [end:step_loss]


@variant
def with_ddp(fabric):
    module, optimizer = toy()
    model = DistributedDataParallel(module.to(fabric.device))
    for part in mine(fabric, 1) * 2:
        optimizer.zero_grad()
        losses = losses_of(model, *part)
        step_loss(losses, [len(losses)]).backward()
        optimizer.step()
    return compared(fabric, model, 1)


@variant
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    parts = mine(fabric, 2)
    counts = [len(targets) for _, targets in parts]
    for _ in range(2):
        optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(model, enabled=number < len(parts)):
                fabric.backward(step_loss(losses_of(model, *part), counts))
        optimizer.step()
    return compared(fabric, model, 2)


@variant
def ranks_forgotten(fabric):
    model, optimizer = fabric.setup(*toy())
    parts = mine(fabric, 2)
    counts = [len(targets) for _, targets in parts]
    for _ in range(2):
        optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            with fabric.no_backward_sync(model, enabled=number < len(parts)):
                losses = losses_of(model, *part)
                fabric.backward(step_loss(losses, counts))  # FIX: the tokens of all ranks
        optimizer.step()
    return compared(fabric, model, 2, broken=ranks)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, self.tokens = toy()[0], 0

    def training_step(self, part, _):
        losses = losses_of(self.layers, *part)
        self.tokens += len(losses)
        return losses.sum()  # FIX: divided in on_before_optimizer_step, when all tokens are known

    def on_before_optimizer_step(self, _):
        everyone, self.tokens = torch.tensor(float(self.tokens), device=self.device), 0
        dist.all_reduce(everyone)
        for p in self.parameters():
            p.grad *= self.trainer.world_size * self.trainer.accumulate_grad_batches / everyone  # FIX: and both divisions undone

    def configure_optimizers(self):
        return sgd(self.parameters())


@variant
def with_trainer(fabric):
    module = Module()
    trainer(fabric, max_steps=2, accumulate_grad_batches=2).fit(module, iter(mine(fabric, 2) * 2))
    return compared(fabric, module, 2)


@variant
def logged(fabric):
    model = toy()[0].to(fabric.device)
    losses = losses_of(model, *mine(fabric, 1)[0]).detach()
    _, value = loss_means(losses.sum(), len(losses))  # FIX: sums of losses and of tokens first, the ratio last
    alone = [losses_of(toy()[0], *tokens(rank, 0)).detach() for rank in range(fabric.world_size)]
    healthy, broken = torch.cat(alone).mean(), torch.stack([one.mean() for one in alone]).mean()
    return Measurement("loss of the step", value, healthy, broken)


if __name__ == "__main__":
    main()
