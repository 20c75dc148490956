"""The three fragments of a page. Pure: the same entry gives the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp_pitfalls import patterns
from ddp_pitfalls.catalogue import Unknown
from ddp_pitfalls.evidence import diff, wording
from ddp_pitfalls.evidence.entries import END, EVIDENCE, TOP, Entry, on_gpu
from ddp_pitfalls.evidence.findings import found_on_page
from ddp_pitfalls.evidence.index import anchor
from ddp_pitfalls.evidence.markup import bullets, code, code_block, codes, join, paragraph, prose, row, table, text
from ddp_pitfalls.evidence.measured import measured
from ddp_pitfalls.evidence.source import Declared, fixed_code, plain_lines
from ddp_pitfalls.findings import Watched

JUMPS = {
    "what-changes": "The fix",
    "copy-this": "Code to copy",
    "measured": "What was measured",
    "check-your-own-run": "Check your own run",
}


def fragments(entry: Entry, watched: Sequence[Watched] = ()) -> dict[str, str]:
    """The generated parts of a page, by file name. ``watched`` is what ``checks.Watch`` found, by environment."""
    return {
        TOP: top(entry),
        EVIDENCE: join(
            "## Run it", run_it(entry), "## What changes", what_changes(entry), "## Copy this", copy_this(entry),
            "## Measured", measured(entry), "## Versions", versions(entry),
        ),
        END: join("## Who notices", who_notices(entry), found_on_page(entry, watched), "## Sources", sources(entry)),
    }  # fmt: skip


def top(entry: Entry) -> str:
    """How the pitfall shows, and where that was verified."""
    seen = bullets((prose(s.text) for s in entry.front.symptoms), "seen")
    lines = [f"<strong>How it shows:</strong> {wording.kinds(entry.variants)}."]
    need_gpu = [v for v in entry.variants if any("gpu" in need for need in v.needs)]
    for place, wanted in (("On the CPU", False), ("On a GPU", True)):
        record = next((r for r in entry.records if on_gpu(r[0]) is wanted), None)
        shown = [v for v in entry.variants if wanted or v not in need_gpu]
        if record is not None and shown:
            lines.append(f"<strong>{place}:</strong> {'; '.join(wording.standings(record[1], shown, short=True))}. {wording.run(record)}")
        elif shown:
            lines.append(f"<strong>{place}:</strong> {wording.NOT_YET}.{_needing(need_gpu) if wanted else ''}")
    if len(entry.records) > 1:
        lines.append(f'Recorded in {len(entry.records)} environments: see <a href="#versions">Versions</a>.')
    return join(_jumps(entry), '<p class="label" data-search-exclude>Symptoms</p>', seen, bullets(lines, "standing"))


def _needing(variants: Sequence[Declared]) -> str:
    """Which variants need a GPU."""
    if len(variants) > wording.NAMED:
        return f" {len(variants)} variants need one."
    return f" These variants need one: {codes(v.name for v in variants)}." if variants else ""


def _jumps(entry: Entry) -> str:
    """Where to go from the top of the page: to what helps, and to the other pitfalls that look the same."""
    groups = dict.fromkeys(s.group for s in entry.front.symptoms)
    alike = ", ".join(f'<a href="../../#{anchor(group)}">{group}</a>' for group in groups)
    on = " ".join(f'<a class="jump" href="#{name}">{words}</a>' for name, words in JUMPS.items())
    inner = f'<p>{on}</p><p class="alike">Others like this: {alike}</p>'
    return f'<nav class="jumps" aria-label="On this page" data-search-exclude>{inner}</nav>'


def run_it(entry: Entry) -> str:
    """The commands."""
    return join(
        paragraph("In a clone of this repository:"),
        code_block(f"nox -s repro-{entry.id}\nnox -s fix-{entry.id}", language="bash"),
        paragraph("Without nox, with the torch and Lightning that you have already:"),
        code_block(f"PYTHONPATH=. python {entry.repro_name}\nPYTHONPATH=. python {entry.fix_name}", language="bash"),
    )


def what_changes(entry: Entry) -> str:
    """The difference between repro and fix."""
    label = f"Difference between {entry.repro_name} and {entry.fix_name}"
    return join(
        paragraph(f"From {code(entry.repro_name)} to {code(entry.fix_name)}:"),
        diff.unified(plain_lines(entry.repro), plain_lines(entry.fix), label),
    )


def copy_this(entry: Entry) -> str:
    """The marked patterns of the fix; for a fix without, what its functions do. Raises Unknown for a pattern that nobody could copy."""
    try:
        copied = {name: patterns.pattern(entry.fix, name) for name in patterns.names(entry.fix)}
    except patterns.BadPattern as error:
        raise Unknown(f"{entry.fix_name}: {error}") from error
    says = "This needs torch, Lightning and the standard library only."
    if not copied:
        copied = fixed_code(entry.repro, entry.fix, Path(entry.fix_name))
        says = "What the fix does, by function:"
    return join(paragraph(says), *(code_block(block, f"{name}, from {entry.fix_name}") for name, block in copied.items()))


def versions(entry: Entry) -> str:
    """The recorded environments, and what each says of each variant."""
    rows = []
    for environment, pair in entry.records:
        details = f"{wording.ranks_on(environment)}; Python {text(environment.python)}, {text(environment.hardware)}"
        outcome = "<br>".join(wording.standings(pair, entry.variants))
        rows.append(row(f"{wording.releases(environment)}<br><small>{details}</small>", [outcome, f"<span>{text(pair.recorded)}</span>"]))
    if not any(on_gpu(environment) for environment, _ in entry.records):
        rows.append(row("On a GPU", [wording.NOT_YET, ""]))
    return table(["Environment", "Outcome", "Recorded"], rows, "Recorded environments")


def who_notices(entry: Entry) -> str:
    """Who tells of the pitfall when it happens, from what the ranks of the repro were told."""
    groups = wording.who_notices(entry)
    if not groups:
        tried = any(entry.record_of(v) for v in entry.variants if not v.protects)
        return paragraph("Reproduced in no recorded environment." if tried else "Not measured yet.")
    if len(groups) == 1:
        return paragraph(next(iter(groups)))
    return bullets(f"{codes(names)}: {sentence}" for sentence, names in groups.items())


def sources(entry: Entry) -> str:
    """Where the pitfall was reported or described."""
    return bullets(f'<a href="{text(s.url)}">{prose(s.title)}</a>: {prose(s.says)}' for s in entry.front.sources)
