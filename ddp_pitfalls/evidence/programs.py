"""The catalogue for programs: catalogue.json, and llms.txt for language models. Both stand at the root of the site."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ddp_pitfalls.evidence import wording
from ddp_pitfalls.evidence.entries import Entry, environments
from ddp_pitfalls.evidence.source import Declared
from ddp_pitfalls.results import Environment, PairResult

CATALOGUE, LLMS = "catalogue.json", "llms.txt"
FORMAT = 1


def published(entries: Sequence[Entry]) -> dict[str, str]:
    """Both files by their names."""
    return {CATALOGUE: catalogue(entries), LLMS: llms(entries)}


def catalogue(entries: Sequence[Entry]) -> str:
    """Every pitfall as JSON; pages are relative to this file. ``outcomes`` are by the name of an environment, then by variant."""
    known = {e.name: msgspec.to_builtins(e) for e in environments(entries)}
    told = {"format": FORMAT, "environments": known, "pitfalls": [_pitfall(e) for e in entries]}
    return msgspec.json.format(msgspec.json.encode(told), indent=1).decode() + "\n"


def _pitfall(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "title": entry.front.title,
        "page": address(entry),
        "repro": entry.repro_name,
        "fix": entry.fix_name,
        "apis": entry.front.tags,
        "symptoms": [msgspec.to_builtins(s) for s in entry.front.symptoms],
        "variants": {v.name: {"shows": v.kind, "needs": v.needs} for v in entry.variants if not v.protects},
        "who_notices": {name: plain(sentence) for sentence, names in wording.who_notices(entry).items() for name in names},
        "outcomes": {environment.name: _outcome(entry.variants, pair) for environment, pair in entry.records},
        "sources": [msgspec.to_builtins(s) for s in entry.front.sources],
    }


def _outcome(variants: Sequence[Declared], pair: PairResult) -> dict[str, Any]:
    said = {v.name: wording.standing(pair, v) for v in variants}
    return {"recorded": pair.recorded, "variants": {name: {"outcome": word, "why": why} for name, (word, why) in said.items()}}


def address(entry: Entry) -> str:
    """The page, relative to the root of the site."""
    return f"pitfalls/{entry.id}/"


def plain(markup: str) -> str:
    """Markup of a fragment as text."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def llms(entries: Sequence[Entry]) -> str:
    """The pages with their symptoms, in the format of llms.txt."""
    return "\n".join(_llms(entries)) + "\n"


def _llms(entries: Sequence[Entry]) -> Iterator[str]:
    yield "# Pitfalls of multi-process PyTorch training"
    yield ""
    yield "> Ways in which training with DistributedDataParallel, Lightning Fabric or the Lightning Trainer goes wrong."
    yield "> Each page has a script that shows the failure, a script that shows the fix, and what both measured."
    yield ""
    places = "; ".join(map(_place, environments(entries)))
    yield f"The same data as JSON: [{CATALOGUE}]({CATALOGUE}). Recorded in: {places or 'nothing yet'}."
    yield ""
    yield "## Pitfalls"
    yield ""
    for entry in entries:
        yield f"- [{_line(entry.front.title)}]({address(entry)}): {wording.kind_words(entry)}"
        yield from (f"    - {_line(s.text)}" for s in entry.front.symptoms)


def _place(environment: Environment) -> str:
    return f"torch {environment.torch}, lightning {environment.lightning}, {environment.ranks} ranks, {environment.tier}"


def _line(text: str) -> str:
    return " ".join(text.split())
