"""What a rank measures, how a pitfall may show, and the judgement. Plain data: no torch, no processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REPRO, FIX = "repros", "fixes"  # the directory of a script decides what is expected of it
REPRODUCED, FIXED = "reproduced", "fixed"
NOT_REPRODUCED, NOT_FIXED = "not reproduced", "not fixed"
CRASHED, NOT_MEASURED = "crashed", "not measured"
AS_DOCUMENTED = frozenset({REPRODUCED, FIXED})
AS_EXPECTED, NOT_AS_EXPECTED, NO_SUCH_THING, NOTHING_MEASURED = 0, 1, 2, 77  # exit codes of scripts and commands
FOUND = "Found"  # category of the notices in which a rank that is watched tells what checks.Watch finds
FINISHED = "(finished)"  # where a rank stands that has returned from the variant while others hang

REL_TOL, ABS_TOL = 1e-4, 1e-5  # float32 training in another order of summation


@dataclass(frozen=True)
class AnyOther:
    """Stands for ``broken`` where the wrong value cannot be predicted: any value but the healthy one."""

    reason: str


@dataclass(frozen=True)
class Series:
    """A curve for the chart of a page: ``points[i]`` was measured at step ``i``, ``reference[i]`` in one process."""

    y: str
    points: Sequence[float]
    x: str = "step"
    reference: Sequence[float] = ()


@dataclass(frozen=True)
class Measurement:
    """One quantity on one rank: its value, and what a healthy and what the broken run has, from an independent source.

    Numbers, strings, None, or (nested) lists of these; tensors and arrays become lists.
    """

    quantity: str
    value: Any
    healthy: Any
    broken: Any
    series: Series | None = None

    def __post_init__(self) -> None:
        for name in ("value", "healthy", "broken"):
            object.__setattr__(self, name, _plain(getattr(self, name)))

    def fault(self) -> str | None:
        """Why this measurement can prove nothing, or None."""
        if isinstance(self.broken, AnyOther):
            if not self.broken.reason:
                return "broken=AnyOther() without a reason"
        elif same(self.healthy, self.broken):
            return f"healthy equals broken ({shown(self.healthy)}), so the measurement can tell nothing"
        for name in ("value", "healthy", "broken"):
            if any(isinstance(v, float) and math.isnan(v) for v in _leaves(getattr(self, name))):
                return f"{name} is NaN"
        return None

    def state(self, rel_tol: float = REL_TOL, abs_tol: float = ABS_TOL) -> str:
        """``healthy``, ``broken`` or ``neither``."""
        if same(self.value, self.healthy, rel_tol, abs_tol):
            return "healthy"
        if isinstance(self.broken, AnyOther) or same(self.value, self.broken, rel_tol, abs_tol):
            return "broken"
        return "neither"


@dataclass(frozen=True)
class Raises:
    """The variant raises: an error of this type (or a subclass) whose message contains the words."""

    type: type[BaseException] | str
    words: str


@dataclass(frozen=True)
class Hangs:
    """The variant hangs: rank ``r`` stands on a line of the script that contains ``where[r]``.

    ``others`` holds for the ranks that ``where`` does not name; FINISHED is a rank that has returned.
    """

    where: Mapping[int, str]
    others: str | None = None

    def words(self, rank: int) -> str | None:
        return self.where.get(rank, self.others)


@dataclass(frozen=True)
class Dies:
    """The variant ends the process: the named signal, after error output that contains the words."""

    signal: str
    words: str


@dataclass(frozen=True)
class Silent:
    """The default: a wrong measurement, no warning and no error output."""


Kind = Silent | Raises | Hangs | Dies


@dataclass(frozen=True)
class Notice:
    """A warning that a rank was given: who said it, and what."""

    category: str
    text: str


@dataclass(frozen=True)
class Ended:
    """How one rank ended: ``how`` is ``measured``, ``raised``, ``died``, ``stuck`` or ``unfinished`` (stopped by the supervisor)."""

    rank: int
    how: str
    measurement: Measurement | None = None
    error_types: tuple[str, ...] = ()  # names along the error's method resolution order
    message: str = ""  # the error's message, or how the process ended
    signal: str | None = None
    line: str | None = None  # the line of the script where an error left it, or where the rank is stuck
    stack: str = ""  # traceback or stack, for the reader
    notices: tuple[Notice, ...] = ()
    output: str = ""  # error output since the variant was entered
    printed: str = ""  # standard output since then
    order: int = 0  # how many ranks had failed before this one

    def sentence(self) -> str:
        """What happened, for people."""
        at = f" at `{self.line}`" if self.line else ""
        if self.how == "raised":
            return f"rank {self.rank} raised {self.error_types[0]}{at}: {self.message.strip()}"
        if self.how == "died":
            return f"rank {self.rank} {self.message}"
        if self.how == "stuck":
            return f"rank {self.rank} is stuck{at or f' outside the script: {self.message}'}"
        if self.how == "unfinished":
            return f"rank {self.rank} {self.message}{at}"
        assert self.measurement is not None
        return f"rank {self.rank} measured {shown(self.measurement.value)}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a variant: a word, why, and what the ranks said."""

    word: str
    why: str = ""
    ranks: Sequence[Ended] = field(default=(), repr=False)

    @property
    def as_documented(self) -> bool:
        return self.word in AS_DOCUMENTED


