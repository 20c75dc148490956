"""The fragments of the home page: what one sees, with the page that explains it, and the environments that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args
from urllib.parse import quote

from ddp_pitfalls.catalogue import Group
from ddp_pitfalls.evidence import wording
from ddp_pitfalls.evidence.entries import Entry, environments
from ddp_pitfalls.evidence.markup import join, paragraph, prose, row, table, text

Seen = list[tuple[str, Entry]]


def symptoms(entries: Sequence[Entry]) -> str:
    """The symptom index: by what one sees, each symptom with its page. The links are relative to docs/.

    Its sections are kept from the search, where they would stand before the pages themselves.
    """
    groups = {group: [(s.text, e) for e in entries for s in e.front.symptoms if s.group == group] for group in get_args(Group)}
    found = {group: seen for group, seen in groups.items() if seen}
    if not found:
        return join("No pitfall is documented yet.")
    jumps = "\n".join(f'<li><a href="#{anchor(group)}">{title(group)}</a></li>' for group in found)
    blocks = [f'<nav class="groups" aria-label="What you see" data-search-exclude><ul>\n{jumps}\n</ul></nav>']
    for group, seen in found.items():
        blocks += [f"### {title(group)} {{ #{anchor(group)} data-search-exclude }}", _listed(seen)]
    return join(*blocks)


def _listed(seen: Seen) -> str:
    """One item a page: what one sees, each time a link, and the title of the page to which they lead."""
    pages = {entry.id: entry for _, entry in seen}
    lines = []
    for id, entry in pages.items():
        links = " ".join(f"[{prose(said)}](pitfalls/{quote(id)}.md)" for said, e in seen if e is entry)
        lines.append(f'- <span class="said">{links}</span><span class="leads">{prose(entry.front.title)}</span>')
    return "\n\n".join(['<div class="symptoms" markdown="1">', "\n".join(lines), "</div>"])


def title(group: str) -> str:
    """What one sees, as a heading."""
    return group[0].upper() + group[1:]


def anchor(group: str) -> str:
    """Where the home page lists it."""
    return group.lower().replace(" ", "-")


def recorded(entries: Sequence[Entry]) -> str:
    """The recorded environments: releases, ranks, machine, and how much was verified there."""
    rows = []
    for environment in environments(entries):
        pairs = [(e, pair) for e in entries for where, pair in e.records if where == environment]
        verified = sum(wording.summary(pair, e.variants)[0][0] == wording.VERIFIED for e, pair in pairs)
        machine = text(f"Python {environment.python}, {environment.hardware}")
        cells = [wording.ranks_on(environment), machine, f"{verified} of {len(entries)}", text(max(pair.recorded for _, pair in pairs))]
        rows.append(row(wording.releases(environment), cells))
    if not rows:
        return join(paragraph("Nothing was recorded yet."))
    head = ["Environment", "Ranks", "Machine", "Pitfalls verified", "Last recorded"]
    return join(table(head, rows, "Recorded environments", stacks=True))
