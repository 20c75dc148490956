"""The commands of this project: "nox -l" lists them, "nox -s NAME -- ARGUMENTS" runs one.

One environment, .nox/env, serves every session. The first session that needs it makes it; it is left alone while the pins, the
Python and this folder stay the same, so a session costs little more than what it runs. With --no-venv the Python on PATH is used
as it is, with its own torch and lightning, and nothing is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import nox

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # nox needs it there as well

nox.needs_version = ">=2025.10.16"  # the first release that was tried with this file
nox.options.sessions = ["tests", "lint", "docs"]

ROOT = Path(__file__).parent
REQUIREMENTS, REQUIREMENTS_DEV, REQUIREMENTS_BROWSER = "requirements.txt", "requirements-dev.txt", "requirements-browser.txt"
ENVIRONMENT = Path(".nox", "env")
NOTHING_MEASURED = 77  # exit code of a script on a machine that lacks what every variant needs
ADDRESS = "127.0.0.1:8000"  # where mkdocs serves, unless told otherwise

in_environment = True  # False under --no-venv; the session env finds out
python = str(ENVIRONMENT / "bin" / "python")  # never resolved: behind the link stands a Python without the environment


def same_python() -> bool:
    """Whether the environment, if there is one, was made for the Python that runs nox."""
    settings = ENVIRONMENT / "pyvenv.cfg"
    if not settings.is_file():
        return True
    found = dict(line.split(" = ", 1) for line in settings.read_text(encoding="utf-8").splitlines() if " = " in line)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return found.get("base-prefix") == sys.base_prefix and found.get("version_info", "").startswith(f"{here}.")


@nox.session(reuse_venv=same_python(), venv_backend="virtualenv")
def env(session: nox.Session) -> None:
    """Make the environment in .nox/env with the pinned torch and lightning; does nothing while the pins stay the same."""
    global in_environment, python
    if sys.platform == "win32":
        session.error("process groups work differently on Windows: run this under WSL")
    in_environment = session.venv_backend != "none"
    if in_environment:
        python = str(Path(os.path.relpath(session.bin), "python"))
        install(session, [REQUIREMENTS], ["-r", REQUIREMENTS], ["-q", "--no-deps", "--no-build-isolation", "-e", "."])
    else:
        python = shutil.which("python") or shutil.which("python3") or session.error("--no-venv: there is no python on PATH")
        session.log(f"using {python} as it is")


@nox.session(name="env-dev", venv_backend="none", requires=["env"])
def env_dev(session: nox.Session) -> None:
    """Add what only the tests, the linters and the documentation need to the same environment."""
    if in_environment:
        install(session, [REQUIREMENTS_DEV, REQUIREMENTS], ["-q", "-r", REQUIREMENTS_DEV])


def install(session: nox.Session, files: Sequence[str], *arguments: Sequence[str]) -> None:
    """Call ``pip install`` with each list of arguments, unless that was done with these files, this Python and this folder."""
    parts = [Path(file).read_bytes() for file in (*files, "pyproject.toml")]
    state = hashlib.sha256(b"\0".join([*parts, sys.version.encode(), os.fsencode(ROOT)])).hexdigest()
    stamp = Path(python).parent.parent / f"{files[0]}.installed"
    if stamp.is_file() and stamp.read_text() == state:
        return
    stamp.unlink(missing_ok=True)
    if all(session.run_install(python, "-m", "pip", "install", *more, external=True) for more in arguments):
        stamp.write_text(state)


def need(session: nox.Session, *modules: str) -> None:
    """End the session where the reader's own Python lacks a module; the environment has them all."""
    if in_environment:
        return
    find = "import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if not find_spec(m)))"
    if lacks := subprocess.run([python, "-c", find, *modules], capture_output=True, text=True, check=True).stdout.split():
        where = "requirements.txt and requirements-dev.txt name the releases"
        session.error(f"{python} has no {' and no '.join(lacks)}: install it there ({where}), or leave out --no-venv")


