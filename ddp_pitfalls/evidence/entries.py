"""Everything that the generated parts of one page are made of, gathered and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packaging.version import Version

from ddp_pitfalls.catalogue import Front, Pitfall, Unknown, find, front
from ddp_pitfalls.evidence.source import Declared, variants
from ddp_pitfalls.measure import NOT_MEASURED
from ddp_pitfalls.results import Environment, PairResult, Results, read_all

FOLDER = Path("build") / "evidence"
TOP, EVIDENCE, END = "top.md", "evidence.md", "end.md"
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")

Record = tuple[Environment, PairResult]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Entry:
    """A pitfall: its page and scripts as text, the front matter of the page, and what each environment recorded, the preferred one first.

    ``variants`` are those of the repro, then those of the fix alone, whose users some layer protects.
    """

    id: str
    front: Front
    page: str
    repro_name: str
    fix_name: str
    repro: str
    fix: str
    variants: tuple[Declared, ...]
    records: tuple[Record, ...]

    def record_of(self, variant: Declared) -> Record | None:
        """The preferred environment that measured a variant."""
        for environment, pair in self.records:
            result = (pair.fix if variant.protects else pair.repro).get(variant.name)
            if result is not None and result.verdict != NOT_MEASURED:
                return environment, pair
        return None


def on_gpu(environment: Environment) -> bool:
    return environment.tier != "cpu"


def preferred_first(records: Sequence[tuple[Environment, Kept]]) -> list[tuple[Environment, Kept]]:
    """GPU before CPU, then newest torch, newest Lightning, two ranks before more."""

    def key(record: tuple[Environment, Kept]) -> tuple[bool, int, int, str]:
        environment = record[0]
        return (not on_gpu(environment), newest.index(_releases(environment)), environment.ranks, environment.name)

    newest = sorted({_releases(environment) for environment, _ in records}, reverse=True)
    return sorted(records, key=key)


def environments(entries: Iterable[Entry]) -> list[Environment]:
    """Every environment in which one of these pitfalls was recorded, the preferred one first."""
    found = {environment.name: (environment, pair) for entry in entries for environment, pair in entry.records}
    return [environment for environment, _ in preferred_first(list(found.values()))]


def _releases(environment: Environment) -> tuple[Version, Version]:
    return Version(environment.torch), Version(environment.lightning)


def entries(root: Path) -> tuple[list[Entry], list[str]]:
    """Every pitfall that has a page, and the ids of those that have none yet. Raises Unknown or BadResults."""
    recorded = read_all(root / "results")
    found, pageless = [], []
    for id, pitfall in find(root).items():
        if pitfall.page.is_file():
            found.append(entry(root, pitfall, recorded))
        else:
            pageless.append(id)
    return found, pageless


def entry(root: Path, pitfall: Pitfall, recorded: Sequence[Results]) -> Entry:
    """One pitfall. Raises Unknown where its page is not as a page must be, or a script is missing."""
    page = pitfall.page.relative_to(root)
    for path in pitfall.missing():
        raise Unknown(f"{page}: there is no {path.relative_to(root)}, and a page is built from both scripts")
    head, prose = front(pitfall.page), pitfall.page.read_text(encoding="utf-8")
    check_page(prose, pitfall.id, head.title, page)
    repro, fix = pitfall.repro.read_text(encoding="utf-8"), pitfall.fix.read_text(encoding="utf-8")
    repro_name, fix_name = pitfall.repro.relative_to(root).as_posix(), pitfall.fix.relative_to(root).as_posix()
    protected = [v for v in variants(fix, Path(fix_name)) if v.protects]
    declared = (*variants(repro, Path(repro_name)), *protected)
    records = preferred_first([(r.environment, r.pitfalls[pitfall.id]) for r in recorded if pitfall.id in r.pitfalls])
    return Entry(pitfall.id, head, prose, repro_name, fix_name, repro, fix, declared, tuple(records))


def skeleton(id: str, title: str) -> list[str]:
    """The headings and includes that a page must have, in this order."""
    top, evidence, end = (f'--8<-- "{(FOLDER / id / name).as_posix()}"' for name in (TOP, EVIDENCE, END))
    why, check, fine = "## Why it happens", "## Check your own run", "## When it is fine"
    return [f"# {title}", top, "## What you see", why, evidence, check, fine, end]


def check_page(page: str, id: str, title: str, path: Path) -> None:
    """Raise Unknown unless a page has exactly its fixed sections and includes, in order, and prose in each section."""
    body = page.removeprefix("---\n").partition("\n---\n")[2]
    first = page.count("\n", 0, len(page) - len(body)) + 1
    found = [(number, line) for number, line in enumerate(body.splitlines(), first)]
    marks = [(number, line.rstrip()) for number, line in _outside_fences(found) if re.match(r"##? |-+8<-", line)]
    wanted = skeleton(id, title)
    for expected, (number, line) in zip(wanted, marks):
        if line != expected:
            raise Unknown(f"{path}, line {number}: here stands {line!r}, and a page has {expected!r} at this place")
    if len(marks) < len(wanted):
        raise Unknown(f"{path}: ends without {wanted[len(marks)]!r}")
    if len(marks) > len(wanted):
        number, line = marks[len(wanted)]
        raise Unknown(f"{path}, line {number}: {line!r} is one section more than a page has")
    _check_prose(found, marks, path)


def _outside_fences(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in lines:
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def _check_prose(lines: Sequence[tuple[int, str]], marks: Sequence[tuple[int, str]], path: Path) -> None:
    ends = [number for number, _ in marks[1:]] + [lines[-1][0] + 1]
    for (number, mark), end in zip(marks, ends):
        if mark.startswith("## ") and not any(line.strip() for n, line in lines if number < n < end):
            raise Unknown(f"{path}, line {number}: nothing stands under {mark!r}")
