"""Two towers trained with CLIP's loss on a batch that is split over the ranks, and the same in one process: the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, Optimizer

from ddp_pitfalls.measure import Measurement, Series
from ddp_pitfalls.toys import assert_replicated, weights

Gather = Callable[[Tensor], Tensor]  # features of this rank (batch, 4) to features of all ranks (ranks * batch, 4)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

PAIRS = 16
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
        """Features (batch, 4) of length 1 from inputs (batch, 8), and the scale."""
        return normalize(self.image(images), dim=-1), normalize(self.text(texts), dim=-1), self.logit_scale.exp()


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Every image must find its text among all texts, and every text its image. Features (batch, 4) to a scalar."""
    logits = scale * images @ texts.T
    targets = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


def alone(features: Tensor) -> Tensor:
    """The gather of a single process."""
    return features


class Clip(nn.Module):
    """The towers with their loss: ``forward`` gathers the features and returns the loss of the whole batch."""

    def __init__(self, gather: Gather = alone) -> None:
        super().__init__()
        self.towers, self.gather = Towers(), gather

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        images, texts, scale = self.towers(images, texts)
        return clip_loss(self.gather(images), self.gather(texts), scale)


def pairs(ranks: int) -> tuple[Tensor, Tensor]:
    """The whole batch: images and texts, (16, 8) each, or the nearest multiple of the ranks below; both sides show the same four numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PAIRS, 4, generator=generator)
    views = [hidden @ torch.randn(4, 8, generator=generator) + 0.1 * torch.randn(PAIRS, 8, generator=generator) for _ in range(2)]
    return views[0][: PAIRS // ranks * ranks], views[1][: PAIRS // ranks * ranks]


def shard(fabric: Fabric) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch, on its device."""
    images, texts = (side.chunk(fabric.world_size)[fabric.global_rank].to(fabric.device) for side in pairs(fabric.world_size))
    return images, texts