def run(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run the environment's Python with these arguments."""
    session.run(python, *arguments, env={**variables(), **environment}, external=True)


def variables() -> dict[str, str]:
    """What a command finds: the environment's other programs; or, with a Python of the reader, which does not have it, this project."""
    name, path = ("PATH", Path(python).parent.absolute()) if in_environment else ("PYTHONPATH", ROOT)
    return {name: os.pathsep.join(filter(None, [str(path), os.environ.get(name, "")]))}


def run_script(session: nox.Session, path: Path) -> None:
    """Run a repro or a fix. Where it can measure nothing on this machine, the session is skipped with the reasons that it gave."""
    need(session, "torch", "lightning")
    command = [python, str(path), *session.posargs]
    session.log(" ".join(command))
    with subprocess.Popen(command, env={**os.environ, **variables()}, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        lines = []
        try:
            for line in script.stdout:
                print(line, end="", flush=True)
                lines.append(line.strip())
        except KeyboardInterrupt:
            print(script.stdout.read(), end="", flush=True)  # it has been interrupted too, and ends its ranks
            raise
    if script.returncode == NOTHING_MEASURED:
        reasons = dict.fromkeys(line for line in lines if line.startswith("needs "))
        session.skip("; ".join(reasons) or "nothing could be measured here")
    if script.returncode:
        session.error(f"{path} ended with exit code {script.returncode}")


def add_script(prefix: str, sentence: str, path: Path) -> None:
    """Make the session of a script, tagged with the pitfall; there is none where a pair lacks one of its scripts."""
    if not path.is_file():
        return
    pitfall = path.stem.replace("_", "-")
    title = path.read_text(encoding="utf-8").partition("\n")[0].strip('" ')

    def script(session: nox.Session) -> None:
        run_script(session, path)

    script.__doc__ = f"{sentence}: {title}"
    nox.session(name=f"{prefix}-{pitfall}", venv_backend="none", requires=["env"], tags=[pitfall])(script)


for name in sorted({path.name for folder in ("repros", "fixes") for path in Path(folder).glob("*.py")}):
    add_script("repro", "Show the failure", Path("repros", name))
    add_script("fix", "Show the fix", Path("fixes", name))


@nox.session(venv_backend="none", requires=["env-dev"])
def tests(session: nox.Session) -> None:
    """Run every pair and all other tests; arguments go to pytest."""
    need(session, "torch", "lightning", "pytest", "xdist")
    run(session, "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", *session.posargs)


@nox.session(venv_backend="none", requires=["env-dev"])
def lint(session: nox.Session) -> None:
    """Check style, format and types: ruff check, ruff format, mypy."""
    need(session, "ruff", "mypy")
    run(session, "-m", "ruff", "check")
    run(session, "-m", "ruff", "format", "--check")
    run(session, "-m", "mypy")


@nox.session(venv_backend="none", requires=["env-dev"])
def docs(session: nox.Session) -> None:
    """Build the documentation in site/ from the recorded results; "-- serve" shows it at a local address."""
    need(session, "mkdocs", "material", "msgspec", "yaml")
    action, *more = session.posargs or ["build"]
    if action == "serve":
        refuse_taken(session, more)
    elif action != "build":
        session.error(f"docs: {action!r}: build and serve are possible")
    run(session, "-m", "ddp_pitfalls", "evidence")
    run(session, "-m", "mkdocs", action, "--strict", *more, NO_MKDOCS_2_WARNING="1")


@nox.session(venv_backend="none", requires=["env-dev"])
def browser(session: nox.Session) -> None:
    """Build the documentation and use it in Chromium: search, copying, phone, keyboard, dark scheme, links; arguments go to pytest."""
    if not shutil.which(os.environ.get("CHROMIUM", "chromium")):
        session.error("no Chromium: apt-get install chromium, or set CHROMIUM to the path of one")
    if in_environment:
        install(session, [REQUIREMENTS_BROWSER, REQUIREMENTS_DEV, REQUIREMENTS], ["-q", "-r", REQUIREMENTS_BROWSER])
    need(session, "mkdocs", "material", "msgspec", "yaml", "pytest", "pytest_playwright", "axe_playwright_python")
    run(session, "-m", "ddp_pitfalls", "evidence")
    run(session, "-m", "mkdocs", "build", "--strict", NO_MKDOCS_2_WARNING="1")
    folder = "tests/browser"  # apart from the other tests: neither their guards nor torch are wanted here
    run(session, "-m", "pytest", "--confcutdir", folder, folder, *session.posargs)


def refuse_taken(session: nox.Session, arguments: Sequence[str]) -> None:
    """End the session before the build where somebody else serves at the address."""
    given = " ".join(arguments).replace("=", " ").split()
    address = next((b for a, b in pairwise(given) if a in ("-a", "--dev-addr")), ADDRESS)
    host, _, port = address.rpartition(":")
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended does not count
        try:
            ours.bind((host, int(port)))
        except (OSError, ValueError) as error:
            session.error(f"cannot serve at {address} ({error}): choose another, as in nox -s docs -- serve --dev-addr 127.0.0.1:8001")


@nox.session(venv_backend="none", requires=["env"])
def verify(session: nox.Session) -> None:
    """Run every pair, or those named after "--", and say what is as documented; "-- --json" is for programs."""
    need(session, "torch", "lightning", "msgspec", "yaml", "rich")
    run(session, "-m", "ddp_pitfalls", "run", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def record(session: nox.Session) -> None:
    """Run every pair, or those named after "--", and keep what they measured in results/."""
    need(session, "torch", "lightning", "msgspec", "yaml")
    run(session, "-m", "ddp_pitfalls", "record", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def watch(session: nox.Session) -> None:
    """Run every pair, or those named after "--", under checks.Watch, and keep what it finds in results/checks/."""
    need(session, "torch", "lightning", "msgspec", "yaml")
    run(session, "-m", "ddp_pitfalls", "watch", *session.posargs)


ENVIRONMENTS = tomllib.loads((ROOT / "environments.toml").read_text(encoding="utf-8"))


@nox.session(venv_backend="none")
@nox.parametrize("release", [nox.param(block, id=f"torch-{block['torch']}") for block in ENVIRONMENTS["environment"]])
def versions(session: nox.Session, release: dict[str, Any]) -> None:
    """Record every pair, or those named after "--", and what the checks find, with another release, in an environment made for it."""
    with tempfile.TemporaryDirectory(prefix="ddp-pitfalls-versions-") as folder:
        session.run(sys.executable, "-m", "virtualenv", "-q", "--python", release["python"], folder, external=True)
        theirs = str(Path(folder, "bin", "python"))
        pins = [f"torch=={release['torch']}", f"lightning=={release['lightning']}", *release["others"], *ENVIRONMENTS["core"]["packages"]]
        session.run(theirs, "-m", "pip", "install", "-q", "--no-cache-dir", *pins, external=True)
        for command in ("record", "watch"):
            session.run(theirs, "-m", "ddp_pitfalls", command, *session.posargs, env={"PYTHONPATH": str(ROOT)}, external=True)


@nox.session(venv_backend="none", requires=["env"])
def benchmark(session: nox.Session) -> None:
    """Measure what a script costs by hand, through nox and in the warm process of the whole catalogue, and what Watch costs, as ratios."""
    need(session, "torch", "lightning")
    nox_here = [sys.executable, "-m", "nox", *([] if in_environment else ["--no-venv"])]
    run(session, "benchmarks/start.py", *session.posargs, NOX=shlex.join(nox_here))
    run(session, "benchmarks/catalogue.py")
    run(session, "benchmarks/watch.py")


@nox.session(venv_backend="none", requires=["env"])
def new(session: nox.Session) -> None:
    """Lay out the three files of a new pitfall: nox -s new -- some-id."""
    need(session, "msgspec", "yaml")
    run(session, "-m", "ddp_pitfalls.new", *session.posargs)
