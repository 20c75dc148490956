"""What one environment measured, to and from JSON. A file changes only when a verdict or a number did."""

from __future__ import annotations

import datetime
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from ddp_pitfalls.measure import (
    AS_DOCUMENTED,
    CRASHED,
    FIX,
    NOT_FIXED,
    NOT_MEASURED,
    NOT_REPRODUCED,
    REPRO,
    AnyOther,
    Dies,
    Ended,
    Hangs,
    Kind,
    Measurement,
    Raises,
    Silent,
    Verdict,
    same,
)

FORMAT = 1
KEPT = 6  # numbers kept of a long list
CUT = "... "  # begins the last element of a list that was cut, which says how many values there were
ROUNDING = 2e-3  # relative: numbers this close print the same in three digits, or nearly


VERDICTS = AS_DOCUMENTED | {NOT_REPRODUCED, NOT_FIXED, CRASHED, NOT_MEASURED}
KINDS = frozenset(kind.__name__.lower() for kind in (Silent, Raises, Hangs, Dies))


class BadResults(Exception):
    """A results file that cannot be read; the message names it and says what to do."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a verdict depends on. ``hardware`` is told to the reader and not part of the name."""

    torch: str
    lightning: str
    tier: str
    backend: str
    ranks: int
    python: str
    hardware: str

    def __post_init__(self) -> None:
        Version(self.torch), Version(self.lightning)
        if self.ranks < 2:
            raise ValueError(f"{self.ranks} ranks, and a pitfall between ranks needs two or more")

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-lightning-{self.lightning}-{self.tier}-{self.backend}-{self.ranks}"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measurement on one rank. ``broken`` is None and ``broken_is`` a reason where the wrong value cannot be predicted.

    Of a list of more than KEPT values the first ones are kept, and a string that begins with CUT. A number that is not finite is a string.
    """

    quantity: str
    value: Any
    healthy: Any
    broken: Any
    broken_is: str = ""

    def as_measurement(self) -> Measurement:
        return Measurement(self.quantity, self.value, self.healthy, AnyOther(self.broken_is) if self.broken_is else self.broken)


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``points[i]`` was measured at step ``i``, ``reference[i]`` in one process; None stands for a number that is not finite."""

    x: str
    y: str
    points: list[float | None]
    reference: list[float | None] = []


class OnRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one rank ended: with a measurement, or standing on a line of the script."""

    rank: int
    measured: Measured | None = None
    line: str = ""
    curve: Curve | None = None


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The error, or the signal, that ended the first rank that failed."""

    name: str
    message: str
    line: str = ""


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A warning or a line of error output that some rank gave."""

    category: str
    text: str


class VariantResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One variant of one script. ``kind`` is silent, raises, hangs or dies, as declared in the repro.

    ``protects`` says which layer saves its user from the mistake, for a variant that stands in the fix alone.
    """

    verdict: str
    kind: str
    why: str = ""
    protects: str = ""
    ranks: list[OnRank] = []
    failure: Failure | None = None
    told: list[Told] = []

    def __post_init__(self) -> None:
        for name, value, known in (("verdict", self.verdict, VERDICTS), ("kind", self.kind, KINDS)):
            if value not in known:
                raise ValueError(f"no {name} is called {value!r}")


class PairResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both scripts of a pitfall, by variant, and the day on which this was last found to be different."""

    recorded: str
    repro: dict[str, VariantResult]
    fix: dict[str, VariantResult]

    def __post_init__(self) -> None:
        datetime.date.fromisoformat(self.recorded)


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One environment's file."""

    format: int
    environment: Environment
    pitfalls: dict[str, PairResult]


def variant_result(kind: Kind, verdict: Verdict, varies: bool, protects: str = "") -> VariantResult:
    """What is kept of a verdict. A variant that varies from run to run keeps the word alone."""
    name = kind_name(kind)
    if not verdict.ranks or varies:
        return VariantResult(verdict.word, name, why=verdict.why, protects=protects)
    failed = sorted((e for e in verdict.ranks if e.how in ("raised", "died")), key=lambda e: e.order)
    told = {Told(n.category, first_line(n.text)) for e in verdict.ranks for n in e.notices}
    told |= {Told("error output", first_line(e.output)) for e in verdict.ranks if e.output.strip()}
    return VariantResult(
        verdict=verdict.word,
        kind=name,
        why=verdict.why,
        protects=protects,
        ranks=[] if failed else [_on_rank(end) for end in verdict.ranks],
        failure=_failure(failed[0], kind) if failed else None,
        told=sorted(told),
    )


def kind_name(kind: Kind) -> str:
    """The kind in a word."""
    return type(kind).__name__.lower()


def of_kind(result: VariantResult, kind: str) -> VariantResult:
    """The same, of another kind: a fix does not declare how its repro fails."""
    return msgspec.structs.replace(result, kind=kind)


