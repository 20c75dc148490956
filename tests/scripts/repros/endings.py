"""The ways in which ranks can end, for the tests of the supervisor."""

import collections
import itertools
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import FINISHED, Dies, Hangs, Measurement, Raises


def measured(value="broken"):
    return Measurement("state", value, healthy="healthy", broken="broken")


@variant
def all_measure(fabric):
    dist.barrier()
    return measured()


@variant(Raises(ValueError, "of rank 1"))
def one_raises(fabric):
    if fabric.global_rank == 1:
        raise ValueError("the error of rank 1")
    dist.barrier()
    return measured()


@variant(Raises(TypeError, "of rank 1"))
def wrong_type(fabric):
    return one_raises(fabric)


@variant(Raises(ValueError, "other words"))
def wrong_words(fabric):
    return one_raises(fabric)


@variant
def sys_exit(fabric):
    if fabric.global_rank == 1:
        sys.exit(3)
    dist.barrier()
    return measured()


@variant
def os_exit(fabric):
    if fabric.global_rank == 1:
        os._exit(3)
    dist.barrier()
    return measured()


@variant(Hangs({0: "dist.barrier"}, others=FINISHED))
def one_returns(fabric):
    if fabric.global_rank == 0:
        dist.barrier()
    return measured()


@variant(Dies("SIGABRT", "op.preamble.length <= op.nbytes"))
def sizes_differ(fabric):
    dist.all_reduce(torch.ones(1 if fabric.global_rank == 0 else 1000))
    return measured()


@variant(Dies("SIGABRT", ""))
def aborts(fabric):
    if fabric.global_rank == 1:
        os.abort()
    dist.barrier()
    return measured()


@variant(Dies("SIGABRT", "its last words"))
def aborts_after_its_peer(fabric):
    if fabric.global_rank == 1:
        dist.barrier()
        time.sleep(0.1)
        os.write(2, b"its last words")
        os.abort()
    dist.barrier()
    raise ConnectionError("the peer has gone")


@variant(Dies("SIGKILL", ""))
def wrong_signal(fabric):
    return aborts(fabric)


@variant(Hangs({0: "dist.barrier", 1: "dist.all_reduce"}))
def collectives_differ(fabric):
    if fabric.global_rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))
    return measured()


@variant(Hangs({0: "dist.all_reduce", 1: "dist.all_reduce"}))
def hangs_elsewhere(fabric):
    if fabric.global_rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))
    return measured()


@variant(Hangs({1: "time.sleep"}, others="dist.barrier"))
def one_sleeps(fabric):
    if fabric.global_rank == 1:
        time.sleep(1000)
    dist.barrier()
    return measured()


@variant(Hangs({1: "collections.deque"}, others="dist.barrier"))
def one_is_busy(fabric):
    if fabric.global_rank == 1:
        collections.deque(itertools.repeat(None), maxlen=0)  # never lets go of the interpreter
    dist.barrier()
    return measured()


@variant(Hangs({0: "dist.barrier", 1: "sleep"}))
def moves_on(fabric):
    if fabric.global_rank == 1:
        while True:
            step_of_training(depth=0)
    dist.barrier()
    return measured()


def step_of_training(depth):
    """Stand somewhere else at every look."""
    time.sleep(0.02)
    if depth < 90:
        step_of_training(depth + 1)


@variant
def hangs_though_silent(fabric):
    if fabric.global_rank == 0:
        dist.barrier()
    return measured()


@variant
def warns(fabric):
    warnings.warn("gradients may be wrong", stacklevel=1)
    return measured()


@variant
def writes_to_stderr(fabric):
    os.write(2, b"from a library\n")
    return measured()


@variant
def is_nan(fabric):
    return measured(float("nan"))


@variant
def returns_nothing(fabric):
    pass


@variant
def returns_what_cannot_travel(fabric):
    return measured(lambda: None)


@variant
def is_neither(fabric):
    return measured("something else")


@variant
def tells_nothing(fabric):
    return Measurement("state", "same", healthy="same", broken="same")


@variant
def is_healthy(fabric):
    return measured("healthy")


@variant
def one_is_broken(fabric):
    return measured("broken" if fabric.global_rank == 1 else "healthy")


if __name__ == "__main__":
    main()
