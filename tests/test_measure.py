"""The judgement on plain data: what proves a pitfall or a fix, and what does not. What real ranks say is judged in test_supervise.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from ddp_pitfalls.measure import (
    CRASHED,
    FINISHED,
    FIX,
    FIXED,
    NOT_FIXED,
    NOT_REPRODUCED,
    REPRO,
    REPRODUCED,
    AnyOther,
    Dies,
    Ended,
    Hangs,
    Kind,
    Measurement,
    Notice,
    Raises,
    Silent,
    judge,
    same,
    shown,
    stands_as_documented,
)

SILENT = Silent()
HEALTHY = Measurement("loss", 1.0, healthy=1.0, broken=2.0)
BROKEN = replace(HEALTHY, value=2.0)
NEITHER = replace(HEALTHY, value=3.0)
NAN = replace(HEALTHY, value=math.nan)


def ranks(*measurements: Measurement) -> list[Ended]:
    return [Ended(rank, "measured", measurement) for rank, measurement in enumerate(measurements)]


def word(side: str, ended: Sequence[Ended], kind: Kind = SILENT) -> str:
    return judge(side, kind, ended).word


@pytest.mark.parametrize(
    ("measured", "repro", "fix"),
    [
        ((BROKEN, BROKEN), REPRODUCED, NOT_FIXED),
        ((HEALTHY, BROKEN), REPRODUCED, NOT_FIXED),  # a fault of one rank is a fault
        ((HEALTHY, HEALTHY), NOT_REPRODUCED, FIXED),
        ((BROKEN, NEITHER), CRASHED, CRASHED),
        ((HEALTHY, NEITHER), CRASHED, CRASHED),
        ((BROKEN, NAN), CRASHED, CRASHED),
        ((HEALTHY, NAN), CRASHED, CRASHED),
    ],
)
def test_measurements(measured: tuple[Measurement, Measurement], repro: str, fix: str) -> None:
    assert word(REPRO, ranks(*measured)) == repro
    assert word(FIX, ranks(*measured)) == fix


@pytest.mark.parametrize("side", [REPRO, FIX])
def test_without_a_measurement_nothing_is_proven(side: str) -> None:
    assert word(side, []) == CRASHED
    assert word(side, [Ended(0, "measured", HEALTHY), Ended(1, "measured", None)]) == CRASHED


@pytest.mark.parametrize("side", [REPRO, FIX])
@pytest.mark.parametrize(
    "measurement",
    [
        Measurement("loss", math.nan, healthy=1.0, broken=2.0),
        Measurement("loss", 1.0, healthy=math.nan, broken=2.0),
        Measurement("loss", 1.0, healthy=1.0, broken=math.nan),
        Measurement("loss", [1.0, [2.0, math.nan]], healthy=[1.0, [2.0, 3.0]], broken=[1.0, [2.0, 4.0]]),
        Measurement("loss", torch.tensor([math.nan]), healthy=torch.tensor([1.0]), broken=torch.tensor([2.0])),
        Measurement("loss", numpy.float32("nan"), healthy=1.0, broken=AnyOther("not a number")),
    ],
)
def test_nan_proves_nothing(side: str, measurement: Measurement) -> None:
    verdict = judge(side, SILENT, ranks(measurement, measurement))
    assert verdict.word == CRASHED
    assert verdict.why.endswith("is NaN")


@pytest.mark.parametrize("side", [REPRO, FIX])
@pytest.mark.parametrize(
    ("healthy", "broken"),
    [(1.0, 1.0), (1.0, 1.0 + 1e-6), ([1.0, 2.0], [1.0, 2.0]), ("a", "a"), (None, None), ([], []), (torch.ones(2), numpy.ones(2))],
)
def test_healthy_equal_to_broken_proves_nothing(side: str, healthy: Any, broken: Any) -> None:
    measurement = Measurement("loss", healthy, healthy, broken)
    verdict = judge(side, SILENT, ranks(measurement, measurement))
    assert verdict.word == CRASHED
    assert "healthy equals broken" in verdict.why


def test_any_other_value_needs_a_reason() -> None:
    measurement = Measurement("loss", 5.0, healthy=1.0, broken=AnyOther("it depends on the order of arrival"))
    assert word(REPRO, ranks(measurement, measurement)) == REPRODUCED
    assert word(FIX, ranks(measurement, measurement)) == NOT_FIXED
    assert word(FIX, ranks(replace(measurement, value=1.0))) == FIXED
    assert word(REPRO, ranks(replace(measurement, broken=AnyOther("")))) == CRASHED


@pytest.mark.parametrize("told", [{"notices": (Notice("UserWarning", "look out"),)}, {"output": "look out\n"}])
def test_a_silent_repro_that_speaks_is_not_silent(told: dict[str, Any]) -> None:
    first, second = ranks(BROKEN, BROKEN)
    verdict = judge(REPRO, SILENT, [first, replace(second, **told)])
    assert (verdict.word, verdict.why) == (NOT_REPRODUCED, "documented as silent, but rank 1 was told: look out")


def test_a_fix_may_warn() -> None:
    first, second = ranks(HEALTHY, HEALTHY)
    assert word(FIX, [first, replace(second, notices=(Notice("UserWarning", "look out"),))]) == FIXED


WORDS = Raises(RuntimeError, "sizes differ")
ERROR = Ended(1, "raised", error_types=("Mine", "RuntimeError", "Exception"), message="the sizes differ: 1 and 2")
WAITING = Ended(0, "unfinished", message="was stopped after another rank had failed")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WORDS, REPRODUCED),
        (Raises("Mine", "sizes differ"), REPRODUCED),
        (Raises(ValueError, "sizes differ"), CRASHED),
        (Raises("RuntimeErrors", "sizes differ"), CRASHED),
        (Raises(RuntimeError, "sizes are the same"), CRASHED),
        (SILENT, CRASHED),
        (Hangs({}, others="barrier"), CRASHED),
        (Dies("SIGABRT", "sizes differ"), CRASHED),
    ],
)
def test_an_error(kind: Kind, expected: str) -> None:
    assert word(REPRO, [WAITING, ERROR], kind) == expected
    assert word(FIX, [WAITING, ERROR], kind) == CRASHED


def test_an_error_that_does_not_come() -> None:
    verdict = judge(REPRO, WORDS, ranks(BROKEN, BROKEN))
    assert verdict.word == NOT_REPRODUCED
    assert "every rank finished" in verdict.why


def test_the_first_error_counts() -> None:
    aftermath = Ended(0, "raised", error_types=("RuntimeError",), message="connection closed", order=1)
    assert word(REPRO, [aftermath, ERROR], WORDS) == REPRODUCED
    assert word(REPRO, [replace(aftermath, order=0), replace(ERROR, order=1)], WORDS) == CRASHED


DEATH = Ended(1, "died", message="was ended by SIGABRT", signal="SIGABRT", output="terminate called after throwing EnforceNotMet")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Dies("SIGABRT", "EnforceNotMet"), REPRODUCED),
        (Dies("SIGSEGV", "EnforceNotMet"), CRASHED),
        (Dies("SIGABRT", "out of memory"), CRASHED),
        (SILENT, CRASHED),
        (WORDS, CRASHED),
    ],
)
def test_a_death(kind: Kind, expected: str) -> None:
    assert word(REPRO, [WAITING, DEATH], kind) == expected
    assert word(FIX, [WAITING, DEATH], kind) == CRASHED


STUCK = [Ended(0, "stuck", line="fabric.barrier()"), Ended(1, "stuck", line="loss.backward()")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Hangs({0: "barrier(", 1: "backward("}), REPRODUCED),
        (Hangs({0: "barrier("}, others="backward("), REPRODUCED),
        (Hangs({0: "backward(", 1: "barrier("}), CRASHED),  # the wrong way round
        (Hangs({0: "barrier("}), CRASHED),  # says nothing of rank 1
        (Hangs({}, others=FINISHED), CRASHED),
        (SILENT, CRASHED),
        (WORDS, CRASHED),
    ],
)
def test_a_hang(kind: Kind, expected: str) -> None:
    assert word(REPRO, STUCK, kind) == expected
    assert word(FIX, STUCK, kind) == CRASHED


def test_a_hang_in_which_one_rank_has_finished() -> None:
    ended = [STUCK[0], Ended(1, "measured", BROKEN)]
    assert word(REPRO, ended, Hangs({0: "barrier("}, others=FINISHED)) == REPRODUCED
    assert word(REPRO, ended, Hangs({0: "barrier(", 1: "backward("})) == CRASHED
    assert not stands_as_documented(Hangs({0: "barrier("}, others=FINISHED), {0: None, 1: FINISHED})


def test_ranks_that_still_run_are_not_stuck() -> None:
    running = [replace(end, how="unfinished", message="was still running after 30 seconds") for end in STUCK]
    verdict = judge(REPRO, Hangs({0: "barrier(", 1: "backward("}), running)
    assert verdict.word == CRASHED
    assert "rank 1 was still running after 30 seconds at `loss.backward()`" in verdict.why


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1.0, 1.00001, True),
        (1.0, 1.001, False),
        (0.0, 1e-6, True),
        (1, 1.0, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, True),
        ([1.0, [2.0]], [1.0, [2.0]], True),
        ([1.0], [1.0, 2.0], False),
        ([], [1.0], False),
        ("1", 1, False),
        (None, 0, False),
        ("cuda:0", "cuda:1", False),
    ],
)
def test_same(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal
    assert same(b, a) is equal


def test_tensors_and_arrays_become_lists() -> None:
    measurement = Measurement("loss", torch.ones(2), healthy=[numpy.ones(1), numpy.int64(3)], broken=(torch.tensor(2.0),))
    assert (measurement.value, measurement.healthy, measurement.broken) == ([1.0, 1.0], [[1.0], 3], [2.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.123"),
        (1e-12, "1e-12"),
        (7, "7"),
        (None, "None"),
        ("cuda:0", "cuda:0"),
        ([1.0, 2.0], "[1, 2]"),
        ([float(n) for n in range(165)], "[0, 1, 2, ...] (165 values)"),
        (AnyOther("of the race"), "anything else (of the race)"),
    ],
)
def test_values_are_shown_short(value: Any, text: str) -> None:
    assert shown(value) == text
