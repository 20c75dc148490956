"""Many scripts at once: whatever one of them does, the others are judged, the faulty one is reported, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support import python, until

from ddp_pitfalls import results
from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.measure import CRASHED, FIX, FIXED, REPRO, REPRODUCED
from ddp_pitfalls.record import record
from ddp_pitfalls.runner import Asked, NotHere, ScriptRun, run
from ddp_pitfalls.verify import verify

HEAD = '''"""A script of the tests."""

import os
import signal
import subprocess
import sys
import time

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.measure import Hangs, Measurement


'''
GOOD = """@variant
def one(fabric):
    return Measurement("number", {value}, healthy=0.0, broken=1.0)
"""
PARENT = 'int(open(f"/proc/{os.getppid()}/stat").read().rpartition(") ")[2].split()[1])'

FAULTS = {  # what a variant of a repro does, and what is said of it
    "one-rank-killed": ("if fabric.global_rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n    fabric.barrier()", "SIGKILL"),
    "all-ranks-killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "leaves": ("os._exit(0)", "left in the variant with exit code 0"),
    "never-returns": ("while True:\n        time.sleep(1000)", "hangs"),
    "raises": ('raise ValueError("this one")', "raised ValueError at `raise ValueError"),
    "prints-a-megabyte": ('print("x" * 1_000_000)\n    sys.stderr.write("y" * 1_000_000)\n    raise OSError("after it")', "after it"),
    "starts-a-child": ('subprocess.Popen(["sleep", "1000"])\n    raise OSError("its child runs")', "its child runs"),
}
PROBLEMS = {  # what stands at the top of a script, and what is said of the script
    "does-not-parse": ("def x(:\n", "cannot be imported: SyntaxError"),
    "leaves-at-import": ("os._exit(3)\n", "left without a word"),
    "raises-at-import": ("raise KeyError('gone')\n", "cannot be imported: KeyError"),
    "has-no-variant": ("", "no function is marked @variant"),
    "starts-threads": (
        "import torch\ntorch.set_num_threads(2)\ntorch.ones(999, 999) @ torch.ones(999, 999)\n" + GOOD.format(value="1.0"),
        "main()",
    ),
}


def write(root: Path, side: str, pitfall: str, text: str) -> tuple[str, Path]:
    path = root / side / f"{pitfall.replace('-', '_')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return pitfall, path


def good(root: Path, pitfall: str = "good") -> list[tuple[str, Path]]:
    return [
        write(root, REPRO, pitfall, HEAD + GOOD.format(value="1.0")),
        write(root, FIX, pitfall, HEAD + GOOD.format(value="0.0")),
    ]


def faulty(root: Path, pitfall: str, body: str) -> tuple[str, Path]:
    return write(root, REPRO, pitfall, f"{HEAD}@variant\ndef one(fabric):\n    {body}\n")


def words(runs: list[ScriptRun]) -> dict[tuple[str, str], str]:
    return {(script.pitfall, script.side): script.outcomes[0].verdict.word for script in runs if script.outcomes}


ON_CPU = Asked(accelerator="cpu")
GOOD_WORDS = {("good", REPRO): REPRODUCED, ("good", FIX): FIXED}


def test_faults_in_flight(tmp_path: Path) -> None:
    scripts = [faulty(tmp_path, name, body) for name, (body, _) in FAULTS.items()]
    scripts += [write(tmp_path, REPRO, name, HEAD + text) for name, (text, _) in PROBLEMS.items()]
    runs = list(run([*scripts[::2], *good(tmp_path), *scripts[1::2]], Asked(patience=1.3), jobs=3))
    said = {script.pitfall: script.problem or script.outcomes[0].verdict.why for script in runs if script.pitfall != "good"}
    for name, (_, expected) in {**FAULTS, **PROBLEMS}.items():
        assert expected in said[name], (name, said[name])
    assert {key: word for key, word in words(runs).items() if key[0] == "good"} == GOOD_WORDS
    assert all(not script.as_documented for script in runs if script.pitfall != "good")


def test_the_process_of_a_script_is_killed(tmp_path: Path) -> None:
    bad = faulty(tmp_path, "kills-its-supervisor", "os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(1000)")
    runs = list(run([bad, *good(tmp_path)], Asked(), jobs=3))
    assert words(runs) == GOOD_WORDS
    assert [script.problem for script in runs if script.pitfall != "good"] == ["its process was ended from outside, or left without a word"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the warm process in /proc")
def test_the_warm_process_is_killed(tmp_path: Path) -> None:
    """The scripts that run already go on; the next ones get a new warm process."""
    good(tmp_path, "kills")
    faulty(tmp_path, "kills", f"os.kill({PARENT}, signal.SIGKILL)\n    raise ValueError('it is dead')")
    good(tmp_path)
    done = python("-m", "ddp_pitfalls", "run", "--json", "--jobs", "1", "--root", tmp_path)
    found = {(one["pitfall"], one["side"]): one["variants"][0]["verdict"] for one in json.loads(done.out)}
    assert found == {**GOOD_WORDS, ("kills", REPRO): CRASHED, ("kills", FIX): FIXED}


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ddp_pitfalls", "run", "--root", str(root), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.mark.parametrize(("signals", "code"), [([signal.SIGKILL], -9), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143)])
def test_the_runner_is_ended(tmp_path: Path, signals: list[signal.Signals], code: int) -> None:
    mark = tmp_path / "mark"
    faulty(tmp_path, "waits", f"open({str(mark)!r}, 'w').close()\n    subprocess.Popen(['sleep', '1000'])\n    time.sleep(1000)")
    good(tmp_path, "waits")
    faulty(tmp_path, "waits", f"open({str(mark)!r}, 'w').close()\n    subprocess.Popen(['sleep', '1000'])\n    time.sleep(1000)")
    process = start(tmp_path)
    until(mark.exists, "the ranks")
    for number in signals:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    assert "Traceback" not in err


def test_a_full_temporary_folder(tmp_path: Path) -> None:
    """A folder that does not exist stands for a full one: both refuse a new file."""
    scripts = good(tmp_path)
    for _, path in scripts:
        path.write_text(path.read_text().replace("import os\n", "import os\nimport tempfile\ntempfile.tempdir = '/nowhere'\n"))
    others = [(f"other-{number}", other) for number, (_, other) in enumerate(good(tmp_path, "other"))]
    runs = list(run([*scripts, *others], Asked(), jobs=2))
    assert {script.problem for script in runs if script.pitfall == "good"} == {"no room for the files of a run in /nowhere: set TMPDIR"}
    assert sorted(script.outcomes[0].verdict.word for script in runs if script.outcomes) == [FIXED, REPRODUCED]


def test_programs_read_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path)
    faulty(tmp_path, "raises", 'raise ValueError("<this one>")')
    good(tmp_path, "raises")
    faulty(tmp_path, "raises", 'raise ValueError("<this one>")')
    assert verify(tmp_path, [], Asked(), jobs=2, as_json=True) == 1
    found = {(one["pitfall"], one["side"]): one for one in json.loads(capsys.readouterr().out)}
    assert found["good", REPRO]["variants"][0]["verdict"] == REPRODUCED
    assert not found["raises", REPRO]["as_documented"]
    assert "<this one>" in found["raises", REPRO]["variants"][0]["why"]
    assert found["raises", REPRO]["variants"][0]["news"].startswith("fails in another way with torch")


def test_an_unknown_id_gets_the_nearest_names() -> None:
    done = python("-m", "ddp_pitfalls", "run", "ddp-cpu-mov")
    assert (done.code, done.out) == (2, "")
    assert done.err == "no pitfall is called 'ddp-cpu-mov': did you mean ddp-cpu-move?\n"


def recorded(root: Path, asked: Asked = ON_CPU) -> int:
    return record(root, [], asked, jobs=2, replace=False, spawn=False)


def test_recording_again_leaves_the_file_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also when another machine and another day had measured it first."""
    good(tmp_path)
    assert recorded(tmp_path) == 0
    assert capsys.readouterr().out.endswith(": written\n")
    [path] = (tmp_path / "results").iterdir()
    there = json.loads(path.read_text())
    there["environment"]["hardware"] = "another machine"
    there["pitfalls"]["good"]["recorded"] = "2020-02-02"
    results.write(path.parent, msgspec.convert(there, results.Results))
    before = path.read_bytes()
    assert recorded(tmp_path) == 0
    assert capsys.readouterr().out == f"{path.relative_to(tmp_path)}: unchanged\n"
    assert path.read_bytes() == before


