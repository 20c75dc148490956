"""The same scripts on ranks that torchrun started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import SCRIPTS, Finished, run_script, verdict_lines

from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.measure import REPRO

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MODEL_REPRO = ROOT / REPRO / "ddp_cpu_move.py"
VARIANTS = ("--variant", "on_cpu", "--variant", "on_cpu_with_ddp")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
COMMANDS = {
    "2 ranks": (*TORCHRUN, "2", MODEL_REPRO, *VARIANTS),
    "4 ranks": (*TORCHRUN, "4", MODEL_REPRO, *VARIANTS),
    "not as documented": (*TORCHRUN, "2", SCRIPTS / REPRO / "under_torchrun.py", "--patience", "5"),
}


@pytest.fixture(scope="module")
def finished(workplace: None) -> dict[str, Finished]:
    """How each command ended. They run at the same time, since each waits a lot."""
    environment = {**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1"}
    running = {
        name: subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for name, command in COMMANDS.items()
    }
    try:
        written = {name: process.communicate(timeout=240) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {name: Finished(running[name].returncode, *written[name]) for name in running}


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_torchrun_says_the_same_as_the_bare_script(ranks: str, finished: dict[str, Finished]) -> None:
    bare = run_script(MODEL_REPRO, "--ranks", ranks, *VARIANTS, **NO_GPU)
    assert (bare.code, bare.err) == (0, "")
    assert verdict_lines(bare.out) == {
        "on_cpu": "reproduced",
        "on_cpu_with_ddp": "reproduced",
        "all": "repros/ddp_cpu_move.py: as documented (2 reproduced)",
    }
    under = finished[f"{ranks} ranks"]
    assert (under.code, under.out) == (0, bare.out)


def test_what_is_not_as_documented_and_a_hang(finished: dict[str, Finished]) -> None:
    failed = finished["not as documented"]
    assert verdict_lines(failed.out) == {
        "not_any_more": "not reproduced",
        "hangs": "reproduced",
        "comes_after": "not measured",
        "all": "repros/under_torchrun.py: NOT as documented (1 not reproduced, 1 reproduced, 1 not measured)",
    }
    assert "  rank 0 is stuck at `dist.barrier()`\n  rank 1 is stuck at `dist.all_reduce(torch.ones(1))`\n" in failed.out
    assert "  needs a process group that hangs has not spoilt: run it alone with --variant comes_after\n" in failed.out
    assert failed.code == 1
