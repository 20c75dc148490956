"""The fragment on which checks find which pitfall: what ``checks.Watch`` found in the scripts, and the functions that a page uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from ddp_pitfalls.evidence.entries import Entry, preferred_first
from ddp_pitfalls.evidence.functions import names, public
from ddp_pitfalls.evidence.markup import code, join, paragraph, prose, row, table, text
from ddp_pitfalls.findings import Findings, Watched
from ddp_pitfalls.measure import FIX, REPRO
from ddp_pitfalls.results import Environment

KINDS = {  # those of checks.FINDINGS, which needs torch, in words
    "hooks": "hooks lost",
    "around": "forward around DDP",
    "gradients": "gradients differ",
    "parameters": "parameters differ",
    "buffers": "buffers differ",
    "idle": "no gradient",
    "samples": "same batch",
    "random": "same random numbers",
    "steps": "other steps",
    "model": "other model",
}


def found_by_watch(checks: str, entries: Sequence[Entry], records: Sequence[Watched]) -> str:
    """Pitfalls by kinds of findings, with the number of silent variants in which each was found; then where else it was found the same."""
    if not records:
        return join(paragraph("Nothing was recorded yet."))
    first, *others = (record for _, record in preferred_first([(record.environment, record) for record in records]))
    shown = [entry for entry in entries if first.pitfalls.get(entry.id, {}).get(REPRO)]
    functions = [node.name for node in public(checks)]
    rows = [_row(entry, first.pitfalls[entry.id], functions) for entry in shown]
    head = ["Pitfall", "Watch finds, in how many silent variants", "Found in the fix", "Function that looks once"]
    same = [other for other in others if _same(first, other)]
    says = f"Recorded with {_where(first.environment)}."
    if same:
        says += f" The same was found with {'; '.join(_where(other.environment) for other in same)}."
    if differ := [other for other in others if other not in same]:
        says += f" Something else was found with {'; '.join(_where(other.environment) for other in differ)}."
    return join(table(head, rows, "Checks by pitfalls", stacks=True), paragraph(says))


def _same(first: Watched, other: Watched) -> bool:
    """Whether two environments found the same in every variant that both measured."""
    one, two = (
        {(id, side, name): found for id, sides in record.pitfalls.items() for side, names in sides.items() for name, found in names.items()}
        for record in (first, other)
    )
    return all(one[key] == two[key] for key in one.keys() & two.keys())


def found_on_page(entry: Entry, records: Sequence[Watched]) -> str:
    """Whether a Watch that is left on finds the pitfall of a page: a sentence, where it has a silent variant that was run under one."""
    preferred = preferred_first([(record.environment, record) for record in records])
    repro = next((record.pitfalls[entry.id].get(REPRO, {}) for _, record in preferred if entry.id in record.pitfalls), {})
    if not repro:
        return ""
    seen = [f"{text(KINDS[kind])} ({n} of {len(repro)} silent variants)" for kind, n in _counted(repro) if n]
    told = f"finds {'; '.join(seen)}" if seen else "finds nothing here"
    return paragraph(f'<a href="../../checks/#leave-it-on"><code>Watch</code></a>, left on, {told}.')


def _counted(variants: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """The kinds of findings, each with the number of variants that have it."""
    return [(kind, sum(kind in found for found in variants.values())) for kind in KINDS]


def _row(entry: Entry, sides: Findings, functions: Sequence[str]) -> str:
    repro, fix = sides[REPRO], sides.get(FIX, {})
    seen = [f"{text(KINDS[kind])}: {n} of {len(repro)}" for kind, n in _counted(repro) if n]
    alarms = [f"{text(KINDS[kind])}: {code(name)}" for name, found in fix.items() for kind in found]
    used = [f'<a href="#{name}">{code(name)}</a>' for name in functions if names(entry, name)]
    link = f'<a href="../pitfalls/{quote(entry.id)}/">{prose(entry.front.title)}</a>'
    return row(link, ["<br>".join(seen) or "nothing", "<br>".join(alarms) or "nothing", "<br>".join(used) or "see the page"])


def _where(environment: Environment) -> str:
    return text(f"torch {environment.torch}, lightning {environment.lightning}, {environment.tier}, {environment.ranks} ranks")