def test_a_tier_that_is_not_here(tmp_path: Path) -> None:
    """Nobody has so many GPUs: one line for all scripts, before any runs."""
    good(tmp_path)
    says = r"^tier cuda with 999 ranks needs 999 GPUs, found \d+ GPUs?: use --accelerator cpu(, or fewer --ranks)?$"
    with pytest.raises(NotHere, match=says):
        recorded(tmp_path, Asked(ranks=999, accelerator="cuda"))
    assert not (tmp_path / "results").exists()
    done = python("-m", "ddp_pitfalls", "run", "--root", tmp_path, "--accelerator", "cuda", "--ranks", "999")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(says, done.err.rstrip("\n"))


def test_what_no_longer_reproduces_is_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path)
    write(tmp_path, REPRO, "good", HEAD + GOOD.format(value="0.0"))
    assert verify(tmp_path, [], Asked(), jobs=2, as_json=False) == 1
    written = capsys.readouterr()
    assert "one no longer reproduces with torch " in written.out
    assert "fixed upstream, or the script needs care" in written.out
    assert "Traceback" not in written.out + written.err


def test_runs_beside_each_other(tmp_path: Path) -> None:
    """Two runners and a script by hand, with every core busy, do not disturb each other."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        good(tmp_path)
        command = [sys.executable, str(ROOT / REPRO / "ddp_cpu_move.py")]
        beside = [start(ROOT, "ddp-cpu-move"), start(tmp_path), subprocess.Popen(command, stdout=subprocess.PIPE, text=True)]
        assert [(process.communicate(timeout=240)[0], process.returncode)[1] for process in beside] == [0, 0, 0]
    finally:
        for process in spin:
            process.kill()
            process.wait()
