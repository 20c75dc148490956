"""Two nodes under torchrun: two network namespaces on this machine, joined by a pair of virtual devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import verdict_lines

from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.measure import FIX, REPRO, REPRODUCED

NODES = (0, 1)
ADDRESS = "10.213.77.{}"  # in these namespaces only


def name(node: int) -> str:
    return f"ddp{os.getpid() % 100_000}n{node}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Two namespaces, each with one end of a pair of devices called like itself. Skips the test where they are not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (package iproute2)")
    try:
        for node in NODES:
            ip("netns", "add", name(node))
        ip("link", "add", name(0), "netns", name(0), "type", "veth", "peer", "name", name(1), "netns", name(1))
        for node in NODES:
            ip("-n", name(node), "addr", "add", f"{ADDRESS.format(node + 1)}/24", "dev", name(node))
            ip("-n", name(node), "link", "set", name(node), "up")
            ip("-n", name(node), "link", "set", "lo", "up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", name(node)], check=False, capture_output=True)


def start(node: int, folder: Path, script: Path, *arguments: str) -> subprocess.Popen[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    meet = ["--master-addr", ADDRESS.format(1), "--master-port", "29400"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": name(node), "TMPDIR": str(folder)}  # torchrun leaves its logs there
    command = ["ip", "netns", "exec", name(node), *agent, *meet, str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_verdict_from_two_nodes(tmp_path: Path) -> None:
    """The first node prints what both measured; both end with the same code."""
    with namespaces():
        agents = [start(node, tmp_path, ROOT / REPRO / "ddp_cpu_move.py", "--variant", "on_cpu") for node in NODES]
        ends = [agent.communicate(timeout=240) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], ends
        assert verdict_lines(ends[0][0])["on_cpu"] == REPRODUCED
        assert ends[1][0] == ""


def test_a_failure_on_the_second_node(tmp_path: Path) -> None:
    """What rank 1 did is told by rank 0, and both agents fail."""
    script = tmp_path / FIX / "ddp_cpu_move.py"
    script.parent.mkdir()
    text = (ROOT / FIX / "ddp_cpu_move.py").read_text()
    mistake = "    if fabric.global_rank == 1:\n        raise ValueError('the second node')\n"
    head = "def on_cpu(fabric):  # without a GPU, cpu() moves nothing: a change of dtype and back replaces the same nodes\n"
    assert head in text
    script.write_text(text.replace(head, head + mistake))
    with namespaces():
        agents = [start(node, tmp_path, script, "--variant", "on_cpu", "--patience", "5") for node in NODES]
        ends = [agent.communicate(timeout=240) for agent in agents]
        assert "rank 1 raised ValueError" in ends[0][0], ends
        assert all(agent.returncode != 0 for agent in agents)
