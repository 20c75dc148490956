"""What starting a script costs, as ratios of commands run in pairs, one after the other. Called by ``nox -s benchmark``.

Seconds are not shown: they say more about the machine than about this project.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
Command = Sequence[str]

IMPORTS = [sys.executable, "-c", "import torch, lightning.fabric"]
SCRIPT = [sys.executable, "repros/ddp_cpu_move.py", "--accelerator", "cpu"]
ONE_VARIANT = [*SCRIPT, "--variant", "on_cpu"]
THROUGH_FABRIC = [sys.executable, "benchmarks/through_fabric.py", "on_cpu"]


def through_nox() -> Command:
    """The script's session; the session that calls this says how it was called."""
    return [*shlex.split(os.environ.get("NOX", "nox")), "-s", "repro-ddp-cpu-move", "--", "--accelerator", "cpu"]


def seconds(command: Command) -> float:
    """How long a command takes. One that fails ends the benchmark with what it printed."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with exit code {done.returncode}:\n{done.stdout}")
    return took


def ratio(command: Command, reference: Command, pairs: int) -> list[float]:
    """How many times as long as the reference the command takes, pair by pair, in ascending order. A first run of each warms caches."""
    seconds(reference), seconds(command)
    return sorted(seconds(command) / seconds(reference) for _ in range(pairs))


def line(name: str, ratios: Sequence[float], bar: float | None) -> str:
    """A comparison on the screen: the median, how far the pairs lie apart, and the bar where there is one."""
    middle = median(ratios)
    judged = "" if bar is None else f"  bar {bar:.2f}: {'met' if middle <= bar else 'NOT met'}"
    return f"{name:<60} {middle:5.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f}){judged}"


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each command (default 7)")
    pairs = parser.parse_args().pairs
    print(f"median of {pairs} paired runs (lowest to highest)", flush=True)
    comparisons: list[tuple[str, Command, Command, float | None]] = [
        ("the script / importing torch and lightning.fabric", SCRIPT, IMPORTS, 1.15),
        ("one variant / importing torch and lightning.fabric", ONE_VARIANT, IMPORTS, None),
        ("that variant by Fabric's own launcher / the same import", THROUGH_FABRIC, IMPORTS, None),
        ("nox -s repro-ddp-cpu-move, a second time / the script", through_nox(), SCRIPT, 1.30),
    ]
    for name, command, reference, bar in comparisons:
        print(line(name, ratio(command, reference, pairs), bar), flush=True)


if __name__ == "__main__":
    main()
