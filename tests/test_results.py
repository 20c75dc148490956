"""Results files: what is kept of a run, that a file comes back as it was written, and that a bad file is told from a good one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddp_pitfalls import results
from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.measure import AnyOther, Dies, Ended, Hangs, Kind, Measurement, Notice, Raises, Series, Silent, Verdict, judge
from ddp_pitfalls.results import BadResults, Environment, Failure, PairResult, Results, Told, VariantResult, variant_result

HERE = Environment("2.13.0", "2.6.6", "cpu", "gloo", 2, "3.11.7", "x86_64, 2 CPU cores")


def ended(rank: int, value: Any, healthy: Any = 1.0, broken: Any = 0.0, series: Series | None = None) -> Ended:
    return Ended(rank, "measured", Measurement("sum", value, healthy, broken, series))


def kept(*ranks: Ended, kind: Kind | None = None, side: str = "repros", varies: bool = False) -> VariantResult:
    kind = kind or Silent()
    return variant_result(kind, judge(side, kind, ranks), varies)


def every_kind() -> Results:
    """A file with each way in which a variant can end."""
    curve = Series("loss", [0.123456, math.nan, -math.inf, 0], x="epoch")
    raised = Ended(1, "raised", error_types=("RuntimeError", "Exception"), message="head\nfound 2 devices\ntail", line="run()")
    died = Ended(0, "died", message="was ended by SIGABRT", signal="SIGABRT", output="noise\nlength <= nbytes\n", line=None)
    hangs = [Ended(0, "stuck", line="fabric.save(path)"), ended(1, 5.0)]
    repro = {
        "silent": kept(
            ended(0, list(range(165)), [*range(164), 0], list(range(165)), curve), ended(1, [0.5] * 7, [1.5] * 7, AnyOther("a race"))
        ),
        "raises": kept(ended(0, 1.0), raised, kind=Raises(RuntimeError, "found 2")),
        "dies": kept(died, kind=Dies("SIGABRT", "length")),
        "hangs": kept(*hangs, kind=Hangs({0: "fabric.save", 1: "(finished)"})),
        "varies": kept(ended(0, 0.0), varies=True),
        "unmeasured": variant_result(Silent(), Verdict("not measured", "needs a GPU"), False),
        "text": kept(ended(0, 'a "quoted"\n\tstring', None, "\N{SNOWMAN}")),
    }
    return Results(
        results.FORMAT, HERE, {"some-pitfall": PairResult("2026-01-02", repro, {name: kept(ended(0, 1.0), side="fixes") for name in repro})}
    )


def written(folder: Path, found: Results) -> Path:
    results.write(folder, found)
    return folder / f"{found.environment.name}.json"


# What is kept


def test_of_a_long_list_the_beginning_is_kept() -> None:
    [rank] = kept(ended(0, [1.23456] * 165, [1.0] * 7, [0.0] * 6)).ranks
    assert rank.measured is not None
    assert rank.measured.value == [1.23] * 6 + ["... 165 values"]
    assert rank.measured.healthy == [1.0] * 6 + ["... 7 values"]
    assert rank.measured.broken == [0.0] * 6
    [rank] = kept(ended(0, [[1] * 9, [2]], [[1]], [])).ranks
    assert rank.measured is not None
    assert rank.measured.value == [[1] * 6 + ["... 9 values"], [2]]


def test_numbers_have_three_digits_and_may_be_infinite() -> None:
    [rank] = kept(ended(0, math.inf, [1234.5, -math.inf], -0.00012345, Series("loss", [math.nan, 1.2345]))).ranks
    assert rank.measured is not None
    assert (rank.measured.value, rank.measured.healthy, rank.measured.broken) == ("inf", [1230.0, "-inf"], -0.000123)
    assert rank.curve is not None
    assert rank.curve.points == [None, 1.23]


def test_a_value_that_cannot_be_predicted_keeps_its_reason() -> None:
    [rank] = kept(ended(0, 5.0, 1.0, AnyOther("a race"))).ranks
    assert rank.measured is not None
    assert (rank.measured.broken, rank.measured.broken_is) == (None, "a race")
    assert rank.measured.as_measurement().broken == AnyOther("a race")


def test_what_varies_from_run_to_run_keeps_its_verdict_alone() -> None:
    assert kept(ended(0, 0.0), varies=True) == VariantResult("reproduced", "silent")


def test_of_an_error_the_documented_line_is_kept() -> None:
    repro = every_kind().pitfalls["some-pitfall"].repro
    assert repro["raises"].failure == Failure("RuntimeError", "found 2 devices", "run()")
    assert repro["dies"].failure == Failure("SIGABRT", "length <= nbytes")
    assert [(rank.line, rank.measured is None) for rank in repro["hangs"].ranks] == [("fabric.save(path)", True), ("", False)]


def test_what_ranks_were_told_is_kept_once_and_in_order() -> None:
    told = [
        Ended(
            rank,
            "measured",
            Measurement("sum", 0.0, 1.0, 0.0),
            notices=(Notice("UserWarning", "\nb\nc"), Notice("UserWarning", "a")),
            output=" \nsaid\n",
        )
        for rank in range(2)
    ]
    assert kept(*told).told == [Told("UserWarning", "a"), Told("UserWarning", "b"), Told("error output", "said")]


def test_a_recorded_measurement_can_be_judged_again() -> None:
    [rank] = kept(ended(0, [0.1] * 9, [0.2] * 9, [0.1] * 9)).ranks
    assert rank.measured is not None
    assert rank.measured.as_measurement().state() == "broken"
    assert judge("fixes", Silent(), [Ended(0, "measured", rank.measured.as_measurement())]).word == "not fixed"


# To a file and back


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "new", every_kind())
    before = path.read_bytes()
    assert results.read(path) == every_kind()
    assert results.write(path.parent, results.read(path)) is False
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert before.endswith(b"}\n")
    json.loads(before)


def test_the_recorded_files_are_as_they_would_be_written(tmp_path: Path) -> None:
    files = sorted((ROOT / "results").glob("*.json"))
    assert files
    for path in files:
        assert written(tmp_path, results.read(path)).read_bytes() == path.read_bytes()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, every_kind())
    before = path.read_bytes()

    def full(*_: object) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        results.write(tmp_path, msgspec.structs.replace(every_kind(), pitfalls={}))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# Files that are not results


def test_every_truncation_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, every_kind())
    whole = path.read_bytes().rstrip()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadResults, match=r"is damaged or not a results file .*: restore it with git, or record again") as error:
            results.read(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe{}",
        b'{"a": "\xff"}',
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b"{}",
        b'{"format": 1}',
        b'{"format": "1"}',
        b"[" * 100_000,
    ],
    ids=range(12),
)
def test_a_foreign_file_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(BadResults, match=r"some\.json: is damaged or not a results file"):
        results.read(path)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown field": ("", {"extra": 1}),
    "an unknown field of the environment": ("environment", {"gpu": "none"}),
    "a missing field": ("environment", {"torch": None}),
    "a release that is none": ("environment", {"torch": "newest"}),
    "one rank": ("environment", {"ranks": 1}),
    "text for a number": ("environment", {"ranks": "2"}),
    "an unknown verdict": ("pitfalls/some-pitfall/repro/silent", {"verdict": "seen"}),
    "an unknown kind": ("pitfalls/some-pitfall/repro/silent", {"kind": "slow"}),
    "a day that is none": ("pitfalls/some-pitfall", {"recorded": "2026-13-01"}),
    "a rank that is text": ("pitfalls/some-pitfall/repro/silent/ranks/0", {"rank": "0"}),
    "a curve of text": ("pitfalls/some-pitfall/repro/silent/ranks/0/curve", {"points": ["high"]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_with_one_thing_wrong_is_damage(tmp_path: Path, change: str) -> None:
    where, fields = CHANGES[change]
    path = written(tmp_path, every_kind())
    content = json.loads(path.read_text())
    place = content
    for step in filter(None, where.split("/")):
        place = place[int(step) if step.isdigit() else step]
    for name, value in fields.items():
        place[name] = value
        if value is None:
            del place[name]
    path.write_text(json.dumps(content))
    with pytest.raises(BadResults, match="is damaged or not a results file"):
        results.read(path)


@pytest.mark.parametrize(
    ("number", "mend"), [(results.FORMAT + 1, "update ddp-pitfalls"), (99, "update ddp-pitfalls"), (results.FORMAT - 1, "record again")]
)
def test_another_format_is_told(tmp_path: Path, number: int, mend: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"format": number, "whatever": "it holds"}))
    with pytest.raises(BadResults, match=f"is of format {number}, and this version reads {results.FORMAT}: {mend}"):
        results.read(path)


def test_a_file_of_another_environment_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, every_kind())
    other = path.rename(tmp_path / "torch-2.0.1-lightning-2.0.2-cpu-gloo-2.json")
    with pytest.raises(BadResults, match=rf"{other.name}: holds the results of {HERE.name}: name it {path.name}"):
        results.read(other)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "absent.json", tmp_path / "folder.json"):
        with pytest.raises(BadResults, match=rf"{path.name}: cannot be read: "):
            results.read(path)


def test_all_files_come_newest_torch_first(tmp_path: Path) -> None:
    for torch, ranks in (("2.9.1", 2), ("2.13.0", 4), ("2.0.1", 2), ("2.13.0", 2)):
        written(tmp_path, Results(results.FORMAT, msgspec.structs.replace(HERE, torch=torch, ranks=ranks), {}))
    found = [(r.environment.torch, r.environment.ranks) for r in results.read_all(tmp_path)]
    assert found == [("2.13.0", 2), ("2.13.0", 4), ("2.9.1", 2), ("2.0.1", 2)]
    assert results.read_all(tmp_path / "absent") == []


# Recording again


def recorded(value: float, date: str = "2026-01-02", environment: Environment = HERE, id: str = "some-pitfall", **more: Any) -> Results:
    pair = PairResult(date, {"v": msgspec.structs.replace(kept(ended(0, value)), **more)}, {"v": kept(ended(0, 1.0), side="fixes")})
    return Results(results.FORMAT, environment, {id: pair})


def test_the_first_record_is_taken_as_it_is() -> None:
    assert results.merged(None, recorded(0.0)) == recorded(0.0)


def test_what_was_measured_again_stays_as_it_was(tmp_path: Path) -> None:
    old = recorded(0.1)
    elsewhere = msgspec.structs.replace(HERE, python="3.12.1")
    assert results.merged(old, recorded(0.1001, date="2026-02-03", environment=elsewhere)) == old  # the day and the machine do not change
    assert results.write(tmp_path, old)
    assert not results.write(tmp_path, results.merged(old, recorded(0.1001, date="2026-02-03")))


def test_small_differences_do_not_add_up() -> None:
    record = recorded(0.1)
    for value in (0.1001, 0.1002, 0.1003, 0.1004, 0.101):
        record = results.merged(record, recorded(value, date="2026-02-03"))
    assert record == recorded(0.101, date="2026-02-03")


@pytest.mark.parametrize(
    "more", [{"verdict": "not reproduced"}, {"why": "other"}, {"told": [Told("UserWarning", "new")]}, {"kind": "hangs"}, {"ranks": []}]
)
def test_another_outcome_is_taken_with_its_day_and_machine(more: dict[str, Any]) -> None:
    elsewhere = msgspec.structs.replace(HERE, python="3.12.1")
    new = recorded(0.1, date="2026-02-03", environment=elsewhere, **more)
    assert results.merged(recorded(0.1), new) == new


def test_pitfalls_that_were_not_run_stay() -> None:
    both = results.merged(recorded(0.1, id="b"), recorded(0.1, id="a"))
    assert list(both.pitfalls) == ["a", "b"]
    assert both.pitfalls["b"] == recorded(0.1).pitfalls["some-pitfall"]


def test_messages_are_alike_but_for_their_digits() -> None:
    assert results.alike(Failure("E", "port 29500, rank 1", "f()"), Failure("E", "port 1, rank 22", "f()"))
    assert results.alike(Told("W", "pid 1"), Told("W", "pid 2"))
    assert not results.alike(Failure("E", "port 1", "f()"), Failure("E", "port 1", "g()"))
    assert not results.alike(Failure("E", "a 1", "f()"), Failure("E", "b 1", "f()"))
    assert not results.alike(Failure("E", "a", "f()"), Failure("F", "a", "f()"))
    assert not results.alike(Told("W", "a"), Told("V", "a"))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (1.0, 1.001, True),
        (1.0, 1.01, False),
        (0.0, 1e-6, True),
        (0.0, 1e-3, False),
        (1, 1, True),
        (1, 2, False),
        (1, 1.0, False),
        ("a 1", "a 2", False),
        ([1.0, "... 9 values"], [1.0005, "... 9 values"], True),
        ([1.0, "... 9 values"], [1.0, "... 8 values"], False),
        ([1.0], [1.0, 1.0], False),
        ({"a": 1.0}, {"a": 1.0005}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        (None, None, True),
        (None, 0.0, False),
    ],
)
def test_alike(old: object, new: object, same: bool) -> None:
    assert results.alike(old, new) is same


def test_what_was_lost_is_named() -> None:
    good, bad = kept(ended(0, 0.0)), msgspec.structs.replace(kept(ended(0, 0.0)), verdict="crashed")
    fixed = kept(ended(0, 1.0), side="fixes")
    old = PairResult("2026-01-02", {"a": good, "b": bad, "gone": good}, {"a": fixed})
    assert results.lost(old, PairResult("2026-01-02", {"a": bad, "b": bad}, {"a": fixed})) == ["repros/a"]
    assert results.lost(old, PairResult("2026-01-02", {"a": good, "b": good}, {"a": bad})) == ["fixes/a"]
    assert results.lost(old, old) == []
