"""Run pairs and keep what they measured."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from ddp_pitfalls import results
from ddp_pitfalls.catalogue import Pitfall, chosen, find
from ddp_pitfalls.measure import FIX, REPRO
from ddp_pitfalls.results import PairResult, Results
from ddp_pitfalls.runner import Asked, ScriptRun, run


def record(root: Path, ids: Sequence[str], asked: Asked, jobs: int, *, replace: bool, spawn: bool) -> int:
    """Run the pitfalls called ``ids``, or all, and write the file of this environment. Returns the exit code of the command.

    A pitfall that is not as documented is recorded as such where it is new; where the file says otherwise, the file is kept unless
    ``replace`` is given, since a busy machine is no reason to lose what was measured. With ``spawn`` everything runs once more in
    ranks that are started one by one, and the verdicts must agree. Raises BadResults before anything runs.
    """
    results.read_all(root / "results")
    scripts = scripts_of(chosen(find(root), ids))
    runs = list(run(scripts, asked, jobs))
    measured = pairs(runs)
    problems = {script.pitfall: f"{script.name}: {script.problem}" for script in runs if script.problem}
    if spawn:
        spawned = pairs(list(run(scripts, dataclasses.replace(asked, method="spawn"), jobs)))
        problems |= {id: f"{', '.join(other)} ended in another way under spawn" for id, other in _differ(measured, spawned).items()}
    here = next((script.environment for script in runs if script.environment is not None), None)
    path = root / "results" / f"{here.name}.json" if here else None
    old = results.read(path) if path and path.exists() else None
    if old and not replace:
        problems |= _lost(old, measured)
    for id, problem in problems.items():
        print(f"{id}: not recorded: {problem}")
    new = {id: pair for id, pair in measured.items() if id not in problems}
    for id in sorted({script.pitfall for script in runs if not script.as_documented} & set(new)):
        print(f"{id}: recorded, though not as documented: see nox -s verify -- {id}")
    if here and path and new:
        changed = results.write(path.parent, results.merged(old, Results(results.FORMAT, here, new)))
        print(f"{path.relative_to(root)}: {'written' if changed else 'unchanged'}")
    return 1 if problems else 0


def _lost(old: Results, measured: dict[str, PairResult]) -> dict[str, str]:
    found = {id: results.lost(old.pitfalls[id], pair) for id, pair in measured.items() if id in old.pitfalls}
    hint = "no longer as recorded; see nox -s verify -- {}, and record with --replace to accept it"
    return {id: f"{', '.join(lost)} {hint.format(id)}" for id, lost in found.items() if lost}


def _differ(forked: dict[str, PairResult], spawned: dict[str, PairResult]) -> dict[str, list[str]]:
    """The variants that did not end alike, by pitfall."""
    found = {id: sorted(_words(pair) ^ _words(spawned[id])) for id, pair in forked.items()}
    return {id: list(dict.fromkeys(name for name, _ in other)) for id, other in found.items() if other}


def _words(pair: PairResult) -> set[tuple[str, str]]:
    sides = ((REPRO, pair.repro), (FIX, pair.fix))
    return {(f"{side}/{name}", result.verdict) for side, variants in sides for name, result in variants.items()}


def scripts_of(pitfalls: Sequence[Pitfall]) -> list[tuple[str, Path]]:
    """Both scripts of every pitfall, as the runner takes them."""
    return [(one.id, path) for one in pitfalls for path in (one.repro, one.fix)]


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
