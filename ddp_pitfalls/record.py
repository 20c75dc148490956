"""Run pairs and keep what they measured."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from ddp_pitfalls import hardware, results
from ddp_pitfalls.catalogue import Pitfall, chosen, find
from ddp_pitfalls.launch import verdict_on
from ddp_pitfalls.measure import NOT_MEASURED
from ddp_pitfalls.results import Environment, PairResult, Results, VariantResult
from ddp_pitfalls.script import Script, load


def record(root: Path, ids: Sequence[str], ranks: int, accelerator: str) -> int:
    """Run the pitfalls called ``ids``, or all, and write the file of this environment. Returns the exit code of the command."""
    tier = hardware.choose(accelerator, ranks, hardware.count_gpus())
    here = environment(tier, ranks)
    path = root / "results" / f"{here.name}.json"
    old = results.read(path) if path.exists() else None  # before the runs: a damaged file is told at once
    failed = 0
    pairs = {}
    for one in chosen(find(root), ids):
        pairs[one.id], wrong = run_pair(one, tier, ranks)
        failed += len(wrong)
        print(f"{one.id}: {'; '.join(wrong) or 'as documented'}", flush=True)
    new = results.merged(old, Results(results.FORMAT, here, pairs))
    changed = results.write(root / "results", new)
    print(f"{path.relative_to(root)}: {'written' if changed else 'unchanged'}")
    return 1 if failed else 0


def environment(tier: hardware.Tier, ranks: int) -> Environment:
    """What this machine is, as a results file names it."""
    here = hardware.versions()
    devices = f"{os.cpu_count()} CPU cores"
    if tier.accelerator == "cuda":
        devices = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
    return Environment(here["torch"], here["lightning"], tier.name, tier.backend, ranks, here["python"], f"{platform.machine()}, {devices}")


def run_pair(one: Pitfall, tier: hardware.Tier, ranks: int) -> tuple[PairResult, list[str]]:
    """Both scripts of a pitfall, and what was not as documented."""
    repro, fix = load(one.repro), load(one.fix)
    kinds = {name: v.kind for name, v in repro.variants.items()}
    wrong: list[str] = []

    def run(script: Script) -> dict[str, VariantResult]:
        kept = {}
        for name, wanted in script.variants.items():
            verdict = verdict_on(script, wanted, tier, ranks, "fork" if hardware.FORKS else "spawn")
            kept[name] = results.variant_result(kinds.get(name, wanted.kind), verdict, bool(wanted.varies))
            if not verdict.as_documented and verdict.word != NOT_MEASURED:
                wrong.append(f"{script.side}/{name} {verdict.word}: {verdict.why}")
        return kept

    today = datetime.date.today().isoformat()
    return PairResult(today, run(repro), run(fix)), wrong
