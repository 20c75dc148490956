"""A script's command line: what stands on the screen, and the exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import SCRIPTS, Finished, run_script, verdict_lines

from ddp_pitfalls import hardware
from ddp_pitfalls.catalogue import ROOT
from ddp_pitfalls.launch import verdict_on
from ddp_pitfalls.measure import FIX, REPRO, REPRODUCED
from ddp_pitfalls.script import BadScript, load

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
OUTCOMES = SCRIPTS / "repros" / "outcomes.py"
ON_CPU = ("--variant", "on_cpu", "--variant", "on_cpu_with_ddp")
MODEL_PAIR = {side: ROOT / side / "ddp_cpu_move.py" for side in (REPRO, FIX)}


def outcomes(*arguments: str) -> Finished:
    return run_script(OUTCOMES, *arguments, **NO_GPU)


def test_what_stands_on_the_screen() -> None:
    finished = outcomes("--variant", "as_documented", "--variant", "on_gpu", "--variant", "in_a_later_release")
    here = hardware.versions()
    assert (
        finished.out
        == f"""\
outcomes: the pitfall
One variant for each thing that a script can say, for the tests of the command line.
2 ranks, tier cpu (gloo), torch {here["torch"]}, lightning {here["lightning"]}, python {here["python"]}

as_documented: reproduced
  loss
    rank 0: 2
      healthy 1
      broken  2
    rank 1: 2
      healthy 1
      broken  2

on_gpu: not measured
  needs a GPU, and the tier is cpu

in_a_later_release: not measured
  needs lightning>=99, and lightning {here["lightning"]} is here

