"""Checks for a training job of your own. Copy this file, or import it: it needs torch and the standard library only.

``Watch`` is to be left on; ``watch_fabric`` and ``watch_trainer`` put it into Fabric and the Trainer. The other functions look once.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


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
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return dict(zip(trained, _accumulators(list(trained.values()))))

    def detached() -> list[str]:
        return [name for name, now in nodes().items() if now is not hooked.get(name)]

    hooked = nodes()
    return detached


class _Node(torch.autograd.Function):
    """Takes all parameters at once: its one node leads to the nodes that accumulate their gradients. Quicker than a view of each."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def _accumulators(parameters: Sequence[torch.Tensor | None]) -> list[Any]:
    """The autograd node that accumulates each parameter's gradient; None for one that is frozen or gone."""
    nothing = torch.empty(0)
    with torch.inference_mode(False), torch.enable_grad():
        output: Any = _Node.apply(*(nothing if parameter is None else parameter for parameter in parameters))
    return [node for node, _ in output.grad_fn.next_functions] if output.grad_fn is not None else [None] * len(parameters)


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
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    if not dense.numel():
        return []
    mine = dense.reshape(-1)
    first = mine.clone()
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(first.view(torch.uint8), source, group=group)  # as bytes: not every backend knows every dtype
    same = (mine == first) | (mine.isnan() & first.isnan())
    away = torch.where(same, 0.0, (mine.double() - first.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)).max()
    found = {rank: one for rank, [one] in enumerate(_gathered(away.reshape(1), group)) if one > tolerance}
    return [f"{name}: up to {max(found.values()):.3g} away from rank 0 on {_ranks(found)}"] if found else []


