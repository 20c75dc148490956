"""Two towers trained with CLIP's loss on a batch that is split over the ranks, and the same in one process: the reference.

A *law* is a model trained in one process on the whole batch that says what a mistake does: what the ranks are expected to get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp_pitfalls.checks import parameters_without_gradient
from ddp_pitfalls.measure import Measurement, Series
from ddp_pitfalls.toys import MakeOptimizer, assert_replicated, weights

Pairs = tuple[Tensor, Tensor]
Backward = Callable[[Tensor], None]
Gather = Callable[[Tensor], Tensor]  # the features of one rank (batch, ...) to those of all ranks (ranks * batch, ...)

BATCH = 16
sgd: MakeOptimizer = partial(SGD, lr=0.02, momentum=0.9)


class Towers(nn.Module):
    """Two linear towers, 8 to 4, and a learned logit scale, with the same weights wherever it is made."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.image, self.text = nn.Linear(8, 4), nn.Linear(8, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of length one, (batch, 4) each, from inputs (batch, 8) each, and the scale."""
        return normalize(self.image(images), dim=-1), normalize(self.text(texts), dim=-1), self.logit_scale.exp()


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Every image must find its text among all, and every text its image: features (batch, 4) each to a scalar."""
    logits = scale * images @ texts.T
    targets = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


def only_mine(features: Tensor) -> Tensor:
    """What a single process gathers."""
    return features


def divided(by: int, features: Tensor) -> Tensor:
    """The same values with a fraction of their gradient: the law of a gather that gives each rank the gradient of its own part."""
    return features.detach() + (features - features.detach()) / by


class Clip(nn.Module):
    """The towers and their loss: ``forward`` takes inputs (batch, 8) each, gathers, and returns the loss of the whole batch, a scalar."""

    def __init__(self, gather: Gather = only_mine) -> None:
        super().__init__()
        self.towers, self.gather = Towers(), gather

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        images, texts, scale = self.towers(images, texts)
        return clip_loss(self.gather(images), self.gather(texts), scale)


class LocalClip(Clip):
    """Compares one rank's features with everybody's, and returns that rank's part of the loss; DDP averages the parts."""

    def __init__(self, gather: Gather = only_mine, rank: int = 0) -> None:
        super().__init__(gather)
        self.rank = rank

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        images, texts, scale = self.towers(images, texts)
        targets = torch.arange(len(images), device=images.device) + self.rank * len(images)
        to_text, to_image = scale * images @ self.gather(texts).T, scale * texts @ self.gather(images).T
        return (cross_entropy(to_text, targets) + cross_entropy(to_image, targets)) / 2


class FixedScale(Clip):
    """Without a learned scale: nothing but the gathered features leads to the loss."""

    def __init__(self, gather: Gather = only_mine) -> None:
        super().__init__(gather)
        self.towers.logit_scale.requires_grad_(False)


class Variance(FixedScale):
    """Another loss: how far one rank's features are from the mean of all features; DDP averages the ranks' parts."""

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        features = torch.cat(self.towers(images, texts)[:2], dim=1)
        return (features - self.gather(features).mean(dim=0)).square().mean()


class TimesRanks(Clip):
    """Multiplies the loss by the number of ranks, against the division that DDP will do."""

    def __init__(self, gather: Gather, ranks: int) -> None:
        super().__init__(gather)
        self.ranks = ranks

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        loss: Tensor = super().forward(images, texts)
        return self.ranks * loss


class TwoLosses(Clip):
    """Adds a second loss, on one rank's own samples: small outputs of the image tower."""

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        own: Tensor = self.towers.image(images).square().mean()
        return super().forward(images, texts) + own


def pairs(ranks: int) -> Pairs:
    """The whole batch: images and texts, (16, 8) each, or the next smaller multiple of the ranks; a pair shows the same four numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, 4, generator=generator)
    to_image, to_text = torch.randn(2, 4, 8, generator=generator)
    noise = 0.1 * torch.randn(2, BATCH, 8, generator=generator)
    kept = BATCH // ranks * ranks
    return (hidden @ to_image + noise[0])[:kept], (hidden @ to_text + noise[1])[:kept]


def shard(fabric: Fabric) -> Pairs:
    """The part of the batch that is this rank's, on its device."""
    images, texts = (side.chunk(fabric.world_size)[fabric.global_rank].to(fabric.device) for side in pairs(fabric.world_size))
    return images, texts