def first_line(text: str) -> str:
    """The first line of a text that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _on_rank(end: Ended) -> OnRank:
    series = end.measurement.series if end.measurement else None
    return OnRank(
        rank=end.rank,
        measured=_measured(end.measurement) if end.measurement else None,
        line=end.line or "",
        curve=Curve(series.x, series.y, _curve(series.points), _curve(series.reference)) if series else None,
    )


def _curve(points: Sequence[float]) -> list[float | None]:
    return [_rounded(float(p)) if math.isfinite(p) else None for p in points]


def _measured(m: Measurement) -> Measured:
    unknown = m.broken.reason if isinstance(m.broken, AnyOther) else ""
    return Measured(m.quantity, _rounded(m.value), _rounded(m.healthy), None if unknown else _rounded(m.broken), unknown)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else str(value)  # JSON has no such numbers
    if isinstance(value, list):
        if len(value) <= KEPT or any(isinstance(v, list) for v in value):
            return [_rounded(v) for v in value]
        return [*(_rounded(v) for v in value[:KEPT]), f"{CUT}{len(value)} values"]
    return value


def _failure(end: Ended, kind: Kind) -> Failure:
    words = kind.words if isinstance(kind, (Raises, Dies)) else ""
    text = end.message if end.how == "raised" else end.output
    says = next((line.strip() for line in text.splitlines() if words in line and line.strip()), first_line(text))
    return Failure(end.error_types[0] if end.how == "raised" else end.signal or "exit", says, end.line or "")


def read(path: Path) -> Results:
    """A results file. Raises BadResults."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadResults(f"{path}: cannot be read: {error.strerror}") from error
    try:
        raw = msgspec.json.decode(text)
        found = raw.get("format") if isinstance(raw, dict) else None
        if isinstance(found, int) and found != FORMAT:
            mend = "update ddp-pitfalls" if found > FORMAT else "record again"
            raise BadResults(f"{path}: is of format {found}, and this version reads {FORMAT}: {mend}")
        results = msgspec.convert(raw, Results)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadResults(f"{path}: is damaged or not a results file ({error}): restore it with git, or record again") from error
    if path.stem != results.environment.name:
        raise BadResults(f"{path}: holds the results of {results.environment.name}: name it {results.environment.name}.json")
    return results


def read_all(folder: Path) -> list[Results]:
    """Every recorded environment, newest torch first."""
    found = sorted((read(path) for path in folder.glob("*.json")), key=lambda r: r.environment.name)
    return sorted(found, key=lambda r: Version(r.environment.torch), reverse=True)


def write(folder: Path, results: Results) -> bool:
    """Write the file of an environment. Returns whether anything changed."""
    return write_file(folder / f"{results.environment.name}.json", msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def write_file(path: Path, text: bytes) -> bool:
    """Write a file, beside it first and then in its place. Returns whether anything changed."""
    if path.exists() and path.read_bytes() == text:
        return False
    path.parent.mkdir(exist_ok=True)
    fd, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    return True


def merged(old: Results | None, new: Results) -> Results:
    """``new`` over ``old``: pitfalls that were not run stay, and what was measured again within rounding stays as it was."""
    if old is None:
        return new
    pitfalls = dict(old.pitfalls)
    for id, pair in new.pitfalls.items():
        known = pitfalls.get(id)
        if known is None or not alike(msgspec.structs.replace(known, recorded=pair.recorded), pair):
            pitfalls[id] = pair
    unchanged = all(pitfalls[id] is old.pitfalls.get(id) for id in pitfalls)
    return Results(FORMAT, old.environment if unchanged else new.environment, dict(sorted(pitfalls.items())))


def alike(old: Any, new: Any) -> bool:
    """Whether two records say the same, numbers within rounding, and messages but for the digits in them."""
    if type(old) is not type(new):
        return False
    if isinstance(old, Failure):
        return old.name == new.name and old.line == new.line and _undigited(old.message) == _undigited(new.message)
    if isinstance(old, Told):
        return old.category == new.category and _undigited(old.text) == _undigited(new.text)
    if isinstance(old, VariantResult) and _undigited(old.why) != _undigited(new.why):
        return False
    if isinstance(old, msgspec.Struct):
        return all(alike(getattr(old, name), getattr(new, name)) for name in old.__struct_fields__ if name != "why")
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(alike(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(alike(a, b) for a, b in zip(old, new))
    return same(old, new, rel_tol=ROUNDING, abs_tol=ROUNDING / 100)


def lost(old: PairResult, new: PairResult) -> list[str]:
    """The variants that were as documented and are not any more."""
    sides = ((REPRO, old.repro, new.repro), (FIX, old.fix, new.fix))
    return [
        f"{side}/{name}"
        for side, before, now in sides
        for name, result in before.items()
        if result.verdict in AS_DOCUMENTED and name in now and now[name].verdict not in AS_DOCUMENTED
    ]


def _undigited(text: str) -> str:
    return "".join(c for c in text if not c.isdigit())
