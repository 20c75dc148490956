"""Checks for a training job of your own. Copy this file, or import it: it needs torch and the standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated_part(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper in a model, whatever Fabric, a Trainer or a compiler has put around it, or None."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)


def watch_gradient_hooks(model: nn.Module) -> Callable[[], list[str]]:
    """Call this right after wrapping; the function that it returns names the parameters whose gradients DDP no longer averages.

    DDP puts one hook on the autograd node that accumulates a parameter's gradient. When the parameter changes its device or dtype, is
    replaced, or gets other storage through ``.data`` of another type, autograd makes a new node, and the hook stays on the old one.
    The check compares the nodes: exact, without communication. It does not see a forward that goes around the wrapper, hooks
    lost before this call, or a backward under ``no_sync``.
    """
    nodes = {name: _accumulate_node(p) for name, p in model.named_parameters() if p.requires_grad}

    def detached() -> list[str]:
        return [name for name, p in model.named_parameters() if p.requires_grad and _accumulate_node(p) is not nodes.get(name)]

    return detached


def _accumulate_node(parameter: nn.Parameter) -> Any:
    with torch.enable_grad():
        edge = parameter.expand_as(parameter).grad_fn
    assert edge is not None
    return edge.next_functions[0][0]
