"""Run the catalogue under ``checks.Watch`` and keep what it found: the table of checks by pitfalls is made of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddp_pitfalls.catalogue import chosen, find
from ddp_pitfalls.measure import AS_EXPECTED, FOUND, NOT_AS_EXPECTED, NOT_MEASURED, NOTHING_MEASURED, Ended
from ddp_pitfalls.record import scripts_of
from ddp_pitfalls.results import BadResults, Environment, write_file
from ddp_pitfalls.runner import Asked, ScriptRun, run

FOLDER = Path("results") / "checks"
FORMAT = 1
AGAIN = "nox -s watch"
Findings = dict[str, dict[str, list[str]]]  # of a pitfall: side, variant, the kinds of what was found


class Watched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``checks.Watch`` found in one environment, by pitfall. Only what fails silently is run, and what is fixed."""

    format: int
    environment: Environment
    pitfalls: dict[str, Findings]


def watch(root: Path, ids: Sequence[str], asked: Asked, jobs: int) -> int:
    """Run the silent repros and the fixes of the pitfalls called ``ids``, or all, and write the file of this environment.

    Returns 1, and writes nothing, where a script cannot be run to its end; 77 where there is none.
    """
    runs = run_watched(scripts_of(chosen(find(root), ids)), asked, jobs)
    if problems := failures(runs):
        print("\n".join(problems))
        return NOT_AS_EXPECTED
    here = next((script.environment for script in runs if script.environment is not None), None)
    if here is None:
        return NOTHING_MEASURED
    path = root / FOLDER / f"{here.name}.json"
    old = read(path) if path.exists() else Watched(FORMAT, here, {})
    pitfalls = dict(sorted({**old.pitfalls, **findings(runs)}.items()))
    new = Watched(FORMAT, old.environment if pitfalls == old.pitfalls else here, pitfalls)
    changed = write_file(path, msgspec.json.format(msgspec.json.encode(new), indent=1) + b"\n")
    print(f"{path.relative_to(root)}: {'written' if changed else 'unchanged'}")
    return AS_EXPECTED


def run_watched(scripts: Sequence[tuple[str, Path]], asked: Asked, jobs: int) -> list[ScriptRun]:
    """Run scripts with a ``Watch`` on every model."""
    return list(run(scripts, dataclasses.replace(asked, watched=True), jobs))


def failures(runs: Sequence[ScriptRun]) -> list[str]:
    """Scripts that could not be run, and variants that did not come to their end under the watch."""
    broken = [f"{script.name}: {script.problem}" for script in runs if script.problem]
    ends = [(script, o.variant, end) for script in runs for o in script.outcomes for end in o.verdict.ranks]
    return broken + [f"{s.name}, {variant}: {end.sentence()}" for s, variant, end in ends if end.how != "measured"]


def findings(runs: Sequence[ScriptRun]) -> dict[str, Findings]:
    """The kinds of what was found on any rank, by pitfall, side and variant; a variant that was not measured is left out."""
    kept: dict[str, Findings] = {}
    for script in sorted(runs, key=lambda script: (script.pitfall, script.side)):
        variants = {o.variant: _found(o.verdict.ranks) for o in script.outcomes if o.verdict.word != NOT_MEASURED}
        kept.setdefault(script.pitfall, {})[script.side] = variants
    return kept


def _found(ranks: Sequence[Ended]) -> list[str]:
    notices = [notice for end in ranks for notice in end.notices]
    return sorted({notice.text.partition(":")[0] for notice in notices if notice.category == FOUND})


def read(path: Path) -> Watched:
    """A file of findings. Raises BadResults."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Watched)
    except (OSError, msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise BadResults(f"{path}: is damaged ({error}): restore it with git, or run {AGAIN}") from error
    if kept.format != FORMAT or path.stem != kept.environment.name:
        raise BadResults(f"{path}: is of format {kept.format} and of {kept.environment.name}: run {AGAIN}")
    return kept


def read_all(root: Path) -> list[Watched]:
    """What was found in every environment, by name."""
    return [read(path) for path in sorted((root / FOLDER).glob("*.json"))]
