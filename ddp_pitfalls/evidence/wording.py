"""What was recorded, in plain words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_pitfalls.evidence.entries import Entry, Record
from ddp_pitfalls.evidence.markup import code, codes, text
from ddp_pitfalls.evidence.source import Declared
from ddp_pitfalls.measure import FIXED, NOT_MEASURED, REPRODUCED, shown
from ddp_pitfalls.results import CUT, Environment, PairResult, VariantResult

KINDS = {
    "silent": "silently: it runs on with a wrong result, and nothing says so",
    "raises": "it raises an error",
    "hangs": "it hangs: it stands still, without an error",
    "dies": "it dies: a signal ends the process",
}
TIERS = {"cpu": "on the CPU", "cuda": "with a GPU each", "cuda-shared": "on one GPU"}
KIND_WORDS = {"silent": "silent", "raises": "raises an error", "hangs": "hangs", "dies": "the process dies"}
NOT_YET = "not measured yet"
VERIFIED, PROTECTED = "verified", "protected"
ORDER = {VERIFIED: 0, PROTECTED: 0.5, NOT_MEASURED: 2}  # of states; any other has 1
COMMENT = re.compile(r"\s{2,}#.*$")
SHOWN = 3  # numbers of a long list on a page
NAMED = 2  # more variants than these are counted at the top of a page


def releases(environment: Environment) -> str:
    return text(f"torch {environment.torch}, lightning {environment.lightning}")


def ranks_on(environment: Environment) -> str:
    """Number of ranks, tier and backend."""
    tier = TIERS.get(environment.tier, environment.tier)
    return text(f"{environment.ranks} ranks {tier} ({environment.backend})")


def column(environment: Environment) -> str:
    """An environment as the head of a narrow column."""
    tier = "CPU" if environment.tier == "cpu" else "one GPU" if environment.tier == "cuda-shared" else "GPU"
    backend = "" if (environment.tier == "cuda") == (environment.backend == "nccl") else f", {environment.backend}"
    lines = (f"torch {environment.torch}", f"lightning {environment.lightning}", f"{tier}{backend}, {environment.ranks} ranks")
    return "<br>".join(f"<span>{text(line)}</span>" for line in lines)


def run(record: Record) -> str:
    """An environment with its date, as a sentence."""
    environment, pair = record
    return f"Recorded {text(pair.recorded)} with {releases(environment)}, {ranks_on(environment)}."


def kinds(variants: Sequence[Declared]) -> str:
    """How a pitfall shows, by variant where they differ."""
    groups = grouped((v.name, KINDS.get(v.kind, v.kind)) for v in variants if not v.protects)
    if len(groups) == 1:
        return text(next(iter(groups)))
    return "; ".join(f"{text(words)} ({few(names)})" for words, names in groups.items())


def few(names: Sequence[str]) -> str:
    """The names of variants, or how many they are."""
    return codes(names) if len(names) <= NAMED else f"{len(names)} variants"


def kind_words(entry: Entry) -> str:
    """How a pitfall shows, in few words."""
    return text(", ".join(dict.fromkeys(KIND_WORDS.get(v.kind, v.kind) for v in entry.variants if not v.protects)))


def summary(pair: PairResult, variants: Iterable[Declared]) -> list[tuple[str, int]]:
    """How many variants have each state in an environment: verified first, then what is not as documented, then not measured.

    A variant whose user some layer protects counts as verified: its page says so, and so it was.
    """
    words = (standing(pair, v)[0].removesuffix(" there") for v in variants)
    counts = Counter(VERIFIED if word == PROTECTED else word for word in words)
    return sorted(counts.items(), key=lambda item: ORDER.get(item[0], 1))


def only_unmeasured(pairs: Iterable[PairResult], variants: Sequence[Declared]) -> bool:
    """Whether no variant was measured in any of these records."""
    return all(summary(pair, variants)[0][0] == NOT_MEASURED for pair in pairs)


def standing(pair: PairResult, variant: Declared) -> tuple[str, str]:
    """What an environment says of a variant, and why: verified, protected, not measured; or not reproduced, not fixed or crashed there."""
    sides = [(pair.fix, FIXED)] if variant.protects else [(pair.repro, REPRODUCED), (pair.fix, FIXED)]
    for results, wanted in sides:
        result = results.get(variant.name)
        if result is None or result.verdict == NOT_MEASURED:
            return NOT_MEASURED, result.why if result else ""
        if result.verdict != wanted:
            return f"{result.verdict} there", result.why
    return (PROTECTED, variant.protects) if variant.protects else (VERIFIED, "")


def standings(pair: PairResult, variants: Iterable[Declared], short: bool = False) -> list[str]:
    """These variants by what an environment says of them, verified ones first; many of them are counted where it must be short."""
    groups = grouped((v.name, standing(pair, v)) for v in variants)
    parts = []
    for (word, why), names in sorted(groups.items(), key=lambda group: ORDER.get(group[0][0], 1)):
        parts.append(f"{text(word)}: {few(names) if short else codes(names)}" + (f" ({text(why)})" if why else ""))
    return parts


def grouped(pairs: Iterable[tuple[str, Any]]) -> dict[Any, list[str]]:
    """Names by what is said of them, in order of appearance."""
    groups: dict[Any, list[str]] = {}
    for name, said in pairs:
        groups.setdefault(said, []).append(name)
    return groups


def plain(value: Any) -> str:
    """A measured value; of a long list, which was cut when it was recorded, the first numbers and how many there are."""
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, list):
        return shown(value)
    if not value:
        return "none"
    cut = [f"{CUT}{length(value)}"] if length(value) else []
    return ", ".join([f"[{plain(v)}]" if isinstance(v, list) else plain(v) for v in (value[:SHOWN] if cut else value)] + cut)


def length(value: Any) -> str:
    """How many values a list had that was cut when it was recorded, else ""."""
    last = value[-1] if isinstance(value, list) and value else None
    return last.removeprefix(CUT) if isinstance(last, str) and last.startswith(CUT) else ""


def place(line: str) -> str:
    """The line on which a rank stands, without the comment at its end."""
    return code(COMMENT.sub("", line))


def failure(result: VariantResult) -> str:
    """The error or the signal that ended the first rank that failed."""
    assert result.failure is not None
    at = f", at {code(result.failure.line)}" if result.failure.line else ""
    said = f": {code(result.failure.message)}" if result.failure.message else ""
    return f"{code(result.failure.name)}{said}{at}"


def who_notices(entry: Entry) -> Mapping[str, list[str]]:
    """Who tells of the pitfall where it was reproduced: variants by sentence. Of several environments the preferred one speaks."""
    pairs = []
    for variant in entry.variants:
        shown = _reproduced(entry, variant)
        if shown is not None:
            pairs.append((variant.name, notice(shown)))
    return grouped(pairs)


def notice(result: VariantResult) -> str:
    """Who tells of the pitfall in one variant, in a sentence."""
    known = result.failure.message if result.failure else None
    told = "; ".join(f"{_teller(t.category)}: {code(t.text)}" for t in result.told if t.text != known)
    if result.failure is not None:
        verb = "A rank raises" if result.kind == "raises" else "A rank ends with"
        return f"{verb} {failure(result)}." + (f" The ranks are also told: {told}." if told else "")
    if told:
        return f"{told}."
    if result.kind == "hangs":
        return "Nobody: the ranks stand still, with no warning and no error."
    return "Nobody: no warning, no error."


def who(entry: Entry) -> str:
    """Who tells of the pitfall where it was reproduced, in few words."""
    runs = (_reproduced(entry, variant) for variant in entry.variants)
    return "; ".join(dict.fromkeys(_tellers(run) for run in runs if run is not None)) or NOT_YET


def _tellers(result: VariantResult) -> str:
    if result.failure:
        return code(result.failure.name)
    return ", ".join(sorted({_teller(t.category) for t in result.told})) or "nobody"


def _reproduced(entry: Entry, variant: Declared) -> VariantResult | None:
    """What the preferred environment recorded of a variant that was reproduced."""
    runs = (pair.repro.get(variant.name) for _, pair in entry.records)
    return next((run for run in runs if run is not None and run.verdict == REPRODUCED), None)


def _teller(category: str) -> str:
    return category if category == "error output" else code(category)
