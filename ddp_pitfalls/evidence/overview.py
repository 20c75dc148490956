"""The tables over all pitfalls: the list, the versions, and where ranks stand in a hang. Links in them are relative to a page of docs/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from ddp_pitfalls.evidence import wording
from ddp_pitfalls.evidence.entries import Entry, environments, on_gpu
from ddp_pitfalls.evidence.markup import codes, join, paragraph, prose, row, table, text
from ddp_pitfalls.results import Environment, PairResult, VariantResult

LISTED = 2  # more environments than these, in which something was not measured, are counted
MARKS = {wording.VERIFIED: "ok", wording.NOT_MEASURED: "none"}  # classes of a state; any other is "bad"


def pitfalls(entries: Sequence[Entry]) -> str:
    """Every pitfall: how it shows, the APIs, who notices, and where it was verified."""
    if not entries:
        return join(paragraph("No pitfall is documented yet."))
    rows = [
        row(_link(e), [wording.kind_words(e), text(", ".join(e.front.tags)), wording.who(e), "<br>".join(_verified(e))]) for e in entries
    ]
    return join(table(["Pitfall", "How it shows", "APIs", "Who notices", "Verified"], rows, "All pitfalls", stacks=True))


def _link(entry: Entry, anchor: str = "") -> str:
    return f'<a href="../pitfalls/{quote(entry.id)}/{anchor}">{prose(entry.front.title)}</a>'


def _verified(entry: Entry) -> Iterator[str]:
    """On the CPU and on a GPU: in how many environments, and when last."""
    for place, gpu in (("CPU", False), ("GPU", True)):
        there = [pair for environment, pair in entry.records if on_gpu(environment) is gpu]
        held = [pair for pair in there if wording.summary(pair, entry.variants)[0][0] == wording.VERIFIED]
        if held:
            places = f"{len(held)} environment{'s' if len(held) > 1 else ''}"
            yield f"{place}: {places}, <span>{text(max(pair.recorded for pair in held))}</span>"
        else:
            yield f"{place}: {wording.NOT_MEASURED if wording.only_unmeasured(there, entry.variants) else 'not verified'}"


def versions(entries: Sequence[Entry]) -> str:
    """Pitfalls by environments, each cell a word with its date; then why something was not measured or is not as documented."""
    places = environments(entries)
    if not places:
        return join(paragraph("Nothing was recorded yet."))
    rows = [row(_link(e, "#versions"), [_cell(e, place) for place in places]) for e in entries]
    head = ["Pitfall", *(wording.column(place) for place in places)]
    blocks = [table(head, rows, "Pitfalls by environments", cls="matrix")]
    if not any(on_gpu(place) for place in places):
        blocks.append(paragraph("No run on a GPU was recorded yet."))
    reasons = [row(f"<span>{text(word.removesuffix(' there'))}</span>", cells) for word, *cells in _reasons(entries, places)]
    if reasons:
        blocks += ["## Reasons", table(["Outcome", "Reason", "Pitfall and variants", "Where"], reasons, "Reasons", stacks=True)]
    return join(*blocks)


def _cell(entry: Entry, place: Environment) -> str:
    pair = next((pair for environment, pair in entry.records if environment == place), None)
    if pair is None:
        return state(wording.NOT_MEASURED)
    counts = wording.summary(pair, entry.variants)
    total = len(entry.variants)
    words = [state(word, f"{n} of {total}" if n < total else "") for word, n in counts]
    return "".join(words) + (f"<small>{text(pair.recorded)}</small>" if counts[0][0] != wording.NOT_MEASURED else "")


def state(word: str, count: str = "") -> str:
    """An outcome as a word with a mark."""
    return f'<span class="state {MARKS.get(word, "bad")}">{text(word)}{f" <small>{text(count)}</small>" if count else ""}</span>'


def _reasons(entries: Sequence[Entry], places: Sequence[Environment]) -> list[tuple[str, str, str, str]]:
    """Outcome, reason, pitfalls with their variants, environments; what is the same in several environments or pitfalls is told once."""
    where: dict[tuple[str, str, str, tuple[str, ...]], list[Environment]] = {}
    links = {entry.id: _link(entry) for entry in entries}
    for entry in entries:
        for environment, pair in entry.records:
            said = wording.grouped((v.name, wording.standing(pair, v)) for v in entry.variants)
            for (word, why), names in said.items():
                if why and word not in (wording.VERIFIED, wording.PROTECTED):
                    where.setdefault((word, why, entry.id, tuple(names)), []).append(environment)
    told: dict[tuple[str, str, tuple[Environment, ...]], list[str]] = {}
    for (word, why, id, chosen), there in where.items():
        told.setdefault((word, why, tuple(there)), []).append(f"{links[id]}: {codes(chosen)}")
    ordered = sorted(told.items(), key=_bad_first)
    return [(word, text(why), "<br>".join(pages), _places(word, on, places)) for (word, why, on), pages in ordered]


def _bad_first(item: tuple[tuple[str, str, tuple[Environment, ...]], list[str]]) -> tuple[bool, str, str]:
    (word, why, _), _ = item
    return word == wording.NOT_MEASURED, word, why


def _places(word: str, there: Sequence[Environment], places: Sequence[Environment]) -> str:
    if len(there) == len(places) > 1:
        return "every environment"
    if word == wording.NOT_MEASURED and len(there) > LISTED:
        return f"{len(there)} of {len(places)} environments"
    return "<br>".join(text(f"torch {e.torch}, lightning {e.lightning}, {e.tier}, {e.ranks} ranks") for e in there)


def hangs(entries: Sequence[Entry]) -> str:
    """Where each rank stood when nothing moved any more: the line of the script, by rank, with the page."""
    found: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in entries:
        for _, result in _hanging(entry):
            found.setdefault(tuple(_stand(result, rank) for rank in (0, 1)), {})[entry.id] = entry
    if not found:
        return join(paragraph("No hang was recorded yet."))
    rows = [row(first, [second, "<br>".join(_link(e) for e in pages.values())]) for (first, second), pages in sorted(found.items())]
    return join(table(["Rank 0", "Rank 1", "Page"], rows, "Where ranks stand in a hang", cls="lanes", stacks=True))


def _hanging(entry: Entry) -> Iterator[tuple[PairResult, VariantResult]]:
    for variant in entry.variants:
        record = entry.record_of(variant) if variant.kind == "hangs" and not variant.protects else None
        result = record[1].repro.get(variant.name) if record else None
        if record and result and len(result.ranks) > 1:
            yield record[1], result


def _stand(result: VariantResult, rank: int) -> str:
    here = next((r for r in result.ranks if r.rank == rank), None)
    if here is None:
        return "not recorded"
    if here.measured is not None:
        return "has finished"
    return wording.place(here.line) if here.line else "outside the script"
