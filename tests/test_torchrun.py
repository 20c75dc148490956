"""The same scripts on ranks that torchrun started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import SCRIPTS, Finished, run_script, verdict_lines

from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.measure import REPRO

MODEL_REPRO = ROOT / REPRO / "ddp_cpu_move.py"
UNDER_TORCHRUN = SCRIPTS / REPRO / "under_torchrun.py"
OUTCOMES = SCRIPTS / REPRO / "outcomes.py"
COMMANDS: dict[str, tuple[str | Path, ...]] = {
    "model pair": (MODEL_REPRO, "--variant", "on_cpu", "--variant", "on_cpu_with_ddp"),
    "hang": (UNDER_TORCHRUN, "--patience", "5"),
    "failure": (OUTCOMES, "--variant", "as_documented", "--variant", "not_any_more"),
}


@pytest.fixture(scope="module")
def finished(workplace: None) -> dict[str, Finished]:
    """How each command ended. They run at the same time, since each waits a lot."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = {
        name: subprocess.Popen([*torchrun, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for name, command in COMMANDS.items()
    }
    try:
        written = {name: process.communicate(timeout=240) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {name: Finished(running[name].returncode, *written[name]) for name in running}


def test_the_verdicts_are_those_of_the_bare_script(finished: dict[str, Finished]) -> None:
    path, *arguments = COMMANDS["model pair"]
    bare = run_script(Path(path), *map(str, arguments), CUDA_VISIBLE_DEVICES="")
    assert (finished["model pair"].code, finished["model pair"].out) == (0, bare.out)
    assert verdict_lines(bare.out)["all"] == "repros/ddp_cpu_move.py: as documented (2 reproduced)"


def test_a_hang_is_found(finished: dict[str, Finished]) -> None:
    hang = finished["hang"]
    assert verdict_lines(hang.out) == {
        "ends": "reproduced",
        "hangs": "reproduced",
        "comes_after": "not measured",
        "all": "repros/under_torchrun.py: as documented (2 reproduced, 1 not measured)",
    }
    assert "  rank 0 is stuck at `dist.barrier()`\n  rank 1 is stuck at `dist.all_reduce(torch.ones(1))`\n" in hang.out
    assert "  needs a process group that hangs has not spoilt: run it alone with --variant comes_after\n" in hang.out
    assert hang.code == 0


def test_a_script_that_fails(finished: dict[str, Finished]) -> None:
    failure = finished["failure"]
    assert verdict_lines(failure.out)["all"] == "repros/outcomes.py: NOT as documented (1 reproduced, 1 not reproduced)"
    assert failure.code == 1
