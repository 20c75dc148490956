"""Run the catalogue and say, for people or for programs, what is still as documented."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ddp_pitfalls.catalogue import chosen, find
from ddp_pitfalls.measure import AS_EXPECTED, FIX, NOT_AS_EXPECTED, NOT_MEASURED, NOTHING_MEASURED, REPRO
from ddp_pitfalls.record import scripts_of
from ddp_pitfalls.runner import Asked, ScriptRun, run


def verify(root: Path, ids: Sequence[str], asked: Asked, jobs: int, as_json: bool) -> int:
    """Run the pitfalls called ``ids``, or all.

    Returns 0 where all that was measured is as documented, 1 where it is not, 77 where nothing could be measured.
    """
    scripts = scripts_of(chosen(find(root), ids))
    screen = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    progress = Progress(*columns, console=screen, transient=True, disable=as_json or not screen.is_terminal)
    runs = []
    with progress:
        task = progress.add_task("starting", total=len(scripts))
        for script in run(scripts, asked, jobs):
            runs.append(script)
            progress.update(task, advance=1, description=script.name)
    runs.sort(key=lambda script: (script.pitfall, script.side != REPRO))
    if as_json:
        json.dump([_plain(script) for script in runs], sys.stdout, indent=1)
        print()
    else:
        _print(runs)
    if any(not script.as_documented for script in runs):
        return NOT_AS_EXPECTED
    measured = any(o.verdict.word != NOT_MEASURED for script in runs for o in script.outcomes)
    return AS_EXPECTED if measured else NOTHING_MEASURED


def _print(runs: Sequence[ScriptRun]) -> None:
    console = Console(highlight=False)
    here = next((script.environment for script in runs if script.environment is not None), None)
    if here is not None:
        console.print(
            f"{here.ranks} ranks, tier {here.tier} ({here.backend}), torch {here.torch}, lightning {here.lightning}, Python {here.python}"
        )
    ids = list(dict.fromkeys(script.pitfall for script in runs))
    table = Table(box=None, pad_edge=False)
    table.add_column("pitfall", no_wrap=True)
    for heading in ("kind", "repro", "fix"):
        table.add_column(heading)
    table.add_column("seconds", justify="right")
    for id in ids:
        sides = {script.side: script for script in runs if script.pitfall == id}
        kinds = ", ".join(dict.fromkeys(o.kept.kind for o in sides[REPRO].outcomes))
        seconds = sum(o.seconds for script in sides.values() for o in script.outcomes)
        table.add_row(id, kinds, _summary(sides[REPRO]), _summary(sides[FIX]), f"{seconds:.1f}")
    console.print(table)
    wrong = {script.pitfall for script in runs if not script.as_documented}
    console.print(f"{len(ids) - len(wrong)} of {len(ids)} as documented" + (f"; not: {', '.join(sorted(wrong))}" if wrong else ""))
    for script in runs:
        if not script.as_documented:
            _print_wrong(console, script)


def _summary(script: ScriptRun) -> str:
    if script.problem:
        return "could not be run"
    words = [o.verdict.word for o in script.outcomes]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _print_wrong(console: Console, script: ScriptRun) -> None:
    console.print(f"\n{script.name}", style="bold")
    if script.problem:
        print(script.problem)
    for outcome in script.outcomes:
        if not outcome.verdict.as_documented and outcome.verdict.word != NOT_MEASURED:
            if outcome.news:
                print(f"{outcome.variant} {outcome.news}")
            print(outcome.report)


def _plain(script: ScriptRun) -> dict[str, Any]:
    variants = [
        {
            "variant": o.variant,
            "kind": o.kept.kind,
            "verdict": o.verdict.word,
            "why": o.verdict.why,
            "news": o.news,
            "seconds": round(o.seconds, 3),
        }
        for o in script.outcomes
    ]
    return {
        "pitfall": script.pitfall,
        "side": script.side,
        "as_documented": script.as_documented,
        "problem": script.problem,
        "variants": variants,
    }
