"""What pages say of releases is what was recorded: every statement holds in its releases and in no others, and every difference is told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_pitfalls import catalogue
from ddp_pitfalls.catalogue import ROOT, Front, Releases, Unknown
from ddp_pitfalls.results import Environment, PairResult, Results, VariantResult, read_all

RECORDED = read_all(ROOT / "results")
PAGES = {id: pitfall.page for id, pitfall in catalogue.find().items()}

Record = tuple[Environment, list[VariantResult]]  # an environment, and what it says of a variant in repro and fix


def recorded_of(pairs: Sequence[tuple[Environment, PairResult]], variant: str) -> list[Record]:
    """What each environment says of a variant, if anything."""
    both = [(environment, [side[variant] for side in (pair.repro, pair.fix) if variant in side]) for environment, pair in pairs]
    return [(environment, results) for environment, results in both if results]


def words(result: VariantResult) -> str:
    """All that a record says in words: verdict, reason, error and what ranks were told."""
    failed = [result.failure.name, result.failure.message] if result.failure else []
    return "\n".join([result.verdict, result.why, *failed, *(told.text for told in result.told)])


def substance(results: Sequence[VariantResult]) -> list[Any]:
    """What must be the same in all releases, or told: no number, only whether it is healthy; no digits and no prefix of a log."""
    return [
        (
            [plain(text) for text in (r.verdict, r.kind, r.why)],
            [plain(text) for text in (r.failure.name, r.failure.message, r.failure.line)] if r.failure else None,
            {(told.category, plain(told.text)) for told in r.told},
            [(rank.measured.as_measurement().state() if rank.measured else "", rank.line) for rank in r.ranks],
        )
        for r in results
    ]


def plain(text: str) -> str:
    return re.sub(r"\d", "", re.sub(r"^\[.*\] ", "", text))


def faults(front: Front, prose: str, pairs: Sequence[tuple[Environment, PairResult]]) -> Iterator[str]:
    """What a page says of releases that no record shows, and what records show that it does not say."""
    for said in front.releases:
        for release in re.findall(r"\d+(?:\.\d+)+", said.where):
            if not re.search(rf"(?<![\d.]){re.escape(release)}(?!\d)", prose):
                yield f"the text does not name {release}, which {said.where!r} does"
        for variant in said.variants:
            found = recorded_of(pairs, variant)
            if len({_applies(said, environment) for environment, _ in found}) < 2:
                yield f"{variant}: no recorded environment, or every one, is {said.where!r}"
            for environment, results in found:
                if any(said.says in words(result) for result in results) != _applies(said, environment):
                    yield f"{variant}: {said.says!r} is said to stand in the records of {said.where}; {environment.name} contradicts that"
    for variant in dict.fromkeys(name for _, pair in pairs for name in (*pair.repro, *pair.fix)):
        about = [said for said in front.releases if variant in said.variants]
        for (one, first), (other, second) in combinations(recorded_of(pairs, variant), 2):
            alike = (one.tier, one.backend, one.ranks) == (other.tier, other.backend, other.ranks)
            told = any(_applies(said, one) != _applies(said, other) for said in about)
            if alike and substance(first) != substance(second) and not told:
                yield f"{variant}: {one.name} and {other.name} differ, and the page does not say so"


def _applies(said: Releases, environment: Environment) -> bool:
    return said.applies(environment.torch, environment.lightning)


def of(id: str, recorded: Sequence[Results] = RECORDED) -> tuple[Front, str, list[tuple[Environment, PairResult]]]:
    prose = PAGES[id].read_text(encoding="utf-8").split("\n---\n", 1)[1]
    return catalogue.front(PAGES[id]), prose, [(r.environment, r.pitfalls[id]) for r in recorded if id in r.pitfalls]


@pytest.mark.parametrize("id", PAGES)
def test_a_page_says_of_releases_what_was_recorded(id: str) -> None:
    assert list(faults(*of(id))) == []


# The check itself


def changed(pair: PairResult, side: str, variant: str, **fields: Any) -> PairResult:
    results = getattr(pair, side)
    return replace(pair, **{side: {**results, variant: replace(results[variant], **fields)}})


def test_a_new_record_that_differs_is_a_fault() -> None:
    front, prose, pairs = of("ddp-cpu-move")
    new = replace(pairs[0][0], torch="99.0"), changed(pairs[0][1], "repro", "on_cpu", verdict="not reproduced")
    assert len(list(faults(front, prose, [*pairs, new]))) == len(pairs)
    told = replace(front, releases=[Releases(["on_cpu"], "torch >= 99.0", "not reproduced")])
    assert list(faults(told, f"{prose}\nFixed in torch 99.0.", [*pairs, new])) == []
    assert list(faults(told, prose, [*pairs, new])) == ["the text does not name 99.0, which 'torch >= 99.0' does"]


def test_numbers_line_numbers_and_other_hardware_are_no_difference() -> None:
    front, prose, pairs = of("ddp-cpu-move")
    other = replace(pairs[0][0], tier="cuda"), changed(pairs[0][1], "repro", "on_cpu", verdict="not reproduced")
    assert list(faults(front, prose, [*pairs, other])) == []
    front, prose, pairs = of("unused-parameter-late-error")
    assert len({words(pair.fix["later_step"]) for _, pair in pairs}) > 1
    assert list(faults(front, prose, pairs)) == []


@pytest.mark.parametrize(
    "where, says, fault",
    [
        ("lightning < 2.2", "needs lightning>=2.1", "contradicts"),  # too many releases
        ("lightning < 2.0.2 or lightning > 2.6", "needs lightning>=2.1", "contradicts"),  # others
        ("lightning < 2.1", "needs lightning>=2.3", "contradicts"),  # other words
        ("lightning < 2.0", "needs lightning>=2.1", "no recorded environment"),
        ("lightning >= 2.0", "needs lightning>=2.1", "or every one"),
    ],
)
def test_a_statement_that_no_record_shows_is_a_fault(where: str, says: str, fault: str) -> None:
    front, prose, pairs = of("rank-zero-save")
    wrong = replace(front, releases=[Releases(["with_fabric"], where, says)])
    assert any(fault in found for found in faults(wrong, prose, pairs))


@pytest.mark.parametrize(
    "entry, says",
    [
        ("variants: [a], where: python < 3, says: b", "'python < 3' names no releases: write for example"),
        ("variants: [a], where: torch, says: b", "'torch' names no releases"),
        ("variants: [a], where: torch < two, says: b", "'torch < two' names no releases"),
        ("variants: [a], where: torch < 2 or, says: b", "'torch < 2 or' names no releases"),
        ("variants: [], where: torch < 2, says: b", r"length >= 1 - at `\$.releases\[0\].variants`"),
        ("variants: [a], where: torch < 2", r"missing required field `says` - at `\$.releases\[0\]`"),
    ],
)
def test_a_statement_that_cannot_be_read_is_one_clear_line(tmp_path: Path, entry: str, says: str) -> None:
    page = tmp_path / "some.md"
    symptoms = "symptoms: [{group: slow, text: x}]"
    page.write_text(f"---\ntitle: x\ntags: [x]\n{symptoms}\nsources: []\nreleases: [{{{entry}}}]\n---\n", encoding="utf-8")
    with pytest.raises(Unknown, match=says) as error:
        catalogue.front(page)
    assert "\n" not in str(error.value)