repros/outcomes.py: as documented (1 reproduced, 2 not measured)
"""
    )
    assert (finished.code, finished.err) == (0, "")


def test_what_is_not_as_documented_is_explained() -> None:
    finished = outcomes()
    assert finished.code == 1
    assert verdict_lines(finished.out) == {
        "as_documented": "reproduced",
        "not_any_more": "not reproduced",
        "crashes": "crashed",
        "dies": "reproduced",
        "on_gpu": "not measured",
        "in_a_later_release": "not measured",
        "all": "repros/outcomes.py: NOT as documented (2 reproduced, 1 not reproduced, 1 crashed, 2 not measured)",
    }
    assert "  every rank is healthy\n" in finished.out
    assert "      broken  anything else (of a race)\n" in finished.out
    assert "  rank 0, output:\n    | printed by a rank\n" in finished.out
    assert 'raised OSError at `raise OSError("no such file")`: no such file\n' in finished.out
    assert re.search(r"  rank \d, stack:\n    \| Traceback", finished.out)
    assert finished.err == ""


@pytest.mark.parametrize("variants", [["on_gpu"], ["in_a_later_release", "on_gpu"]])
def test_nothing_measured(variants: list[str]) -> None:
    finished = outcomes(*(word for name in variants for word in ("--variant", name)))
    assert finished.code == 77
    assert finished.out.endswith(f"repros/outcomes.py: nothing could be measured here ({len(variants)} not measured)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accelerator", "cuda"], "tier cuda with 2 ranks needs 2 GPUs, found 0 GPUs: use --accelerator cpu"),
        (["--accelerator", "cuda-shared"], "tier cuda-shared needs a GPU, found 0 GPUs: use --accelerator cpu"),
        (
            ["--variant", "other"],
            "outcomes.py has no variant 'other': it has as_documented, not_any_more, crashes, dies, on_gpu, in_a_later_release",
        ),
    ],
)
def test_asked_for_what_is_not_here(arguments: list[str], message: str) -> None:
    assert outcomes(*arguments) == Finished(2, "", f"{message}\n")


def test_arguments_that_make_no_sense() -> None:
    finished = outcomes("--ranks", "1")
    assert finished.code == 2
    assert finished.err.endswith("error: --ranks 1: a pitfall between ranks needs two or more\n")


def test_a_need_that_nobody_knows() -> None:
    path = SCRIPTS / "repros" / "unknown_need.py"
    finished = run_script(path)
    assert finished.code == 2
    assert finished.err.startswith(f"{path}: one: unknown need 'three gpus'")
    assert finished.err.count("\n") == 1


def test_a_torch_operation_at_the_top_level() -> None:
    message = "a torch operation ran before main(), and forked ranks would block for ever: move it into a variant\n"
    assert run_script(SCRIPTS / "repros" / "early_operation.py") == Finished(2, "", message)


def test_a_script_outside_repros_and_fixes(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.py"
    path.write_text(OUTCOMES.read_text())
    message = f"{path}: a script stands in repros/ or fixes/, which decides what is expected of it\n"
    assert run_script(path) == Finished(2, "", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def one(fabric:\n    pass\n", "cannot be imported: SyntaxError: "),
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def one(fabric):\n    pass\n", "no function is marked @variant"),
    ],
)
def test_a_script_that_cannot_be_loaded(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / REPRO / "broken.py"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadScript) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="no such Python script"):
        load(tmp_path / REPRO / "absent.py")


@pytest.mark.parametrize("side", [REPRO, FIX])
def test_four_ranks(side: str) -> None:
    finished = run_script(MODEL_PAIR[side], "--ranks", "4", "--accelerator", "cpu", "--variant", "on_cpu_with_ddp")
    assert finished.code == 0, finished.out
    assert "\n4 ranks, tier cpu (gloo), " in finished.out
    assert [f"    rank {rank}: " in finished.out for rank in range(5)] == [True] * 4 + [False]


def changed(side: str, folder: Path, *replacements: tuple[str, str]) -> Path:
    """A copy of a script of the model pair with some of its text replaced."""
    text = MODEL_PAIR[side].read_text()
    for old, new in replacements:
        assert old in text, f"{MODEL_PAIR[side]} no longer has {old!r}: bring this test up to date"
        text = text.replace(old, new)
    path = folder / side / "ddp_cpu_move.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("side", "replacements"),
    [
        (REPRO, [("fabric.setup(*toy())", "toy()"), ("DistributedDataParallel(module)", "module")]),
        (
            FIX,
            [
                ("fabric.setup(*toy())", "toy()"),
                ("fabric.setup(model.module.float())", "model.float()"),
                ("DistributedDataParallel(module)", "module"),
                ("DistributedDataParallel(model.module.float())", "model.float()"),
            ],
        ),
    ],
)
def test_a_script_that_never_wraps_proves_nothing(side: str, replacements: list[tuple[str, str]], tmp_path: Path) -> None:
    finished = run_script(changed(side, tmp_path, *replacements), *ON_CPU, **NO_GPU)
    assert finished.code == 1
    assert verdict_lines(finished.out)["all"].endswith("NOT as documented (2 crashed)")
    reason = r": crashed\n  rank \d raised ValueError at `.+`: the model is not wrapped in DistributedDataParallel"
    assert len(re.findall(reason, finished.out)) == 2


@pytest.mark.parametrize(("here", "there", "verdict"), [(FIX, REPRO, "not reproduced"), (REPRO, FIX, "not fixed")])
def test_a_script_in_the_place_of_its_counterpart(here: str, there: str, verdict: str, tmp_path: Path) -> None:
    path = tmp_path / there / "ddp_cpu_move.py"
    path.parent.mkdir()
    path.write_text(MODEL_PAIR[here].read_text())
    finished = run_script(path, *ON_CPU, **NO_GPU)
    assert finished.code == 1
    assert verdict_lines(finished.out) == {
        "on_cpu": verdict,
        "on_cpu_with_ddp": verdict,
        "all": f"{there}/ddp_cpu_move.py: NOT as documented (2 {verdict})",
    }


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_method_of_starting_ranks_does_not_matter(method: str) -> None:
    script = load(MODEL_PAIR[REPRO])
    verdict = verdict_on(script, script.variants["on_cpu_with_ddp"], hardware.CPU, 2, method)
    assert verdict.word == REPRODUCED, verdict.why