def train(
    model: nn.Module, optimizer: Optimizer, batch: Pairs, steps: int, clip: float = math.inf, backward: Backward = Tensor.backward
) -> list[float]:
    """Train on one batch, with the norm of the gradient clipped to ``clip``. Returns the loss before every step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        backward(loss)
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_alone(model: nn.Module, ranks: int, make: MakeOptimizer = sgd, steps: int = 2, clip: float = math.inf) -> Tensor:
    """The weights after training this model on the whole batch in this process alone. Shape (73,)."""
    train(model, make(model.parameters()), pairs(ranks), steps, clip)
    return weights(model)


def two_steps(fabric: Fabric, model: nn.Module, optimizer: Optimizer, law: nn.Module, *, curve: int = 0) -> Measurement:
    """Train two steps on this rank's shard, with the optimizer of ``sgd``, and compare the weights as ``compared`` does.

    With ``curve`` steps, training goes on so long, and the loss is the series of the measurement.
    """
    assert_replicated(model)
    losses = train(model, optimizer, shard(fabric), steps=2, backward=fabric.backward)
    measured = compared(fabric, model, law)
    if not curve:
        return measured
    losses += train(model, optimizer, shard(fabric), curve - 2, backward=fabric.backward)
    return Measurement(measured.quantity, measured.value, measured.healthy, measured.broken, Series("loss of the whole batch", losses))


def compared(fabric: Fabric, model: nn.Module, law: nn.Module) -> Measurement:
    """The weights of a model that was trained for two steps. Healthy is what one process gets from ``Clip``, broken from ``law``."""
    ranks = fabric.world_size
    return Measurement("weights after two steps", weights(model), trained_alone(Clip(), ranks), trained_alone(law, ranks))


def gradient_ratios(fabric: Fabric, model: nn.Module, law: nn.Module, whole: nn.Module | None = None) -> Measurement:
    """One backward, and each parameter's gradient as a multiple of the single-process gradient; None where there is no gradient.

    Healthy is what ``whole``, by default ``Clip``, gets in one process from the whole batch, broken what ``law`` gets.
    """
    assert_replicated(model)
    model(*shard(fabric)).backward()
    whole = whole or Clip()
    _backward_alone(fabric, whole, law)
    names = ", ".join(name.removeprefix("towers.") for name, p in whole.named_parameters() if p.requires_grad)
    quantity = f"gradient as a multiple of the single-process gradient: {names}"
    return Measurement(quantity, _ratios(model, whole), _ratios(whole, whole), _ratios(law, whole))


def _backward_alone(fabric: Fabric, *models: nn.Module) -> None:
    for model in models:
        model(*pairs(fabric.world_size)).backward()


def _ratios(model: nn.Module, whole: nn.Module) -> list[float | None]:
    """The projection of each gradient on the reference, in units of the reference."""
    ratios: list[float | None] = []
    for mine, reference in zip(model.parameters(), whole.parameters()):
        if reference.grad is not None:
            along = reference.grad / reference.grad.square().sum()
            ratios.append(None if mine.grad is None else float((mine.grad.cpu() * along).sum()))
    return ratios


def by_loss(fabric: Fabric, gather: Gather, law: Gather) -> Measurement:
    """One backward, and how wrong the gradient is, for a contrastive loss and for a variance; the law is a gather in one process."""
    value, broken = [], []
    for kind in (Clip, Variance):
        model, whole, spoilt = DistributedDataParallel(kind(gather).to(fabric.device)), kind(), kind(law)
        model(*shard(fabric)).backward()
        _backward_alone(fabric, whole, spoilt)
        value.append(_relative_error(model, whole))
        broken.append(_relative_error(spoilt, whole))
    return Measurement("relative error of the gradient: CLIP's loss, variance", value, [0.0, 0.0], broken)


def _relative_error(model: nn.Module, whole: nn.Module) -> float:
    reference = _gradient(whole)
    return _rounded((_gradient(model) - reference).norm() / reference.norm())


def _rounded(number: Tensor) -> float:
    """To five decimals: what is left of rounding errors is nobody's result."""
    return round(float(number), 5)


def _gradient(model: nn.Module) -> Tensor:
    """All gradients in one CPU vector, zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]).cpu()


RECIPES: dict[str, tuple[MakeOptimizer, float, type[Clip]]] = {
    "SGD": (sgd, math.inf, Clip),
    "SGD with gradients clipped to norm 1": (sgd, 1.0, Clip),
    "Adam": (partial(Adam, lr=0.01), math.inf, Clip),
    "AdamW": (partial(AdamW, lr=0.01, weight_decay=0.1), math.inf, Clip),
    "Adam with weight_decay": (partial(Adam, lr=0.01, weight_decay=0.1), math.inf, Clip),
    "Adam with a second loss": (partial(Adam, lr=0.01), math.inf, TwoLosses),
}


def by_recipe(fabric: Fabric, gather: Gather, law: Gather, steps: int = 10) -> Measurement:
    """How far training under each recipe ends from the same in one process; the law is a gather in one process."""
    value, broken = [], []
    for make, clip, kind in RECIPES.values():
        model = DistributedDataParallel(kind(gather).to(fabric.device))
        train(model, make(model.parameters()), shard(fabric), steps, clip)
        reference, spoilt = (trained_alone(one, fabric.world_size, make, steps, clip) for one in (kind(), kind(law)))
        value.append(_rounded((weights(model) - reference).norm()))
        broken.append(_rounded((spoilt - reference).norm()))
    quantity = f"distance from the single-process weights after {steps} steps: {', '.join(RECIPES)}"
    return Measurement(quantity, value, [0.0] * len(value), broken)


def untrained(fabric: Fabric, module: nn.Module, model: nn.Module, law: nn.Module, *, steps: int = 2) -> Measurement:
    """Train ``model``, the wrapper of ``module``, and name the parameters without a gradient as ``without_gradient`` does.

    With more than two steps, the loss is the series of the measurement.
    """
    assert_replicated(model)
    losses = train(model, sgd(module.parameters()), shard(fabric), steps, backward=fabric.backward)
    return without_gradient(fabric, module, law, losses)


def without_gradient(fabric: Fabric, module: nn.Module, law: nn.Module, losses: Sequence[float] = ()) -> Measurement:
    """The names of the parameters that got no gradient in the last step. Healthy is none, broken what ``law`` leaves without one."""
    _backward_alone(fabric, law)
    return Measurement(
        quantity="parameters without a gradient",
        value=parameters_without_gradient(module),
        healthy=[],
        broken=parameters_without_gradient(law),
        series=Series("loss of the whole batch", losses) if len(losses) > 2 else None,
    )
