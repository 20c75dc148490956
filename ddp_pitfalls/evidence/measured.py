"""What each rank measured, as tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddp_pitfalls.evidence import chart, wording
from ddp_pitfalls.evidence.entries import Entry, Record
from ddp_pitfalls.evidence.markup import code, codes, join, numbers, paragraph, row, table, text
from ddp_pitfalls.evidence.source import Declared
from ddp_pitfalls.results import Curve, Measured, OnRank, VariantResult

LEGEND = (
    "Healthy is what a run without the mistake has, broken what the mistake makes of it; the scripts compute both independently of what "
    "they measure. Numbers have three significant digits."
)

Table = tuple[tuple[str, ...], tuple[str, ...], str]  # cells of the header, rows, caption


def measured(entry: Entry) -> str:
    """What each rank measured, by variant."""
    runs = {v: entry.record_of(v) for v in entry.variants}
    found = {v: record for v, record in runs.items() if record is not None}
    if not found:
        return paragraph("Not measured yet.")
    places = {wording.run(record) for record in found.values()}
    place = places.pop() if len(places) == 1 else ""  # told once, or with each table
    blocks = [paragraph(f"{place} {LEGEND}".strip())]
    tables = [(v.name, (_about(v, "" if place else wording.run(record)), _table(v, record))) for v, record in found.items()]
    figures = {v.name: _figure(v.name, record) for v, record in found.items()}
    for (about, (head, rows, caption)), names in wording.grouped(tables).items():
        shown = table(head, rows, f"What {', '.join(names)} measured", caption)
        stands = _stands(found[next(v for v in found if v.name == names[0])], names[0])
        blocks += [f"### {codes(names)}", about, stands, shown, next(filter(None, (figures[name] for name in names)), "")]
    missing = [(v.name, _why_missing(entry, v)) for v in entry.variants if v not in found]
    for why, names in wording.grouped(missing).items():
        blocks.append(paragraph(f"Not measured yet: {codes(names)}{why}."))
    return join(*blocks)


def _about(variant: Declared, place: str) -> str:
    told = [f"Protected: {text(variant.protects)}." if variant.protects else "", place]
    return paragraph(" ".join(filter(None, told))) if any(told) else ""


def _why_missing(entry: Entry, variant: Declared) -> str:
    whys = (wording.standing(pair, variant)[1] for _, pair in entry.records)
    said = next(filter(None, whys), f"needs {', '.join(variant.needs)}" if variant.needs else "")
    return f" ({text(said)})" if said else ""


def _table(variant: Declared, record: Record) -> Table:
    """One column a rank: what it measured in the repro and in the fix, and both expected values."""
    present = _sides(record, variant.name)
    expected = _expected(present.values())
    ranks = sorted({r.rank for result in present.values() for r in result.ranks})
    length = _common_length(present.values())
    rows = [row(f"{side}: {text(result.verdict)}", *_outcome(result, ranks, variant.varies, length)) for side, result in present.items()]
    if expected:
        rows.append(row("Healthy", [_value(expected[r].healthy, length) if r in expected else "not known" for r in ranks]))
        if variant.kind != "hangs":  # there the failure is the hang, and what a rank measured before it is compared with nothing
            rows.append(row("Broken", [_broken(expected[r], length) if r in expected else "not known" for r in ranks]))
    quantities = text(", ".join(dict.fromkeys(m.quantity for m in expected.values())))
    caption = f"{quantities} ({text(length)})" if length else quantities
    return ("Run", *([f"Rank {r}" for r in ranks] or ["Outcome"])), tuple(rows), caption


def _sides(record: Record, name: str) -> dict[str, VariantResult]:
    sides = {"Repro": record[1].repro, "Fix": record[1].fix}
    return {side: results[name] for side, results in sides.items() if name in results}


def _expected(results: Iterable[VariantResult]) -> dict[int, Measured]:
    """One measurement by rank, for its expected values: of the repro, or of the fix where a rank of the repro has none."""
    return {r.rank: r.measured for result in reversed(list(results)) for r in result.ranks if r.measured is not None}


def _common_length(results: Iterable[VariantResult]) -> str:
    """How many values there were, where every measured value is a cut list of the same length, else ""."""
    measurements = [r.measured for result in results for r in result.ranks if r.measured is not None]
    values = [v for m in measurements for v in (m.value, m.healthy, *([] if m.broken_is else [m.broken]))]
    lengths = {wording.length(v) for v in values}
    return lengths.pop() if len(lengths) == 1 else ""


def _value(value: Any, length: str) -> str:
    shown = wording.plain(value)
    return code(shown) if isinstance(value, str) else numbers(shown.removesuffix(f" {length}") if length else shown)


def _broken(m: Measured, length: str) -> str:
    return f"anything else ({text(m.broken_is)})" if m.broken_is else _value(m.broken, length)


def _outcome(result: VariantResult, ranks: Sequence[int], varies: str, length: str) -> tuple[list[str], int]:
    """The cells of a row, and over how many columns each goes."""
    if result.failure is not None:
        return [wording.failure(result)], len(ranks)
    if result.ranks:
        by_rank = {r.rank: r for r in result.ranks}
        return [_on_rank(by_rank[r], result, length) if r in by_rank else "not recorded" for r in ranks], 1
    why = result.why or (f"its numbers are not kept: {varies}" if varies else "no numbers recorded")
    return [text(why)], len(ranks)


def _on_rank(rank: OnRank, result: VariantResult, length: str) -> str:
    if rank.measured is not None:
        value = _value(rank.measured.value, length)
        return f"finished: {value}" if any(r.measured is None for r in result.ranks) else value
    return f"stands at {code(rank.line)}" if rank.line else "stands outside the script"


def _stands(record: Record, name: str) -> str:
    """A picture of a hang: a lane for each rank, as far as it came, with the line on which it stands."""
    result = record[1].repro.get(name)
    if result is None or result.kind != "hangs" or len(result.ranks) < 2:
        return ""
    lanes = [_lane(rank) for rank in result.ranks]
    caption = "Where each rank of the repro stands when nothing moves any more"
    return "\n".join([f'<figure class="stands" data-search-exclude><figcaption>{caption}</figcaption><ul>', *lanes, "</ul></figure>"])


def _lane(rank: OnRank) -> str:
    cls, where = "stuck", f"stands at {wording.place(rank.line)}" if rank.line else "stands outside the script"
    if rank.measured is not None:
        cls, where = "done", "has finished"
    return f'<li class="{cls}"><strong>Rank {rank.rank}</strong> <span class="lane"></span> <span>{where}</span></li>'


def _figure(name: str, record: Record) -> str:
    curves = {side: _curves(result) for side, result in _sides(record, name).items()}
    panels = {side: _lines(by_rank) for side, by_rank in curves.items() if by_rank}
    if not panels:
        return ""
    first = next(curve for by_rank in curves.values() for curve in by_rank.values())
    return chart.figure(first.y, first.x, panels, f"chart-{name}")


def _curves(result: VariantResult) -> dict[int, Curve]:
    return {r.rank: r.curve for r in result.ranks if r.curve is not None}


def _lines(by_rank: dict[int, Curve]) -> chart.Lines:
    curves = list(by_rank.values())
    alone = {chart.REFERENCE: curves[0].reference} if curves[0].reference else {}
    if len(curves) > 1 and all(curve.points == curves[0].points for curve in curves):
        return {"every rank": curves[0].points, **alone}
    return {**{f"rank {rank}": curve.points for rank, curve in by_rank.items()}, **alone}
