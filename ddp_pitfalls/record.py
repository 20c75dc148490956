"""Run pairs and keep what they measured."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from ddp_pitfalls import results
from ddp_pitfalls.catalogue import Pitfall, chosen, find
from ddp_pitfalls.measure import FIX, REPRO
from ddp_pitfalls.results import PairResult, Results
from ddp_pitfalls.runner import Asked, ScriptRun, run


def record(root: Path, ids: Sequence[str], asked: Asked, jobs: int) -> int:
    """Run the pitfalls called ``ids``, or all, and write the file of this environment. Returns the exit code of the command.

    Raises BadResults before anything runs where a file is damaged, so that nothing recorded is lost.
    """
    results.read_all(root / "results")
    pitfalls = chosen(find(root), ids)
    runs = list(run(scripts_of(pitfalls), asked, jobs))
    wrong = [script for script in runs if not script.as_documented]
    for script in wrong:
        print(
            f"{script.pitfall}, {script.side}: {script.problem or 'not as documented'}: not recorded, see nox -s verify -- {script.pitfall}"
        )
    bad = {script.pitfall for script in wrong}
    good = [script for script in runs if script.pitfall not in bad]
    if good:
        print(_written(root, good))
    return 1 if wrong else 0


def scripts_of(pitfalls: Sequence[Pitfall]) -> list[tuple[str, Path]]:
    """Both scripts of every pitfall, as the runner takes them."""
    return [(one.id, path) for one in pitfalls for path in (one.repro, one.fix)]


def _written(root: Path, runs: Sequence[ScriptRun]) -> str:
    here = next(script.environment for script in runs if script.environment is not None)
    path = root / "results" / f"{here.name}.json"
    old = results.read(path) if path.exists() else None
    new = Results(results.FORMAT, here, pairs(runs))
    changed = results.write(root / "results", results.merged(old, new))
    return f"{path.relative_to(root)}: {'written' if changed else 'unchanged'}"


def pairs(runs: Sequence[ScriptRun]) -> dict[str, PairResult]:
    """What a results file keeps of these runs, by pitfall. The kind of a variant is the one that its repro declares."""
    today = datetime.date.today().isoformat()
    sides = {(script.pitfall, script.side): {o.variant: o.kept for o in script.outcomes} for script in runs}
    kept = {}
    for id in sorted({script.pitfall for script in runs}):
        repro, fix = sides.get((id, REPRO), {}), sides.get((id, FIX), {})
        kinds = {name: result.kind for name, result in repro.items()}
        fix = {name: results.of_kind(result, kinds.get(name, result.kind)) for name, result in fix.items()}
        kept[id] = PairResult(today, repro, fix)
    return kept
