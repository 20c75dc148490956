"""Real ranks that end in every way: each verdict is right, comes in bounded time, and nothing is left (see conftest.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support import SCRIPTS, Finished, judged, run_script, start_script, until

from ddp_pitfalls import supervise
from ddp_pitfalls.measure import CRASHED, FIX, FIXED, NOT_REPRODUCED, REPRODUCED, Ended, Verdict
from ddp_pitfalls.supervise import PATIENCE

METHODS = ("fork", "forkserver") if sys.platform == "linux" else ("forkserver",)
SHORT = 2.5  # seconds of patience where the test is about a hang that is not documented


def how(verdict: Verdict) -> list[str]:
    return [end.how for end in verdict.ranks]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_all_measure(method: str) -> None:
    verdict = judged("endings", "all_measure", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    assert how(verdict) == ["measured", "measured"]


def test_an_exception_on_one_rank(method: str) -> None:
    verdict = judged("endings", "one_raises", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    waiting, error = verdict.ranks
    assert waiting.how == "unfinished"
    assert error.error_types[0] == "ValueError"
    assert error.line == 'raise ValueError("the error of rank 1")'
    assert "in one_raises" in error.stack


def test_failures_are_numbered_as_they_are_heard() -> None:
    ranks = [supervise.Rank(number, Mock(), Mock(), out=-1, err=-1, stacks=-1) for number in range(3)]
    for number in (2, 0, 1):
        supervise._note(ranks, ranks[number], ("ended", Ended(number, "raised")))
    assert [rank.ended.order for rank in ranks if rank.ended] == [1, 2, 0]


@pytest.mark.parametrize(
    ("variant", "documented"), [("wrong_type", "documented: TypeError"), ("wrong_words", "documented: ValueError with 'other words'")]
)
def test_another_error_than_documented(variant: str, documented: str) -> None:
    verdict = judged("endings", variant)
    assert verdict.word == CRASHED
    assert "rank 1 raised ValueError" in verdict.why
    assert documented in verdict.why


def test_sys_exit_on_one_rank(method: str) -> None:
    verdict = judged("endings", "sys_exit", method=method)
    assert (verdict.word, verdict.why) == (CRASHED, "rank 1 raised SystemExit at `sys.exit(3)`: 3")


def test_os_exit_on_one_rank(method: str) -> None:
    verdict = judged("endings", "os_exit", method=method)
    assert (verdict.word, verdict.why) == (CRASHED, "rank 1 left in the variant with exit code 3, without a measurement")


def test_one_rank_returns_while_the_other_waits(method: str) -> None:
    verdict = judged("endings", "one_returns", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    assert how(verdict) == ["stuck", "measured"]


def test_gloo_aborts_where_sizes_differ(method: str) -> None:
    verdict = judged("endings", "sizes_differ", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    dead = next(end for end in verdict.ranks if end.how == "died")
    assert dead.signal == "SIGABRT"


def test_abort_on_one_rank(method: str) -> None:
    verdict = judged("endings", "aborts", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    assert verdict.ranks[1].signal == "SIGABRT"


def test_a_death_is_judged_though_its_peer_tells_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "AFTERMATH", 60.0)  # however busy the machine: it is over once both ranks have ended
    verdict = judged("endings", "aborts_after_its_peer")
    assert verdict.word == REPRODUCED, verdict.why
    assert how(verdict) == ["raised", "died"]


def test_another_signal_than_documented() -> None:
    verdict = judged("endings", "wrong_signal")
    assert (verdict.word, verdict.why) == (CRASHED, "rank 1 was ended by SIGABRT (documented: SIGKILL after '')")


def test_different_collectives(method: str) -> None:
    verdict = judged("endings", "collectives_differ", method=method)
    assert verdict.word == REPRODUCED, verdict.why
    assert [end.line for end in verdict.ranks] == ["dist.barrier()", "dist.all_reduce(torch.ones(1))"]
    assert all("in collectives_differ" in end.stack for end in verdict.ranks)


def test_a_hang_elsewhere_than_documented() -> None:
    verdict = judged("endings", "hangs_elsewhere", patience=SHORT)
    assert verdict.word == CRASHED
    assert "hangs elsewhere: rank 0 is stuck at `dist.barrier()`; rank 1 is stuck at `dist.all_reduce(torch.ones(1))`" in verdict.why
    assert "documented: rank 0: dist.all_reduce; rank 1: dist.all_reduce" in verdict.why


def test_a_hang_where_none_is_documented() -> None:
    verdict = judged("endings", "hangs_though_silent", patience=SHORT)
    assert (verdict.word, verdict.why) == (CRASHED, "hangs: rank 0 is stuck at `dist.barrier()`; rank 1 measured broken")


@pytest.mark.parametrize(("variant", "patience"), [("one_sleeps", PATIENCE), ("one_is_busy", SHORT)])
def test_one_rank_stuck_outside_any_collective(variant: str, patience: float, method: str) -> None:
    """One that computes may come to an end, and is only called stuck when all patience is over."""
    verdict = judged("endings", variant, method=method, patience=patience)
    assert verdict.word == REPRODUCED, verdict.why
    assert how(verdict) == ["stuck", "stuck"]


def test_ranks_that_move_on_are_not_called_stuck() -> None:
    verdict = judged("endings", "moves_on", patience=SHORT)
    assert verdict.word == CRASHED
    assert "rank 1 was still running after 2.5 seconds" in verdict.why


@pytest.mark.parametrize(
    ("variant", "word", "why"),
    [
        ("warns", NOT_REPRODUCED, "documented as silent, but rank 0 was told: gradients may be wrong"),
        ("writes_to_stderr", NOT_REPRODUCED, "documented as silent, but rank 0 was told: from a library"),
        ("is_healthy", NOT_REPRODUCED, "every rank is healthy"),
        ("is_nan", CRASHED, "rank 0, state: value is NaN"),
        ("is_neither", CRASHED, "rank 0, state: something else is neither healthy nor broken"),
        ("tells_nothing", CRASHED, "rank 0, state: healthy equals broken (same), so the measurement can tell nothing"),
        ("one_is_broken", REPRODUCED, ""),
    ],
)
def test_what_ranks_say_is_judged(variant: str, word: str, why: str) -> None:
    verdict = judged("endings", variant)
    assert (verdict.word, verdict.why) == (word, why)


def test_a_variant_that_returns_no_measurement() -> None:
    verdict = judged("endings", "returns_nothing")
    assert verdict.word == CRASHED
    assert "returns_nothing returned NoneType, not a Measurement" in verdict.why


def test_a_measurement_that_cannot_be_sent() -> None:
    verdict = judged("endings", "returns_what_cannot_travel")
    assert verdict.word == CRASHED
    assert "pickle" in "".join(end.output + end.message for end in verdict.ranks)


def test_four_ranks() -> None:
    verdict = judged("ranks", "size", FIX, ranks=4)
    assert verdict.word == FIXED, verdict.why
    assert [end.rank for end in verdict.ranks] == [0, 1, 2, 3]


@pytest.mark.parametrize("variant", ["generators", "files", "address", "size"])
def test_what_a_rank_finds(variant: str, method: str) -> None:
    verdict = judged("ranks", variant, FIX, method=method)
    assert verdict.word == FIXED, verdict.why


@pytest.mark.skipif("fork" not in METHODS, reason="needs a fork, which inherits the variables of this test")
def test_a_slurm_allocation_does_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in {**slurm, "SLURM_NODEID": "0", "SLURM_NODELIST": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    verdict = judged("ranks", "size", FIX, method="fork")
    assert verdict.word == FIXED, verdict.why


def test_spawned_ranks() -> None:
    """The variant asks for spawn itself, and what holds for forked ranks holds for these."""
    verdict = judged("ranks", "spawned", FIX, method="forkserver")
    assert verdict.word == FIXED, verdict.why


def test_no_descriptor_is_left_open() -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc")
    before = len(list(folder.iterdir()))
    for variant in ("all_measure", "one_raises", "os_exit"):
        judged("endings", variant)
    assert len(list(folder.iterdir())) == before


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def processes_in(notes: Path) -> list[int]:
    """The ranks of ``waits.py`` and their children, once all of them are there."""
    found = [note.read_text().split() for note in notes.glob("rank?")]
    return [int(pid) for pids in found for pid in pids] if len(found) == 2 else []


def ended_by(number: signal.Signals, notes: Path) -> Finished:
    """Run a script whose ranks never end, and signal it when all of them are there."""
    command = [sys.executable, str(SCRIPTS / "repros" / "waits.py"), "--variant", "for_ever"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "NOTES": str(notes)}, text=True, start_new_session=True, **pipes) as script:  # type: ignore[call-overload]
        try:
            pids = until(lambda: processes_in(notes) or script.poll() is not None, "ranks that have started")
            if number == signal.SIGINT:
                os.killpg(script.pid, number)  # Ctrl-C goes to everybody in the foreground
            else:
                script.send_signal(number)
            out, err = script.communicate(timeout=60)
        finally:
            script.kill()
    assert isinstance(pids, list), err
    until(lambda: all(gone(pid) for pid in pids), "the ranks and their children to end")
    return Finished(script.returncode, out, err)


def test_ctrl_c(tmp_path: Path) -> None:
    finished = ended_by(signal.SIGINT, tmp_path)
    assert finished.code == 128 + signal.SIGINT
    assert finished.err == "interrupted; every rank has been ended\n"


@pytest.mark.skipif("fork" not in METHODS, reason="is about forks")
@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_ctrl_c_while_a_rank_is_forked_is_not_lost(moment: str) -> None:
    finished = run_script(SCRIPTS / "repros" / "signalled_forks.py", SIGNALLED=moment)
    assert (finished.code, finished.err) == (128 + signal.SIGINT, "interrupted; every rank has been ended\n")


@pytest.mark.skipif("fork" not in METHODS, reason="is about forks")
def test_a_rank_takes_no_ctrl_c_that_came_while_it_was_forked() -> None:
    finished = run_script(SCRIPTS / "repros" / "signalled_forks.py", SIGNALLED="after_in_child")
    assert (finished.code, finished.err) == (0, "")


def test_sigterm(tmp_path: Path) -> None:
    finished = ended_by(signal.SIGTERM, tmp_path)
    assert finished.code == 128 + signal.SIGTERM
    assert finished.err == "terminated; every rank has been ended\n"


def test_sigkill(tmp_path: Path) -> None:
    finished = ended_by(signal.SIGKILL, tmp_path)
    assert finished.code == -signal.SIGKILL


def test_sigkill_while_spawned_ranks_start(tmp_path: Path) -> None:
    """The ranks have not come to their first line yet; conftest.py sees that they end all the same."""
    arguments = ("--variant", "for_ever_spawned")
    script = start_script(SCRIPTS / "repros" / "waits.py", arguments, {"NOTES": str(tmp_path)}, tmp_path / "out", tmp_path / "err")
    try:
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children")
        if not children.exists():
            pytest.skip("needs /proc")
        spawned = until(lambda: [int(pid) for pid in children.read_text().split() if spawns(int(pid))], "a rank")
    finally:
        script.kill()
        script.join()
        script.close()
    until(lambda: all(gone(pid) for pid in spawned), "the ranks to end")
    assert not list(tmp_path.glob("rank*"))


def spawns(pid: int) -> bool:
    try:
        return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