def _gathered(row: torch.Tensor, group: Any) -> list[list[Any]]:
    """The numbers of all ranks, (ranks, numbers), from a vector that is equally long on each."""
    mine = row.cuda() if dist.get_backend(group) == "nccl" else row.cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    numbers: list[list[Any]] = torch.stack(everyone).tolist()
    return numbers


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
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
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
    mine = {name: hashlib.sha256(state).digest() for name, state in _generators().items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return [name for name in mine if len({theirs.get(name) for theirs in everyone}) < len(everyone)]


def _generators() -> dict[str, bytes]:
    """The state of each random number generator of this process."""
    states = {"torch": bytes(torch.get_rng_state().tolist()), "random": repr(random.getstate()).encode()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    if "numpy" in sys.modules:
        parts = sys.modules["numpy"].random.get_state()
        states["numpy"] = repr([part.tolist() if hasattr(part, "tolist") else part for part in parts]).encode()
    return states


# --8<-- [end:generators_alike]


Texts = dict[tuple[str, str], str]  # what was found, by kind and what tells it from others of that kind


class Fault(RuntimeError):
    """What a ``Watch`` found; raised on all ranks."""


FINDINGS = {  # the kinds of what a Watch may find, and the pitfalls to which they point
    "hooks": ("ddp-cpu-move", "unfreeze-after-wrap"),
    "around": ("bypass-wrapper-forward",),
    "gradients": (
        "bypass-wrapper-forward",
        "ddp-cpu-move",
        "unfreeze-after-wrap",
        "reentrant-checkpoint-ready-twice",
        "unused-parameter-late-error",
    ),
    "parameters": ("ddp-cpu-move", "unfreeze-after-wrap", "bypass-wrapper-forward"),
    "buffers": ("bypass-wrapper-forward",),
    "idle": ("find-unused-hides-dead-branch", "unused-parameter-late-error", "all-gather-no-grad"),
    "samples": ("no-distributed-sampler", "iterable-dataset-duplicated"),
    "random": ("identical-seed-per-rank",),
    "steps": ("uneven-inputs", "rank-local-early-stop"),
    "model": ("unfreeze-after-wrap",),
}
PAGE = "docs/pitfalls/{}.md"
NAMED = 3  # tensors that a message names
PARAMETERS_EVERY = 10  # comparisons of gradients for one of parameters and buffers too
SPREAD = 4096  # at least so many numbers of a tensor, evenly spread, or all, stand for it when batches are compared
NOISE = ("torch", "cuda")  # generators that make a model's noise; what the others draw in a forward is often equal on purpose
WITHOUT_STEP = 1000  # forwards after which a watch that has seen no step says so
ABSENT = 1 << 62  # stands for the checksum of a gradient that is not there

_log = logging.getLogger("ddp_pitfalls.checks")
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """Make one on every rank right after wrapping, and train as ever: it looks at each step of an optimizer that updates the model.

    At each step, without communication: hooks that DDP has lost, a step without a forward through DDP. After the first step and every
    ``every`` steps the ranks compare their gradients, exactly, and at one comparison in ten their parameters and buffers; the
    batches that they were given; the random numbers that they drew; parameters without a gradient since the start; and what single
    ranks found in the steps between. All ranks learn the same at the same time, so none waits for one that has raised: with
    ``tell="raise"`` all raise ``Fault``, with "warn" and "log" rank 0 says it, and a function gets the text on every rank. Nothing is
    told twice.

    ``ignore`` names parameters and buffers that may be different or idle (patterns as in ``fnmatch``); ``skip`` names kinds of
    ``FINDINGS`` that are meant. Raises ValueError for a model without a DDP wrapper or with several, and for options that do not exist.

    It does not see faults that make all ranks wrong alike (a loss that is averaged wrongly, data that no rank gets), one rank's
    different gradients in the steps between comparisons, or different numbers with the same sum of bits.
    """

    active = False  # in a copy, which has none of this: a model may be copied or saved with its hooks
    wrapper: DistributedDataParallel

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        tell: str | Callable[[str], None] = "raise",
        ignore: Collection[str] = (),
        skip: Collection[str] = (),
    ) -> None:
        wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if not wrappers:
            raise ValueError("the model has no DistributedDataParallel wrapper: watch what the wrapping returned")
        if len(wrappers) > 1:
            raise ValueError(f"the model has {len(wrappers)} DistributedDataParallel wrappers: watch each by itself")
        if every < 1:
            raise ValueError(f"every={every}: needs a number of optimizer steps, 1 or more")
        if not callable(tell) and tell not in ("raise", "warn", "log"):
            raise ValueError(f"tell={tell!r}: needs 'raise', 'warn', 'log' or a function that takes the text")
        if unknown := set(skip) - set(FINDINGS):
            raise ValueError(f"skip={sorted(unknown)}: needs some of {', '.join(FINDINGS)}")
        self.active, self.wrapper, self.group = True, wrappers[0], wrappers[0].process_group
        self.every, self.tell, self.ignore, self.skip = every, tell, tuple(ignore), frozenset(skip)
        self.steps = self.comparisons = self.forwards = 0  # forwards since the last step after which DDP averages
        self.averages = True  # whether DDP averages in the backward of the last forward
        self.found: Texts = {}  # by this rank since the ranks last compared
        self.seen: set[tuple[str, str]] = set()  # kinds and names that this rank found
        # the same on all ranks:
        self.differed: set[tuple[str, str]] = set()  # kinds and names of tensors that differed
        self.told: set[tuple[str, str]] = set()  # keys of what was told
        self.generators: dict[str, bytes] = {}  # before the last forward of a step after which the ranks compare
        self.batch_hash, self.ranks_alike = 0, ""
        self.buffer_sums: dict[str, torch.Tensor] = {}
        self.optimizer: Callable[[], Optimizer | None] = lambda: None  # a weak reference to the one whose step counted last
        self.places = list(self._places())
        self.ids = {id(parameter) for *_, parameter in self.places}
        for other in [other for other in _watches if other.ids & self.ids]:
            other.stop()  # the model was wrapped again
        _watches.add(self)
        self.nodes = _accumulators([parameter for *_, parameter in self.places])
        self.idle = {name: parameter for name, _, _, parameter in self.places if parameter.requires_grad}
        self.stepping = False  # within a step: an optimizer may call its parent's, which is no other step
        self.buffer_hook: Any = None  # a hook, from DDP's forward to that of its module
        self.handles = [
            self.wrapper.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            register_optimizer_step_pre_hook(_weak(self._before_step)),
            register_optimizer_step_post_hook(_weak(self._after_step)),
        ]
        for handle in self.handles[1:]:
            weakref.finalize(self, handle.remove).atexit = False

    def __reduce__(self) -> Any:
        return object.__new__, (Watch,)

    def stop(self) -> None:
        """Look no more. A model that is wrapped and watched again needs no call."""
        for handle in (*self.handles, *([self.buffer_hook] if self.buffer_hook else [])):
            handle.remove()
        _watches.discard(self)

    def check(self) -> str:
        """Compare the ranks now, parameters included. Call this on every rank, after a backward that DDP averaged. Returns what is new.

        Between two comparisons of its own a watch keeps no batches, random numbers and buffers, and these are not compared here.
        """
        return self._compare(whole=True)

    def _compare(self, whole: bool) -> str:
        """What the ranks find together; ``whole`` is the same on all of them, and means that parameters are compared too."""
        parameters = dict(self._named(self.wrapper.module.named_parameters()))
        self._look_at(parameters)
        layout = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters.items()]
        drawn = {name: _hashed(state) for name, state in _generators().items() if state != self.generators.get(name, state)}
        buffers = _hashed(list(self.buffer_sums))
        mine = [self.steps, _hashed(layout), len(self.found), self.batch_hash, buffers, *(drawn.get(name, 0) for name in NOISE)]
        try:
            steps, layouts, local, batches, named, *draws = zip(*_gathered(torch.tensor(mine), self.group))
        except RuntimeError as error:
            raise Fault(f"step {self.steps}: the ranks did not meet: one has made another number of steps, or has ended") from error
        new = self._found_anywhere() if any(local) else {}
        if _unlike_rank_0(steps):
            new["steps", ""] = f"the ranks have made different numbers of steps: {', '.join(map(str, steps))}"
        new |= self._given_alike(draws, batches)
        if others := _unlike_rank_0(layouts):
            new["model", ""] = f"{_ranks(others)}: other names, shapes, dtypes or requires_grad of the parameters than on rank 0"
        else:
            buffer_sums = {} if _unlike_rank_0(named) else self.buffer_sums  # some models make buffers on demand
            new |= self._compared(parameters, parameters if whole else {}, buffer_sums)
        self.comparisons += 1
        return self._told({key: text for key, text in new.items() if key not in self.told and key[0] not in self.skip}, steps[0])

    def _given_alike(self, draws: Sequence[Sequence[int]], batches: Sequence[int]) -> Texts:
        """What ranks should not have alike: random numbers, by generator and rank, and batches by rank, both as hashes."""
        found = {}
        for name, states in zip(NOISE, draws):
            if alike := _alike(states):
                found["random", name] = f"{alike} drew the same random numbers from {name} between forward and step"
        alike = _alike(batches)
        if alike and alike == self.ranks_alike:
            found["samples", ""] = f"{alike} got the same batch, and did so at the comparison before"
        self.ranks_alike = alike
        return found

    # In a step

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.active or not torch.is_grad_enabled():
            return
        self.averages = self.wrapper.require_backward_grad_sync
        self.forwards += self.averages
        self.stepping = False
        if self.forwards == WITHOUT_STEP:
            _log.warning(
                "%d forwards, and no step of an optimizer that updates the model, or steps under Join only: this watch sees nothing",
                WITHOUT_STEP,
            )
        if self._compares_after(self.steps + 1):
            self.generators = _generators()  # before the last forward: what comes between two, a loader's start for example, is no noise
            if batch := _fingerprint([*args, *kwargs.values()]):
                self.batch_hash = _hashed((self.batch_hash, batch))
            if (
                self._parameters_turn()
                and not self.buffer_sums
                and not self.buffer_hook
                and not isinstance(self.wrapper.module, torch.jit.ScriptModule)
            ):
                self.buffer_hook = self.wrapper.module.register_forward_pre_hook(self._after_broadcast)

    _before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled forward does not trace into it

    def _after_broadcast(self, *_: Any) -> None:
        """Between DDP's broadcast of the buffers and the forward that may change them: the moment in which they are equal."""
        if not self.active or self.buffer_hook is None:
            return
        self.buffer_hook.remove()
        self.buffer_hook = None
        if self.wrapper.will_sync_module_buffers() or not self.wrapper.broadcast_buffers:
            self.buffer_sums = {f"buffer {name}": _checksum(buffer) for name, buffer in self._named(self.wrapper.module.named_buffers())}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.stepping or not self._counts(optimizer):
            return None
        self.stepping, self.optimizer = True, weakref.ref(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(optimizer)
            return None

        def then_look(*inputs: Any, **options: Any) -> Any:  # forward and backward are in the closure
            loss = closure(*inputs, **options)
            self._look(optimizer)
            return loss

        return (args, {**kwargs, "closure": then_look}) if "closure" in kwargs else ((args[0], then_look, *args[2:]), kwargs)

    def _after_step(self, *_: Any) -> None:
        self.stepping = False

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether it updates the model, and is not a second optimizer after the same backward."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in self.ids for parameter in held):
            ours = True
        else:  # parameters may have been replaced since the model was wrapped
            now = {id(parameter) for parameter in self.wrapper.parameters()}
            ours = any(id(parameter) in now for parameter in held)
        return ours and (self.forwards > 0 or self.optimizer() in (None, optimizer))

    def _look(self, optimizer: Optimizer | None = None) -> None:
        now = [holder[key] if key in holder else None for _, holder, key, _ in self.places]  # noqa: SIM401 (TorchScript's has no get)
        held = [parameter for group in (optimizer.param_groups if optimizer else ()) for parameter in group["params"]]
        if self.wrapper._join_config.enable or all(parameter is None or parameter.grad is None for parameter in (*now, *held)):
            return  # under Join, where a rank may be done and nobody answers it; or a step without a backward
        self.steps += 1
        nodes = zip(self.places, self.nodes, _accumulators(now))
        lost = [place[0] for place, was, node in nodes if node is not None and node is not was]
        self._find("hooks", lost, "DDP does not average the gradient of {}: moved, cast, replaced or unfrozen since it was wrapped")
        within = DistributedDataParallel._active_ddp_module is self.wrapper  # Lightning's manual optimization steps inside a forward
        around = self.steps > 1 and not self.forwards and not within  # before the first step, a forward may be older than this watch
        self._find(
            "around",
            ["DDP"] if around else [],
            "no forward since the last step went through {}: the model was called in another way, or always under no_sync",
        )
        if self.idle:
            self.idle = {name: parameter for name, parameter in self.idle.items() if parameter.grad is None}
        try:
            if self._compares_after(self.steps):
                self._compare(self._parameters_turn())
        except BaseException:
            self.stepping = False  # the step does not come to its end
            raise
        finally:
            self.forwards, self.generators, self.batch_hash, self.buffer_sums = 0, {}, 0, {}

    def _compares_after(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def _parameters_turn(self) -> bool:
        return self.comparisons % PARAMETERS_EVERY == 0

    # What was found

    def _find(self, kind: str, names: Sequence[str], text: str) -> None:
        """Keep what this rank found until the ranks compare; log it at once, since a rank that trains alone may not get there."""
        new = [name for name in names if (kind, name) not in self.seen]
        if new and kind not in self.skip:
            self.seen |= {(kind, name) for name in new}
            says = text.format(_listed(new))
            if not self._compares_after(self.steps):
                _log.error("rank %d, step %d: %s%s", dist.get_rank(self.group), self.steps, says, _pages(kind))
                says += f" (first seen at step {self.steps})"
            self.found[kind, says] = says

    def _look_at(self, parameters: dict[str, nn.Parameter]) -> None:
        """Find, on this rank alone, parameters that DDP does not know and those that never had a gradient."""
        new = [name for name, p in parameters.items() if p.requires_grad and id(p) not in self.ids]
        self._find("hooks", new, "DDP does not know {}, which came into the model after it was wrapped")
        if self.comparisons and self.steps > 1:
            self._find("idle", [name for name, p in self.idle.items() if p.requires_grad], "no gradient since the start for {}")

    def _found_anywhere(self) -> Texts:
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, self.found, group=self.group)
        self.found = {}
        having = {key: [rank for rank, theirs in enumerate(everyone) if key in theirs] for theirs in everyone for key in theirs}
        return {key: f"{_ranks(ranks)}: {everyone[ranks[0]][key]}" for key, ranks in having.items()}

    def _compared(self, parameters: dict[str, nn.Parameter], compared: dict[str, Any], buffer_sums: dict[str, torch.Tensor]) -> Texts:
        """What differs of the gradients of ``parameters``, of the parameters ``compared`` and of buffers: of each kind in one text."""
        gradients = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.requires_grad}
        tensors = {**gradients, **compared}
        sums = {name: torch.tensor(ABSENT) if tensor is None else _checksum(tensor) for name, tensor in tensors.items()} | buffer_sums
        if not sums:
            return {}
        row = torch.stack([one.to(next(iter(sums.values())).device) for one in sums.values()])
        columns = dict(zip(sums, zip(*_gathered(row, self.group))))
        found = {}
        for kind, names in (("gradients", gradients), ("parameters", compared), ("buffers", buffer_sums)):
            differ = [name for name in names if _unlike_rank_0(columns[name]) and (kind, name) not in self.differed]
            if differ and kind not in self.skip:
                self.differed |= {(kind, name) for name in differ}
                texts = [self._how_different(name, tensors.get(name), columns[name]) for name in differ[:NAMED]]
                more = [f"and {len(differ) - NAMED} more"] if len(differ) > NAMED else []
                found[kind, "; ".join(differ)] = "; ".join(texts + more)
        return found

    def _how_different(self, name: str, tensor: torch.Tensor | None, sums: Sequence[int]) -> str:
        """Ask all ranks by how much a tensor differs, where each of them has it."""
        if tensor is None or ABSENT in sums:
            lacking = [rank for rank, one in enumerate(sums) if one == ABSENT]
            return f"{name}: none on {_ranks(lacking)}" if lacking else f"{name}: another one on {_ranks(_unlike_rank_0(sums))}"
        return "".join(_difference(name, tensor, 0.0, self.group)) or f"{name}: other bits on {_ranks(_unlike_rank_0(sums))}"

    def _told(self, new: Texts, step: int) -> str:
        self.told |= set(new)
        kinds = {kind for kind, _ in new}
        explained = {"gradients"} if kinds & {"hooks", "around"} else set()  # these say why gradients differ
        lines = [one if kind in explained else f"{one}{_pages(kind)}" for (kind, _), one in new.items()]
        text = f"step {step}: " + "\n".join(lines) if new else ""
        if text and callable(self.tell):
            self.tell(text)
        elif text and self.tell == "raise":
            raise Fault(text)
        elif text and dist.get_rank(self.group) == 0:
            warnings.warn_explicit(text, RuntimeWarning, __file__, 0) if self.tell == "warn" else _log.error(text)
        return text

    # Which tensors

    def _places(self) -> Iterator[tuple[str, dict[str, Any], str, nn.Parameter]]:
        """Every parameter once: its name, the dict that holds it, its key there, and itself."""
        seen: set[int] = set()
        for prefix, module in self.wrapper.module.named_modules():
            for key, parameter in self._named((f"{prefix}.{key}".lstrip("."), p) for key, p in module._parameters.items()):
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield key, module._parameters, key.rpartition(".")[2], parameter

    def _named(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The pairs whose name neither DDP nor the user wants to be left alone."""
        ignored = {name.lstrip(".") for name in self.wrapper.parameters_to_ignore}  # DDP writes .weight for one of the model itself
        return ((name, one) for name, one in pairs if name not in ignored and not any(fnmatchcase(name, p) for p in self.ignore))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as whole numbers: the same in whatever order a device adds, unlike that of its values."""
    plain = tensor.detach()
    if plain.is_sparse:
        plain = plain.coalesce()
        return _checksum(plain.values()) + _checksum(plain.indices())
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    size = plain.element_size()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    flat = plain.resolve_neg().contiguous().view(-1)
    end = flat.numel() - flat.numel() % (8 // size)
    whole, rest = flat[:end], flat[end:]
    aligned = whole.clone() if whole.storage_offset() * size % 8 else whole
    return aligned.view(torch.int64).sum() + rest.view(integers).sum(dtype=torch.int64)  # in 32 bits, 512 numbers doubled would add nothing


def _fingerprint(values: Iterable[Any]) -> int:
    """A number for a batch, the same on two ranks that were given the same one; 0 where it holds nothing that could tell batches apart."""
    lists = [numbers for tensor in _tensors(values) if len(set(numbers := _spread(tensor))) > 1]
    return _hashed(lists) if lists else 0


def _spread(tensor: torch.Tensor) -> list[Any]:
    """Some numbers of a tensor; none of one that cannot be read like this: nested, quantized, without data."""
    try:
        flat = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach().flatten()
        numbers: list[Any] = flat[:: max(1, flat.numel() // SPREAD)].cpu().tolist()
    except (RuntimeError, TypeError, NotImplementedError):
        return []
    return numbers


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif is_dataclass(value):
            yield from _tensors(getattr(value, field.name, None) for field in fields(value))


def _hashed(value: Any) -> int:
    """A hash that is the same in every process, and not 0."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") + 1


def _unlike_rank_0(values: Sequence[Any]) -> list[int]:
    """The ranks with another value than rank 0."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _alike(values: Sequence[int]) -> str:
    """The ranks that share a value, 0 aside, in words: ``ranks 0, 1; ranks 2, 3``."""
    groups = [[rank for rank, one in enumerate(values) if one == value] for value in dict.fromkeys(values) if value]
    return "; ".join(_ranks(ranks) for ranks in groups if len(ranks) > 1)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _pages(kind: str) -> str:
    return f" (ddp-pitfalls: {', '.join(PAGE.format(pitfall) for pitfall in FINDINGS[kind])})"


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """A global hook that does not keep the watch alive: the hooks of the model do, and the watch goes with the model."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        called = reference()
        return None if called is None else called(*args)

    not_traced: Callable[..., Any] = getattr(torch, "_disable_dynamo", lambda function: function)(hook)  # by a step that is compiled
    return not_traced


class _FabricCallback:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        if replicated_part(module) is not None:
            Watch(module, **self.options)


def watch_fabric(**options: Any) -> Any:
    """A callback for ``Fabric(callbacks=[...])``, from Lightning 2.1: a ``Watch`` with these options on every model set up for DDP."""
    return _FabricCallback(options)


def watch_trainer(**options: Any) -> Any:
    """A callback for ``Trainer(callbacks=[...])``: a ``Watch`` with these options, and a last comparison at the end of the training."""
    package = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"

    class WatchTraining(import_module(package).Callback):  # type: ignore[misc]
        watch: Watch | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch = Watch(trainer.strategy.model, **options) if replicated_part(trainer.strategy.model) is not None else None

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.watch is not None:
                self.watch.stop()
                if self.watch.averages:  # else it ended within an accumulation
                    self.watch.check()

    return WatchTraining()
