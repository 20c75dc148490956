"""What a reader sees of verdicts on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_pitfalls import hardware
from ddp_pitfalls.measure import (
    AS_DOCUMENTED,
    AS_EXPECTED,
    NOT_AS_EXPECTED,
    NOT_MEASURED,
    NOTHING_MEASURED,
    REPRO,
    Verdict,
    shown,
)
from ddp_pitfalls.script import Script, Variant


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """The exit code of a script whose variants got these verdicts."""
    measured = [v for v in verdicts if v.word != NOT_MEASURED]
    if not measured:
        return NOTHING_MEASURED
    return AS_EXPECTED if all(v.as_documented for v in measured) else NOT_AS_EXPECTED


def heading(script: Script, tier: hardware.Tier, ranks: int) -> str:
    """The pitfall, and what the verdicts below it depend on."""
    what = "the pitfall" if script.side == REPRO else "the fix"
    here = ", ".join(f"{package} {release}" for package, release in hardware.versions().items())
    return f"{script.pitfall}: {what}\n{script.title}\n{ranks} ranks, tier {tier.name} ({tier.backend}), {here}\n"


def report(wanted: Variant, verdict: Verdict) -> str:
    """One variant on the screen: the verdict, the reason where there is one, and each rank's numbers."""
    lines = [f"{wanted.name}: {verdict.word}"]
    if verdict.why:
        lines.append(f"  {verdict.why}")
    measured = [(end.rank, end.measurement) for end in verdict.ranks if end.measurement is not None]
    for quantity in dict.fromkeys(m.quantity for _, m in measured):
        lines.append(f"  {quantity}")
        for rank, m in measured:
            if m.quantity == quantity:
                lines.append(f"    rank {rank}: {shown(m.value)}")
                lines.append(f"      healthy {shown(m.healthy)}")
                lines.append(f"      broken  {shown(m.broken)}")
    lines += [f"  {end.sentence()}" for end in verdict.ranks if end.how != "measured" and end.sentence() not in verdict.why]
    for end in verdict.ranks:
        lines += [f"  rank {end.rank} was told: {notice.category}: {notice.text.strip()}" for notice in end.notices]
    if verdict.word not in AS_DOCUMENTED:
        for end in verdict.ranks:
            lines += _quoted(f"rank {end.rank}, stack", end.stack)
            lines += _quoted(f"rank {end.rank}, error output", end.output)
            lines += _quoted(f"rank {end.rank}, output", end.printed)
    return "\n".join(lines) + "\n"


def _quoted(title: str, text: str, most: int = 30) -> list[str]:
    lines = text.strip().splitlines()
    if not lines:
        return []
    cut = [f"    | ({len(lines) - most} lines before these)"] if len(lines) > most else []
    return [f"  {title}:", *cut, *(f"    | {line}" for line in lines[-most:])]


def conclusion(script: Script, verdicts: Sequence[Verdict]) -> str:
    """The last line: whether the page is still right."""
    counts = {word: sum(v.word == word for v in verdicts) for word in dict.fromkeys(v.word for v in verdicts)}
    told = ", ".join(f"{n} {word}" for word, n in counts.items())
    names = {AS_EXPECTED: "as documented", NOT_AS_EXPECTED: "NOT as documented", NOTHING_MEASURED: "nothing could be measured here"}
    return f"{script.side}/{script.path.name}: {names[exit_code(verdicts)]} ({told})"
