"""Every copyable pattern stands alone and works: it is cut out of its fix and used where this project cannot be imported."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Finished

from ddp_pitfalls.catalogue import ROOT, find
from ddp_pitfalls.measure import FIX, REPRO
from ddp_pitfalls.patterns import BadPattern, names, pattern

USERS = Path(__file__).resolve().parent / "patterns"
STEMS = [one.fix.stem for one in find().values() if one.fix.is_file()]
SECTIONS = [(stem, name) for stem in STEMS for name in names((ROOT / FIX / f"{stem}.py").read_text(encoding="utf-8"))]
WITH_PATTERNS = list(dict.fromkeys(stem for stem, _ in SECTIONS))


@pytest.mark.parametrize(("stem", "name"), SECTIONS)
def test_a_pattern_stands_alone(stem: str, name: str) -> None:
    cut = pattern((ROOT / FIX / f"{stem}.py").read_text(encoding="utf-8"), name)
    compile(cut, f"{stem}, {name}", "exec")
    assert name in names((ROOT / REPRO / f"{stem}.py").read_text(encoding="utf-8")), f"the repro has no counterpart of {name}"


@pytest.fixture(scope="module")
def warm(workplace: None) -> Iterator[subprocess.Popen[str]]:
    """A process that runs scripts without this project; see ``tests/warm.py``."""
    command = [sys.executable, Path(__file__).with_name("warm.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("stem", WITH_PATTERNS)
def test_the_patterns_work(stem: str, tmp_path: Path, warm: subprocess.Popen[str]) -> None:
    user = USERS / f"{stem}.py"
    cut = names((ROOT / FIX / f"{stem}.py").read_text(encoding="utf-8"))
    assert user.is_file(), f"fixes/{stem}.py has patterns to copy ({', '.join(cut)}): write tests/patterns/{stem}.py, which uses them"
    done = use(user, [pattern((ROOT / FIX / f"{stem}.py").read_text(encoding="utf-8"), name) for name in cut], tmp_path, warm)
    assert done.code == 0, f"{user}:\n{done.out}{done.err}"


def use(user: Path, patterns: list[str], folder: Path, warm: subprocess.Popen[str]) -> Finished:
    """Run a script beside ``pattern.py`` in a folder where ``ddp_pitfalls`` is a module that cannot be imported."""
    assert warm.stdin is not None and warm.stdout is not None
    script = folder / user.name
    if script != user:
        script.write_text(user.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pattern.py").write_text("\n\n".join(patterns), encoding="utf-8")
    (folder / "ddp_pitfalls.py").write_text('raise ImportError("a pattern must work without this project")\n', encoding="utf-8")
    warm.stdin.write(f"{script}\n")
    warm.stdin.flush()
    ready, _, _ = select.select([warm.stdout], [], [], 240)
    assert ready, f"{user} has not ended within 240 seconds"
    return Finished(int(warm.stdout.readline()), *((folder / name).read_text() for name in ("out", "err")))


def test_every_user_has_patterns() -> None:
    left = sorted({path.stem for path in USERS.glob("*.py")} - set(WITH_PATTERNS))
    assert not left, f"tests/patterns has scripts for patterns that are gone: {', '.join(left)}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("assert hasattr(pattern, 'double')", ""),
        ("assert pattern.double(2) == 5", "AssertionError"),
        ("import ddp_pitfalls", "ImportError"),
    ],
)
def test_a_failing_use_is_seen(text: str, message: str, tmp_path: Path, warm: subprocess.Popen[str]) -> None:
    user = tmp_path / "some.py"
    user.write_text(f"import pattern\n{text}\n")
    done = use(user, ["def double(x):\n    return 2 * x\n"], tmp_path, warm)
    assert (done.code == 0) is (message == "")
    assert message in done.err


SCRIPT = '''\
"""Title."""

from __future__ import annotations

import math, os as system
import torch.distributed as dist
from contextlib import (
    contextmanager,
    suppress,
)

import torch
from torch import nn, optim

from ddp_pitfalls.toys import toy

LIMIT = 3


# --8<-- [start:lent]
@contextmanager
def lent(model: nn.Module):
    """Keep it."""
    import json

    kept = [p for p in model.parameters() if p.numel() > len(json.dumps(1))]
    try:
        yield {**{k: v for k, v in enumerate(kept)}, "backend": lambda x=math.pi: (x, dist.get_backend())}
    except ValueError as error:
        print(error, __name__)


# --8<-- [end:lent]


def inside():
    # --8<-- [start:indented]
    total = sum(range(3))
    # --8<-- [end:indented]
    return total


# --8<-- [start:project]
def of_the_project():
    return toy()
# --8<-- [end:project]


# --8<-- [start:elsewhere]
def of_the_script():
    return inside() + LIMIT
# --8<-- [end:elsewhere]


# --8<-- [start:other package]
def of_another_package():
    return numpy.ones(1)
# --8<-- [end:other package]


# --8<-- [start:broken]
def broken(:
# --8<-- [end:broken]


# --8<-- [start:open]
'''
PARSES = SCRIPT.replace("def broken(:", "def broken(): ...")


def test_a_pattern_has_the_imports_that_it_uses() -> None:
    head, _, body = pattern(PARSES, "lent").partition("\n\n\n")
    assert head == "import math\nimport torch.distributed as dist\nfrom contextlib import contextmanager\n\nfrom torch import nn"
    assert body.startswith("@contextmanager\ndef lent(")
    assert body.endswith("        print(error, __name__)\n")


def test_a_pattern_inside_a_function_is_dedented() -> None:
    assert pattern(PARSES, "indented") == "total = sum(range(3))\n"


def test_names() -> None:
    assert names(SCRIPT) == ["lent", "indented", "project", "elsewhere", "other package", "broken", "open"]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (PARSES, "project", r"'project' uses from ddp_pitfalls.toys import toy: what readers copy uses torch, lightning and the standard"),
        (PARSES, "elsewhere", r"'elsewhere' uses LIMIT, inside, defined elsewhere"),
        (PARSES, "other package", r"'other package' uses numpy, defined elsewhere"),
        (f"import numpy\n{PARSES}", "other package", r"'other package' uses import numpy: what readers copy uses torch, lightning and the"),
        (f"from . import numpy\n{PARSES}", "other package", r"'other package' uses from . import numpy: what readers copy uses"),
        (SCRIPT, "broken", r"'broken' is not Python"),
        (PARSES, "open", r"'open' needs one line '# --8<-- \[start:open\]' and, after it, one"),
        (PARSES, "absent", r"'absent' needs one line"),
        (PARSES + PARSES, "lent", r"'lent' needs one line"),
    ],
)
def test_a_pattern_that_nobody_could_copy(source: str, name: str, message: str) -> None:
    with pytest.raises(BadPattern, match=message):
        pattern(source, name)
