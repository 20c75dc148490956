"""The choice of a tier with the number of GPUs replaced, what variants need, and the environment of a rank."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from ddp_pitfalls import hardware
from ddp_pitfalls.hardware import CPU, CUDA, CUDA_SHARED, Absent, Tier, UnknownNeed, choose, missing, rank_environment


@pytest.mark.parametrize(
    ("gpus", "ranks", "tier"),
    [(0, 2, CPU), (1, 2, CUDA_SHARED), (2, 2, CUDA), (4, 2, CUDA), (0, 4, CPU), (1, 4, CUDA_SHARED), (2, 4, CPU), (4, 4, CUDA)],
)
def test_auto_takes_the_best_tier(gpus: int, ranks: int, tier: Tier) -> None:
    assert choose("auto", ranks, gpus) is tier


@pytest.mark.parametrize(
    ("wanted", "gpus", "tier"),
    [
        ("cpu", 0, CPU),
        ("cpu", 1, CPU),
        ("cpu", 4, CPU),
        ("cuda-shared", 1, CUDA_SHARED),
        ("cuda-shared", 2, CUDA_SHARED),
        ("cuda", 2, CUDA),
        ("cuda", 4, CUDA),
    ],
)
def test_a_tier_by_name(wanted: str, gpus: int, tier: Tier) -> None:
    assert choose(wanted, 2, gpus) is tier


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "message"),
    [
        ("cuda", 2, 0, "tier cuda with 2 ranks needs 2 GPUs, found 0 GPUs: use --accelerator cpu"),
        ("cuda", 2, 1, "tier cuda with 2 ranks needs 2 GPUs, found 1 GPU: use --accelerator cpu"),
        ("cuda", 4, 2, "tier cuda with 4 ranks needs 4 GPUs, found 2 GPUs: use --accelerator cpu, or fewer --ranks"),
        ("cuda-shared", 2, 0, "tier cuda-shared needs a GPU, found 0 GPUs: use --accelerator cpu"),
    ],
)
def test_a_tier_that_is_not_here(wanted: str, ranks: int, gpus: int, message: str) -> None:
    with pytest.raises(Absent) as error:
        choose(wanted, ranks, gpus)
    assert str(error.value) == message


@pytest.mark.parametrize("tier", [CPU, CUDA, CUDA_SHARED])
def test_the_backend_of_a_tier(tier: Tier) -> None:
    assert tier.backend == ("nccl" if tier is CUDA else "gloo")  # NCCL refuses two ranks on one GPU
    assert hardware.TIERS[tier.name] is tier


@pytest.mark.parametrize(
    ("needs", "tier", "reason"),
    [
        ((), CPU, None),
        (("gpu",), CPU, "needs a GPU, and the tier is cpu"),
        (("gpu",), CUDA_SHARED, None),
        (("gpu",), CUDA, None),
        (("2 gpus",), CPU, "needs two GPUs, and the tier is cpu"),
        (("2 gpus",), CUDA_SHARED, "needs two GPUs, and the tier is cuda-shared"),
        (("2 gpus",), CUDA, None),
        (("gloo",), CPU, None),
        (("gloo",), CUDA_SHARED, None),
        (("gloo",), CUDA, "needs gloo, and the backend is nccl"),
        (("nccl",), CPU, "needs nccl, and the backend is gloo"),
        (("nccl",), CUDA, None),
        (("spawn",), CPU, None),
        (("spawn", "gpu"), CPU, "needs a GPU, and the tier is cpu"),
    ],
)
def test_needs_of_hardware(needs: tuple[str, ...], tier: Tier, reason: str | None) -> None:
    assert missing(needs, tier) == reason


@pytest.mark.parametrize(
    ("need", "here", "reason"),
    [
        ("lightning>=2.3", "2.3.0", None),
        ("lightning>=2.3", "2.0.2", "needs lightning>=2.3, and lightning 2.0.2 is here"),
        ("torch<2.6", "2.13.0", "needs torch<2.6, and torch 2.13.0 is here"),
        ("torch<2.6", "2.0.1", None),
        ("torch>=2.14", "2.14.0.dev20261130", "needs torch>=2.14, and torch 2.14.0.dev20261130 is here"),
        ("torch>=2.13", "2.14.0.dev20261130", None),
    ],
)
def test_needs_of_a_release(need: str, here: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "version", lambda _: f"{here}+cu130")
    assert missing([need], CPU) == reason


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PACKAGES", ("no-such-package",))
    assert missing(["no-such-package"], CPU) == "needs no-such-package, and it is not installed"


@pytest.mark.parametrize("need", ["gpus", "3 gpus", "numpy>=2", "", "lightning=>2"])
def test_a_need_that_nobody_knows(need: str) -> None:
    with pytest.raises(UnknownNeed, match=r"unknown need .*: it is one of gpu, 2 gpus, gloo, nccl, spawn, or a package: torch, lightning"):
        missing(["gpu", need], CPU)  # also behind one that is not met


@pytest.mark.parametrize("tier", [CPU, CUDA])
def test_the_environment_of_ranks_on_one_node(tier: Tier) -> None:
    environments = [rank_environment(tier, rank, 4, port=1234) for rank in range(4)]
    assert [e["RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert {(e["NODE_RANK"], e["GROUP_RANK"], e["WORLD_SIZE"], e["MASTER_PORT"]) for e in environments} == {("0", "0", "4", "1234")}


def test_the_environment_of_ranks_on_one_gpu() -> None:
    environments = [rank_environment(CUDA_SHARED, rank, 2, port=1234) for rank in range(2)]
    assert [e["RANK"] for e in environments] == ["0", "1"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "0"]  # each is the first on a node of its own, so that both use GPU 0
    assert [e["NODE_RANK"] for e in environments] == ["0", "1"]


@pytest.mark.parametrize("tier", [CPU, CUDA, CUDA_SHARED])
def test_ranks_meet_on_the_loopback(tier: Tier) -> None:
    environment = rank_environment(tier, 0, 2, port=1234)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"]
    assert environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.skipif(not hardware.FORKS, reason="a spawned process does not see what this test replaces")
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_gpus_are_counted_in_another_process(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used_here: list[int] = []

    def device_count() -> int:
        used_here.append(0)
        return gpus

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert hardware.gpu_names() == [f"GPU {i}" for i in range(gpus)]
    assert hardware.count_gpus() == gpus
    assert not used_here
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not hardware.FORKS, reason="a spawned process does not see what this test replaces")
def test_a_driver_that_ends_the_process_means_no_gpu(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def device_count() -> int:
        raise SystemExit("the driver is broken")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert hardware.count_gpus() == 0
    assert "the driver is broken" in capfd.readouterr().err


def test_nodes_and_devices_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert hardware.nodes_and_devices(8) == (2, 4)
    assert hardware.nodes_and_devices(4) == (1, 4)
