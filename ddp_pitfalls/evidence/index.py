"""The fragment of the home page: what one sees, and the page that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args
from urllib.parse import quote

from ddp_pitfalls.catalogue import Group
from ddp_pitfalls.evidence.entries import Entry
from ddp_pitfalls.evidence.markup import join, prose

SYMPTOMS = "symptoms.md"


def symptoms(entries: Sequence[Entry]) -> str:
    """The symptom index: by what one sees, each symptom with its page. The links are relative to docs/."""
    blocks = []
    for group in get_args(Group):
        seen = [(s.text, e) for e in entries for s in e.front.symptoms if s.group == group]
        if seen:
            links = [f"- [{prose(said)}](pitfalls/{quote(e.id)}.md)" for said, e in seen]
            blocks += [f"### {group[0].upper()}{group[1:]}", "\n".join(links)]
    return join(*blocks) if blocks else join("No pitfall is documented yet.")