def judge(side: str, kind: Kind, ranks: Sequence[Ended]) -> Verdict:
    """What the endings of all ranks of one variant prove, given the directory of the script and the declared kind."""
    failed = sorted((r for r in ranks if r.how in ("raised", "died")), key=lambda r: r.order)
    stuck = [r for r in ranks if r.how == "stuck"]
    first = failed[0] if failed else None
    wanted = Silent() if side == FIX else kind
    if isinstance(wanted, Raises) and first and first.how == "raised":
        word, why = _judge_error(wanted, first)
    elif isinstance(wanted, Dies) and first and first.how == "died":
        word, why = _judge_death(wanted, first)
    elif first:
        word, why = CRASHED, first.sentence()
    elif stuck:
        word, why = _judge_hang(wanted, ranks)
    elif any(r.how == "unfinished" for r in ranks):
        word, why = CRASHED, "; ".join(r.sentence() for r in ranks if r.how == "unfinished")
    else:
        word, why = _judge_measurements(side, wanted, ranks)
    return Verdict(word, why, tuple(ranks))


def _judge_error(wanted: Raises, error: Ended) -> tuple[str, str]:
    name = wanted.type if isinstance(wanted.type, str) else wanted.type.__name__
    if name in error.error_types and wanted.words in error.message:
        return REPRODUCED, ""
    return CRASHED, f"{error.sentence()} (documented: {name} with {wanted.words!r})"


def _judge_death(wanted: Dies, death: Ended) -> tuple[str, str]:
    if death.signal == wanted.signal and wanted.words in death.output:
        return REPRODUCED, ""
    return CRASHED, f"{death.sentence()} (documented: {wanted.signal} after {wanted.words!r})"


def _judge_hang(wanted: Kind, ranks: Sequence[Ended]) -> tuple[str, str]:
    stands = "; ".join(r.sentence() for r in ranks)
    if not isinstance(wanted, Hangs):
        return CRASHED, f"hangs: {stands}"
    if stands_as_documented(wanted, {r.rank: FINISHED if r.how == "measured" else r.line for r in ranks}):
        return REPRODUCED, ""
    places = "; ".join(f"rank {r.rank}: {wanted.words(r.rank)}" for r in ranks)
    return CRASHED, f"hangs elsewhere: {stands} (documented: {places})"


def stands_as_documented(wanted: Hangs, lines: Mapping[int, str | None]) -> bool:
    """Whether every rank stands on the line that the kind names for it."""
    words = {rank: wanted.words(rank) for rank in lines}
    return all(w is not None and line is not None and w in line for w, line in ((words[r], lines[r]) for r in lines))


def _judge_measurements(side: str, wanted: Kind, ranks: Sequence[Ended]) -> tuple[str, str]:
    found = [(r, r.measurement) for r in ranks if r.measurement is not None]
    if not found or len(found) < len(ranks):
        return CRASHED, f"{len(found)} of {len(ranks)} ranks measured something"
    for rank, measurement in found:
        if fault := measurement.fault():
            return CRASHED, f"rank {rank.rank}, {measurement.quantity}: {fault}"
    if not isinstance(wanted, Silent):
        return NOT_REPRODUCED, f"every rank finished (documented: {wanted})"
    for rank, measurement in found:
        if measurement.state() == "neither":
            return CRASHED, f"rank {rank.rank}, {measurement.quantity}: {shown(measurement.value)} is neither healthy nor broken"
    broken = [r for r, m in found if m.state() == "broken"]
    if side == FIX:
        if broken:
            return NOT_FIXED, f"still broken on rank {', '.join(str(r.rank) for r in broken)}"
        return FIXED, ""
    if not broken:
        return NOT_REPRODUCED, "every rank is healthy"
    for rank in ranks:
        if rank.notices or rank.output.strip():
            said = rank.notices[0].text if rank.notices else rank.output
            return NOT_REPRODUCED, f"documented as silent, but rank {rank.rank} was told: {said.strip()}"
    return REPRODUCED, ""


def same(a: Any, b: Any, rel_tol: float = REL_TOL, abs_tol: float = ABS_TOL) -> bool:
    """Equality of plain values, numbers within a tolerance. NaN equals nothing."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=rel_tol, abs_tol=abs_tol)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, rel_tol, abs_tol) for x, y in zip(a, b))
    return type(a) is type(b) and bool(a == b)


def shown(value: Any, most: int = 3) -> str:
    """A value in a few characters: three significant digits, long lists cut."""
    if isinstance(value, AnyOther):
        return f"anything else ({value.reason})"
    if isinstance(value, (list, tuple)):
        if len(value) <= 2 * most:
            return f"[{', '.join(shown(v, most) for v in value)}]"
        return f"[{', '.join(shown(v, most) for v in value[:most])}, ...] ({len(value)} values)"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "None" if value is None else str(value)


def _plain(value: Any) -> Any:
    """Tensors, arrays and NumPy scalars as Python numbers and lists; everything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _leaves(v)
    else:
        yield value
