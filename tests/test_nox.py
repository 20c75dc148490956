"""The commands. They run in a small project with this noxfile, where pip only writes down how it was called."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddp_pitfalls.catalogue import ROOT, find

HERE = Path(sys.executable).parent  # not resolved: behind the link stands a Python without the environment
SCRIPT = """\
    \"\"\"A mistake.\"\"\"
    import os, sys
    import ddp_pitfalls
    print("prefix", sys.prefix)
    print("core", ddp_pitfalls.__file__)
    print("arguments", sys.argv[1:])
    if "--need" in sys.argv:
        print("only: not measured")
        print("  needs two GPUs, and the tier is cpu")
        sys.exit(77)
    sys.exit(int("--fail" in sys.argv))
"""
PIP = """\
    import os, sys
    with open(os.environ["PIP_CALLS"], "a") as calls:
        print(*sys.argv[1:], file=calls)
    sys.exit(int(os.environ.get("PIP_FAILS", "0")))
"""
SLOW = """\
    \"\"\"A script that takes a while to end its ranks.\"\"\"
    import time
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(1)
        print("the ranks are gone", flush=True)
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one pair, no pins, and a pip that installs nothing."""
    root = tmp_path / "project"
    write(root / "repros" / "a_mistake.py", SCRIPT)
    write(root / "fixes" / "a_mistake.py", SCRIPT)
    write(root / "ddp_pitfalls" / "__init__.py", "")
    write(root / "tools" / "pip" / "__init__.py", "")
    write(root / "tools" / "pip" / "__main__.py", PIP)
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        write(root / name, "# nothing\n")
    for name in ("noxfile.py", "environments.toml"):
        shutil.copy(ROOT / name, root)
    return root


def surroundings(project: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a call: this Python first on PATH, no seed packages, no colours."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
    paths = {"PATH": os.pathsep.join([str(HERE), os.environ["PATH"]]), "PYTHONPATH": str(project / "tools")}
    return {**ours, **paths, "PIP_CALLS": str(project / "calls"), "VIRTUALENV_NO_SEED": "1", "NO_COLOR": "1", **more}


def call(project: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The exit code of nox, and all it says."""
    command = [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), *arguments]
    done = subprocess.run(command, env=surroundings(project, variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def pip_calls(project: Path) -> list[str]:
    """How pip has been called since the last look."""
    calls = project / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return lines


def listed(project: Path) -> dict[str, dict[str, object]]:
    code, text = call(project, "--list", "--json", "-k", "not nothing")  # without -k, only what runs by default
    assert code == 0, text
    return {entry["session"]: entry for entry in json.loads(text)}


def test_every_session_is_listed_with_a_sentence() -> None:
    """Also those of every script, tagged with the pitfall."""
    sessions = listed(ROOT)
    assert {"env", "env-dev", "tests", "lint", "docs", "browser", "record", "benchmark", "new"} <= sessions.keys()
    for name, entry in sessions.items():
        assert len(str(entry["description"] or "").split()) > 3, f"{name} has no sentence"
    for one in find(ROOT).values():
        scripts = {f"repro-{one.id}": one.repro, f"fix-{one.id}": one.fix}
        assert {name for name, path in scripts.items() if path.is_file()} == {n for n, e in sessions.items() if e["tags"] == [one.id]}


def test_readers_python_is_used_as_it_is(project: Path) -> None:
    """Arguments reach the script, the core is found, and nothing is installed."""
    code, text = call(project, "--no-venv", "-s", "repro-a-mistake", "--", "--ranks", "4")
    assert code == 0, text
    assert f"prefix {sys.prefix}\n" in text
    assert f"core {project / 'ddp_pitfalls'}" in text
    assert "arguments ['--ranks', '4']" in text
    assert not pip_calls(project)
    assert not (project / ".nox").exists()


def test_readers_python_without_torch_is_told(project: Path) -> None:
    """One line names what is missing."""
    bare = project / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    code, text = call(project, "--no-venv", "-s", "repro-a-mistake", PATH=os.pathsep.join([str(bare / "bin"), os.environ["PATH"]]))
    assert code == 1
    assert f"{bare / 'bin' / 'python'} has no torch and no lightning: install it there" in text
    assert "Traceback" not in text


def test_tag_runs_the_pair(project: Path) -> None:
    """Both scripts, the repro first."""
    code, text = call(project, "--no-venv", "-t", "a-mistake")
    assert code == 0, text
    assert re.search(r"repro-a-mistake: success.*\n.*fix-a-mistake: success", text)


def test_nothing_measured_is_skipped_with_the_reason(project: Path) -> None:
    """Exit code 77 is neither success nor failure."""
    code, text = call(project, "--no-venv", "-s", "fix-a-mistake", "--", "--need")
    assert code == 0, text
    assert "fix-a-mistake: skipped (needs two GPUs, and the tier is cpu)" in text


def test_not_as_documented_fails(project: Path) -> None:
    """Any other exit code ends the session, and nox, with a failure."""
    code, text = call(project, "--no-venv", "-s", "repro-a-mistake", "--", "--fail")
    assert code == 1
    assert f"{Path('repros', 'a_mistake.py')} ended with exit code 1" in text


def test_environment_is_made_once(project: Path) -> None:
    """A second call installs nothing; other pins, a failed installation, and another Python do."""
    session = ("-s", "fix-a-mistake")
    core = {"PYTHONPATH": os.pathsep.join([str(project / "tools"), str(project)])}  # no pip installs it here
    code, text = call(project, *session, **core)
    assert code == 0, text
    assert f"prefix {project / '.nox' / 'env'}\n" in text
    assert [line.rsplit(maxsplit=2)[1:] for line in pip_calls(project)] == [["-r", "requirements.txt"], ["-e", "."]]

    code, text = call(project, *session, **core)
    assert code == 0, text
    assert not pip_calls(project)

    write(project / "requirements.txt", "# other pins\n")
    code, text = call(project, *session, **core, PIP_FAILS="1")
    assert code == 1, text
    assert len(pip_calls(project)) == 1
    code, text = call(project, *session, **core)
    assert code == 0, text
    assert len(pip_calls(project)) == 2

    settings = project / ".nox" / "env" / "pyvenv.cfg"
    settings.write_text(re.sub(r"version_info = .*", "version_info = 3.9.1.final.0", settings.read_text()))
    code, text = call(project, *session, **core)
    assert code == 0, text
    assert "Creating virtual environment" in text
    assert len(pip_calls(project)) == 2


def test_taken_port_is_one_line(project: Path) -> None:
    """It is told before anything is built; developers' packages come on top of the readers'."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = call(project, "-s", "docs", "--", "serve", "--dev-addr", address)
    assert code == 1
    assert f"cannot serve at {address}" in text
    assert "Traceback" not in text
    assert "ddp_pitfalls evidence" not in text
    assert [line.split()[-1] for line in pip_calls(project)] == ["requirements.txt", ".", "requirements-dev.txt"]


def test_interrupt_waits_for_the_script(project: Path) -> None:
    """Ctrl-C reaches nox and the script; nox lets the script end its ranks."""
    write(project / "repros" / "a_mistake.py", SLOW)
    command = [sys.executable, "-m", "nox", "-f", str(project / "noxfile.py"), "--no-venv", "-s", "repro-a-mistake"]
    with subprocess.Popen(
        command, env=surroundings(project, {}), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as nox:
        assert nox.stdout is not None
        assert nox.stdout.readline() == "ready\n"
        os.killpg(nox.pid, signal.SIGINT)
        rest = nox.stdout.read()
    assert "the ranks are gone" in rest
    assert nox.returncode != 0


def pins(name: str) -> dict[str, set[str]]:
    """The packages that a file of requirements names, and their releases."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "-r")):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{name}: {line}: not an exact pin"
            found.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_package_is_pinned(name: str) -> None:
    """What a pinned package needs is pinned too, but for the CUDA packages of torch, which pins them itself."""
    known = {**pins("requirements.txt"), **pins(name)}
    for package in pins(name):
        try:
            needed = [Requirement(text) for text in requires(package) or []]
        except PackageNotFoundError:  # for another Python, or not installed in this environment
            continue
        names = {canonicalize_name(n.name) for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})}
        missing = {n for n in names - known.keys() if not n.startswith(("nvidia-", "cuda-", "triton"))}
        assert not missing, f"{name}: {package} needs {', '.join(sorted(missing))}"
