"""What the catalogue costs from one warm process, against its scripts by hand and against fewer ranks. For ``nox -s benchmark``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROWTH = "ddp-cpu-move"  # the pair that is run with more ranks


def run(*arguments: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that ``python -m ddp_pitfalls run`` takes, and what it says of every script. A failure ends the benchmark."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "ddp_pitfalls", "run", "--json", "--accelerator", "cpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        wrong = [f"{s['side']}/{s['pitfall']}" for s in json.loads(done.stdout or "[]") if not s["as_documented"]]
        sys.exit(f"not as documented: {', '.join(wrong)}\n{done.stderr}")
    return took, json.loads(done.stdout)


def by_hand() -> float:
    """Seconds that all scripts take, started one after the other."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as nowhere:
        for side in ("repros", "fixes"):
            for path in sorted((ROOT / side).glob("*.py")):
                command = [sys.executable, str(path), "--accelerator", "cpu"]
                subprocess.run(command, cwd=ROOT, stdout=nowhere, stderr=nowhere, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return time.perf_counter() - begin


def spent(scripts: Sequence[dict[str, Any]], *, hangs: bool) -> list[float]:
    """Seconds of each measured variant; with ``hangs`` those of the hanging ones, else of the others."""
    variants = [(v, v["kind"] == "hangs") for s in scripts for v in s["variants"] if v["verdict"] != "not measured"]
    return [v["seconds"] for v, hanging in variants if hanging == hangs]


def main() -> None:
    """Run the comparisons and print them."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    warm, scripts = run()
    print(f"{len(scripts)} scripts, {sum(len(s['variants']) for s in scripts)} variants")
    print(f"the catalogue from one warm process / its scripts by hand, one after the other: {warm / by_hand():.2f} (bar 0.10)", flush=True)
    _, alone = run("--jobs", "1")
    print(f"median variant that does not hang, one script at a time: {median(spent(alone, hangs=False)):.2f} s (bar 0.25 s)")
    print(f"median variant that hangs / that one: {median(spent(alone, hangs=True)) / median(spent(alone, hangs=False)):.1f}", flush=True)
    few = sum(spent(run(GROWTH, "--jobs", "1")[1], hangs=False))
    for ranks in (4, 8):
        many = sum(spent(run(GROWTH, "--jobs", "1", "--ranks", str(ranks))[1], hangs=False))
        print(f"{GROWTH} with {ranks} ranks / with 2 ranks: {many / few:.2f}", flush=True)


if __name__ == "__main__":
    main()
