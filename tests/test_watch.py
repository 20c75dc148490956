"""``checks.Watch``: no false alarm in clean training, no miss of what it claims to find, and what it is blind to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from support import SCRIPTS, judged

from ddp_pitfalls import hardware
from ddp_pitfalls.catalogue import ROOT, find
from ddp_pitfalls.checks import FINDINGS
from ddp_pitfalls.findings import FOLDER, Findings, failures, findings, read_all, run_watched
from ddp_pitfalls.measure import FIX, FIXED, REPRO, REPRODUCED
from ddp_pitfalls.record import scripts_of
from ddp_pitfalls.runner import JOBS, Asked, Outcome, run
from ddp_pitfalls.script import load

CLEAN, FAULTS = (SCRIPTS / FIX / f"watch_{name}.py" for name in ("clean", "faults"))


def names(script: Path) -> list[str]:
    return list(load(script).variants)


def outcomes(script: Path, ranks: int) -> dict[str, Outcome]:
    [done] = run([(script.stem, script)], Asked(ranks=ranks, accelerator="cpu"), jobs=1)
    assert not done.problem, done.problem
    return {one.variant: one for one in done.outcomes}


Ran = dict[tuple[str, int], dict[str, Outcome]]
STEPS = 200  # of every clean training; a tenth where a test is to be quick
RANKS = [2, pytest.param(4, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def ran(workplace: None) -> Ran:
    """The outcomes by script, or number of steps, and number of ranks, each found when it is first asked for."""
    return {}


def clean(ran: Ran, tmp_path: Path, ranks: int, steps: int) -> dict[str, Outcome]:
    """The outcomes of clean training with so many steps."""
    if (f"{steps} steps", ranks) not in ran:
        text = CLEAN.read_text(encoding="utf-8")
        assert f"STEPS, EVERY = {STEPS}, " in text
        script = tmp_path / FIX / CLEAN.name
        script.parent.mkdir()
        script.write_text(text.replace(f"STEPS, EVERY = {STEPS}, ", f"STEPS, EVERY = {steps}, "), encoding="utf-8")
        ran[f"{steps} steps", ranks] = outcomes(script, ranks)
    return ran[f"{steps} steps", ranks]


@pytest.mark.parametrize("name", names(CLEAN))
def test_no_false_alarm(name: str, ran: Ran, tmp_path: Path) -> None:
    """Clean training, each with another feature of DDP."""
    found = clean(ran, tmp_path, 2, STEPS // 10)[name]
    assert found.verdict.word == FIXED, found.report


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", names(CLEAN))
def test_no_false_alarm_in_two_hundred_steps(name: str, ranks: int, ran: Ran, tmp_path: Path) -> None:
    found = clean(ran, tmp_path, ranks, STEPS)[name]
    assert found.verdict.word == FIXED, found.report


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", names(FAULTS))
def test_what_is_found_and_what_is_not(name: str, ranks: int, ran: Ran) -> None:
    if (FAULTS.name, ranks) not in ran:
        ran[FAULTS.name, ranks] = outcomes(FAULTS, ranks)
    found = ran[FAULTS.name, ranks][name]
    assert found.verdict.word == FIXED, found.report


@pytest.mark.parametrize("name", ["one_batch_less_on_rank_0", "one_step_less_on_rank_0"])
def test_ranks_that_do_not_meet(name: str) -> None:
    verdict = judged("watch_hang", name)
    assert verdict.word == REPRODUCED, verdict.why


def test_findings_point_to_pitfalls() -> None:
    assert {id for ids in FINDINGS.values() for id in ids} <= set(find())


# On the catalogue

READS_ONLY = "reads samples and trains nothing"
FORWARD_ONLY = "ends after a forward"
BLIND = {  # silent variants of a pitfall to which a finding points, that it does not find, and why
    ("all-gather-no-grad", "first_step"): "some gradient reaches every parameter",
    ("all-gather-no-grad", "by_the_loss"): "some gradient reaches every parameter",
    ("identical-seed-per-rank", "with_ddp"): FORWARD_ONLY,
    ("identical-seed-per-rank", "with_fabric"): FORWARD_ONLY,
    ("identical-seed-per-rank", "augmentation"): READS_ONLY,
    ("identical-seed-per-rank", "workers"): READS_ONLY,
    ("iterable-dataset-duplicated", "with_ddp"): READS_ONLY,
    ("iterable-dataset-duplicated", "with_workers"): READS_ONLY,
    ("iterable-dataset-duplicated", "shared_by_worker"): READS_ONLY,
    ("iterable-dataset-duplicated", "with_fabric"): READS_ONLY,
    ("no-distributed-sampler", "with_ddp"): READS_ONLY,
    ("no-distributed-sampler", "shuffled"): READS_ONLY,
    ("no-distributed-sampler", "with_fabric"): READS_ONLY,
    ("unfreeze-after-wrap", "unhooked"): "ends before a backward",
}
MEANT = {  # fixes in which something is found that is no mistake there, and why
    ("eval-padding-duplicates", "uneven_mean"): "it trains on the same batches on all ranks, and looks at the validation only",
    ("identical-seed-per-rank", "workers_of_trainer"): "its dropout does draw alike; it looks at the workers only",
    ("unused-parameter-late-error", "with_fabric"): "a layer is idle in all steps, which find_unused_parameters allows",
    ("unused-parameter-late-error", "with_trainer"): "a layer is idle in all steps, which find_unused_parameters allows",
}


@dataclass(frozen=True)
class Found:
    """What a watch found, by pitfall, on so many ranks."""

    ranks: int
    pitfalls: dict[str, Findings]


@pytest.fixture(scope="module", params=RANKS)
def on_the_catalogue(request: pytest.FixtureRequest, workplace: None) -> Found:
    """What a watch finds in the fixes and the silent repros, by pitfall."""
    runs = run_watched(scripts_of(list(find().values())), Asked(ranks=request.param, accelerator="cpu"), JOBS)
    assert failures(runs) == []
    return Found(request.param, findings(runs))


def of_side(found: dict[str, Findings], side: str) -> dict[tuple[str, str], list[str]]:
    return {(id, name): kinds for id, sides in found.items() for name, kinds in sides.get(side, {}).items()}


def pointing(id: str) -> set[str]:
    return {kind for kind, ids in FINDINGS.items() if id in ids}


def test_no_false_alarm_in_a_fix(on_the_catalogue: Found) -> None:
    flagged = {key: kinds for key, kinds in of_side(on_the_catalogue.pitfalls, FIX).items() if kinds}
    assert set(flagged) == set(MEANT), flagged


def test_no_miss_in_a_silent_repro(on_the_catalogue: Found) -> None:
    """A pitfall to which a kind of finding points is found by such a kind, in every variant but for those with a reason."""
    claimed = {key: kinds for key, kinds in of_side(on_the_catalogue.pitfalls, REPRO).items() if pointing(key[0])}
    missed = {key for key, kinds in claimed.items() if not pointing(key[0]) & set(kinds)}
    assert missed == set(BLIND)


def test_every_pitfall_that_is_found_is_named(on_the_catalogue: Found) -> None:
    unnamed = {
        (id, kind)
        for (id, name), kinds in of_side(on_the_catalogue.pitfalls, REPRO).items()
        for kind in kinds
        if not pointing(id) and (id, name) not in MEANT
    }
    assert unnamed == set()


def test_the_record_is_still_true(on_the_catalogue: Found) -> None:
    here = hardware.versions()
    [kept] = [
        one
        for one in read_all(ROOT)
        if (one.environment.torch, one.environment.lightning) == (here["torch"], here["lightning"])
        and (one.environment.tier, one.environment.ranks) == ("cpu", on_the_catalogue.ranks)
    ]
    assert kept.pitfalls == on_the_catalogue.pitfalls, f"{FOLDER}/{kept.environment.name}.json is out of date: run nox -s watch"
