"""The checks that know where a checkpoint's tensors go. Only the tags differ: torch is told to write those of a GPU."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_pitfalls.checks import devices_in_checkpoint, warn_of_loads_elsewhere


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two parameters from the CPU and two that claim to come from cuda:0."""
    model = nn.Linear(3, 2)
    tags = iter(["cpu", "cuda:0", "cuda:0"])
    with patch("torch.serialization.location_tag", lambda _: next(tags)):
        torch.save({"weight": model.weight, "bias": model.bias, "tied": model.weight, "step": torch.zeros(())}, tmp_path / "model.ckpt")
    return tmp_path / "model.ckpt"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def registry() -> Iterator[None]:
    """The check cannot be taken back, but here it must be."""
    with patch("torch.serialization._package_registry", list(torch.serialization._package_registry)):
        yield


def test_devices_are_listed_once_for_each_storage(checkpoint: Path) -> None:
    assert devices_in_checkpoint(checkpoint) == {"cpu": 1, "cuda:0": 2}
    assert devices_in_checkpoint(str(checkpoint), weights_only=True) == {"cpu": 1, "cuda:0": 2}


def load(path: Path, **options: Any) -> list[str]:
    """The warnings of a load that a machine without a GPU cannot finish."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            torch.load(path, **options)
        except RuntimeError as error:
            assert "torch.cuda.is_available() is False" in str(error)
    return [str(one.message) for one in told]


def test_a_load_onto_another_gpu_warns(checkpoint: Path, group: None, registry: None) -> None:
    warn_of_loads_elsewhere(torch.device("cuda", 1))
    words = "torch.load puts a tensor on cuda:0, and this rank has cuda:1: pass map_location"
    assert words in load(checkpoint)
    assert words in load(checkpoint, map_location="cuda:0")
    assert words in load(checkpoint, map_location=lambda storage, tag: None)


def test_other_loads_do_not_warn(checkpoint: Path, group: None, registry: None) -> None:
    warn_of_loads_elsewhere(torch.device("cuda", 1))
    warn_of_loads_elsewhere("cuda:1")  # a second time is no error
    for where in ("cpu", "cuda:1", "cuda", "meta", lambda storage, tag: storage):
        assert load(checkpoint, map_location=where) == []


def test_without_a_process_group_nothing_warns(checkpoint: Path, registry: None) -> None:
    warn_of_loads_elsewhere("cuda:1")
    assert load(checkpoint) == []
