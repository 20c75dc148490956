"""Checks for a training job of your own. Copy this file, or import it: it needs torch and the standard library only."""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated_part(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper in a model, whatever Fabric, a Trainer or a compiler has put around it, or None."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)


# --8<-- [start:watch_gradient_hooks]
def watch_gradient_hooks(model: nn.Module) -> Callable[[], list[str]]:
    """Call this right after wrapping; the function that it returns names the parameters whose gradients DDP no longer averages.

    DDP puts one hook on the autograd node that accumulates a parameter's gradient. When the parameter changes its device or dtype, gets
    other memory through ``set_``, or is replaced, autograd makes a new node, and the hook stays on the old one. The check compares the
    nodes: exact, without communication, each rank for itself. It names parameters unfrozen since then too: DDP never hooked them.
    It does not see a forward that goes around the wrapper, hooks lost before this call, or a backward under ``no_sync``.
    """

    def nodes() -> dict[str, Any]:
        return {name: node(p) for name, p in model.named_parameters() if p.requires_grad}

    def node(parameter: nn.Parameter) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            view: Any = parameter.expand_as(parameter).grad_fn
        return view.next_functions[0][0]

    def detached() -> list[str]:
        return [name for name, now in nodes().items() if now is not hooked.get(name)]

    hooked = nodes()
    return detached


# --8<-- [end:watch_gradient_hooks]


# --8<-- [start:parameters_without_gradient]
def parameters_without_gradient(model: nn.Module) -> list[str]:
    """Call this after ``backward``, before the gradients are zeroed: the names of parameters that should train and got no gradient.

    Without communication, on every rank for itself. A gradient of zeros counts as a gradient. Where a part of the model is meant to
    be idle in this step, its names are no mistake; parameters with ``requires_grad=False`` are not named.
    """
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


# --8<-- [end:parameters_without_gradient]


# --8<-- [start:replicas_differ]
def replicas_differ(model: nn.Module, tolerance: float = 0.0, group: Any = None) -> list[str]:
    """Call this on every rank, after ``backward`` and before ``optimizer.step``: which parameters and gradients differ from rank 0's.

    Every rank gets the same list, empty where all replicas agree. It names the parameter, the largest difference of an element
    that exceeds ``tolerance``, and the ranks; or the ranks whose model is another one. After DDP's all-reduce all ranks hold the same
    gradient, so any difference is a finding, except under ``no_sync``, where gradients are meant to differ. It sends the whole
    model once: run it now and then. Not for sharded parameters (FSDP). All ranks may agree and be wrong together.
    """
    mine = {name: (tuple(p.shape), p.dtype, p.requires_grad, p.grad is not None) for name, p in model.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    found: list[str] = []
    if other := [rank for rank, theirs in enumerate(everyone) if _shapes(theirs) != _shapes(everyone[0])]:
        return [f"{_ranks(other)}: other names, shapes, dtypes or requires_grad of the parameters than on rank 0"]
    for name, parameter in model.named_parameters():
        found += _difference(name, parameter, tolerance, group)
        having = [rank for rank, theirs in enumerate(everyone) if theirs[name][-1]]
        if 0 < len(having) < len(everyone):
            found.append(f"{name}: a gradient on {_ranks(having)} only")
        elif having and parameter.grad is not None:
            found += _difference(f"gradient of {name}", parameter.grad, tolerance, group)
    return found


def _shapes(model: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [(name, *known[:-1]) for name, known in model.items()]


def _difference(name: str, tensor: torch.Tensor, tolerance: float, group: Any) -> list[str]:
    """What to say where a tensor is not within ``tolerance`` of rank 0's. Shape and dtype must be the same on all ranks."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if not dense.numel():
        return []
    mine = dense.reshape(-1)
    first = mine.clone()
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(first.view(torch.uint8), source, group=group)  # as bytes: not every backend knows every dtype
    same = (mine == first) | (mine.isnan() & first.isnan())
    away = torch.where(same, 0.0, (mine.double() - first.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)).max()
    everyone = [torch.empty_like(away) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, away, group=group)
    found = {rank: float(one) for rank, one in enumerate(everyone) if float(one) > tolerance}
    return [f"{name}: up to {max(found.values()):.3g} away from rank 0 on {_ranks(found)}"] if found else []


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# --8<-- [end:replicas_differ]


# --8<-- [start:devices_in_checkpoint]
def devices_in_checkpoint(path: str | PathLike[str], **options: Any) -> Counter[str]:
    """The devices from which the tensors of a checkpoint were saved, each with its number of storages: ``Counter({"cuda:0": 4})``.

    There ``torch.load`` puts them where it has no ``map_location``. This puts nothing there: it reads them into CPU memory and lets
    go of them. ``options`` are for ``torch.load``: ``mmap=True`` (from torch 2.1) leaves the tensors' data on the disk, and
    ``weights_only=False`` is for a file that you trust and that holds more than weights.
    """
    found: Counter[str] = Counter()

    def note(storage: Any, location: str) -> Any:
        found[location] += 1
        return storage

    torch.load(path, map_location=note, **options)
    return found


# --8<-- [end:devices_in_checkpoint]


# --8<-- [start:warn_of_loads_elsewhere]
def warn_of_loads_elsewhere(own: torch.device | str) -> None:
    """Call this once on each rank with its device: from then on every ``torch.load`` that puts a tensor on another GPU warns.

    ``own`` has an index: ``fabric.device``, ``torch.device("cuda", local_rank)``. Loads by libraries count too. The check knows where a
    tensor goes after ``map_location`` was applied, but not what a ``map_location`` function moved by itself. It says nothing while no
    process group is up. Nothing takes the check back.
    """
    fine = {"cpu", "meta", str(own), torch.device(own).type}

    def warn(_: Any, location: str) -> None:
        if location not in fine and dist.is_available() and dist.is_initialized():
            warnings.warn(f"torch.load puts a tensor on {location}, and this rank has {own}: pass map_location", stacklevel=2)

    torch.serialization.register_package(-1000 - next(_calls), lambda _: None, warn)  # asked before CUDA's own, which then does the work


_calls = count()  # two packages of the same priority cannot be registered


# --8<-- [end:warn_of_loads_elsewhere]


# --8<-- [start:repeated_samples]
def repeated_samples(samples: Iterable[Hashable], group: Any = None) -> dict[Hashable, int]:
    """Call this on every rank with the samples that it was given in an epoch, or in part of one: which came more than once, and how often.

    A sample is given as its number, its path, or by ``fingerprints``. What all ranks were given counts together, and every rank gets
    the same answer: empty where no sample came twice. A sampler that pads its shards repeats fewer samples than there are ranks. It
    sends the whole list to every rank: use it in the first epoch only.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(samples), group=group)
    times = Counter(sample for rank in everyone for sample in rank)
    return {sample: n for sample, n in times.items() if n > 1}


# --8<-- [end:repeated_samples]


# --8<-- [start:fingerprints]
def fingerprints(batch: torch.Tensor) -> list[str]:
    """A name for each sample of a batch, (batch, ...), made of its bytes: for data that carry no number. Equal samples have equal names.

    Random augmentation gives a sample other bytes every time: look without it.
    """
    rows = (row.detach().cpu().contiguous().flatten().view(torch.uint8) for row in batch)
    return [hashlib.sha1(bytes(row.tolist()), usedforsecurity=False).hexdigest() for row in rows]


# --8<-- [end:fingerprints]


# --8<-- [start:watch_epochs]
def watch_epochs() -> Callable[[Iterable[Hashable]], int | None]:
    """Call this once; call the function that it returns with the samples of every epoch's first batch, by number or by ``fingerprints``.

    It returns the earlier epoch, counted from 0, that began with the same samples in the same order, or None. Without communication,
    on every rank for itself.
    """
    seen: list[tuple[Hashable, ...]] = []

    def same_as(samples: Iterable[Hashable]) -> int | None:
        seen.append(tuple(samples))
        first = seen.index(seen[-1])
        return first if first < len(seen) - 1 else None

    return same_as


# --8<-- [end:watch_epochs]


# --8<-- [start:ranks_that_differ]
def ranks_that_differ(value: Any, group: Any = None) -> list[int]:
    """Call this on every rank with what all ranks must have alike: the indices of a split, a list of files, a configuration.

    Returns the ranks that have something else than rank 0, the same list on every rank. It compares the ``repr`` of the value by its
    hash: give lists, numbers, strings and dicts. A tensor is compared by all its numbers; sort a set first.
    """
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, hashlib.sha256(text.encode()).digest(), group=group)
    return [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]


# --8<-- [end:ranks_that_differ]


# --8<-- [start:watch_forwards]
def watch_forwards(model: nn.Module) -> Callable[[], bool]:
    """Call this right after wrapping; the function that it returns says whether a forward has gone around DDP since it was last called.

    It notices a call of the inner module, or of one of its submodules, while DDP's own forward is not running and gradients are
    recorded. Without communication, on every rank for itself. It does not see a method that uses parameters and calls no submodule.
    A forward without a backward is no mistake: take the evaluation through ``torch.no_grad()``.
    """
    wrapper = next(m for m in model.modules() if isinstance(m, DistributedDataParallel))
    inside = around = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    def note(*_: Any) -> None:
        nonlocal around
        recomputed = torch._C._current_graph_task_id() != -1  # by activation checkpointing, in the backward
        around |= torch.is_grad_enabled() and not inside and not recomputed

    def bypassed() -> bool:
        nonlocal around
        found, around = around, False
        return found

    wrapper.register_forward_pre_hook(enter)
    wrapper.register_forward_hook(leave)
    for module in wrapper.module.modules():
        module.register_forward_pre_hook(note)
    return bypassed


# --8<-- [end:watch_forwards]


# --8<-- [start:on_one_rank]
@contextmanager
def on_one_rank(model: nn.Module) -> Iterator[None]:
    """Put this around what one rank does alone, an evaluation under a rank-zero guard, say: what would wait for the others raises.

    It raises RuntimeError in a forward through the DDP wrapper of a model with buffers, which DDP broadcasts. Without communication.
    It does not see other collectives in the body: barriers, reductions, a metric that synchronises, a save.
    """
    wrapper = replicated_part(model)
    shared = [] if wrapper is None else [name for name, _ in wrapper.module.named_buffers() if name not in wrapper.parameters_to_ignore]

    def refuse(*_: Any) -> None:
        raise RuntimeError(f"one rank called the DDP wrapper, which waits for all ranks to broadcast {', '.join(shared)}: call its module")

    hook = wrapper.register_forward_pre_hook(refuse) if wrapper is not None and wrapper.broadcast_buffers and shared else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


# --8<-- [end:on_one_rank]


# --8<-- [start:loss_means]
def loss_means(total: torch.Tensor, tokens: int, group: Any = None) -> tuple[float, float]:
    """Call this on every rank with the sum of its tokens' losses, a scalar, and their number: the mean of the ranks' means, and the
    mean over all tokens.

    Every rank gets the same two numbers. They are equal where all ranks have equally many tokens. Where they differ, a loss that
    each rank averages by itself is not the loss of the whole batch. A rank without tokens has no mean, and counts as zero in the first.
    """
    sums = torch.stack([total.detach() / max(tokens, 1), total.detach(), torch.as_tensor(tokens, device=total.device)]).double()
    dist.all_reduce(sums, group=group)
    means, losses, count = sums.tolist()
    return means / dist.get_world_size(group), losses / count


# --8<-- [end:loss_means]


# --8<-- [start:on_all_ranks]
def on_all_ranks(metric: Callable[..., Any], *parts: torch.Tensor, group: Any = None) -> Any:
    """Call this on every rank with a metric and its arguments, (samples, ...) each: the metric of the samples of all ranks.

    Every rank gets the same value. The ranks may have different numbers of samples, none included; the metric gets CPU tensors, in the
    order of the ranks. It sends all samples to every rank: for predictions, not for images.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [part.detach().cpu() for part in parts], group=group)
    return metric(*(torch.cat(part) for part in zip(*everyone)))


# --8<-- [end:on_all_ranks]


# --8<-- [start:generators_alike]
def generators_alike(group: Any = None) -> list[str]:
    """Call this on every rank, in a training step: which random number generators are in the same state on two ranks or more.

    The names are ``torch``, ``cuda`` (of the current device), ``random`` and ``numpy``. Every rank gets the same list, empty where all
    ranks draw numbers of their own. It looks at this process, not at the workers of a DataLoader.
    """
    states = {"torch": bytes(torch.get_rng_state().tolist()), "random": repr(random.getstate()).encode()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    if "numpy" in sys.modules:
        parts = sys.modules["numpy"].random.get_state()
        states["numpy"] = repr([part.tolist() if hasattr(part, "tolist") else part for part in parts]).encode()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: hashlib.sha256(state).digest() for name, state in states.items()}, group=group)
    return [name for name in states if len({theirs.get(name) for theirs in everyone}) < len(everyone)]


# --8<-- [end:generators_alike]
