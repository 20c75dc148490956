"""``main``: run the variants of one script, by hand or under torchrun, and say what they prove."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    sys.exit("process groups work differently on Windows: run this under WSL")

import argparse
import atexit
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ddp_pitfalls import hardware, processes, torchrun
from ddp_pitfalls.measure import NO_SUCH_THING, NOT_AS_EXPECTED, NOT_MEASURED, Verdict, judge
from ddp_pitfalls.rank import Job
from ddp_pitfalls.report import conclusion, exit_code, heading, report
from ddp_pitfalls.script import BadScript, Script, Variant, load, variant
from ddp_pitfalls.supervise import PATIENCE, supervise

__all__ = ["main", "variant"]


def _threads() -> int:
    """The threads of this process, those of libraries included."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


THREADS_AT_IMPORT = _threads()


def main() -> NoReturn:
    """Run the script that calls this, print the verdicts, and exit.

    Exit codes: 0 as documented, 1 not, 2 asked for what is not here, 77 nothing could be measured here.
    """
    arguments = _arguments()
    try:
        code = _run(Path(sys.argv[0]), arguments)
    except (hardware.Absent, BadScript, processes.NoRoom) as error:
        print(error, file=sys.stderr)
        code = NO_SUCH_THING
    except BrokenPipeError:
        code = NOT_AS_EXPECTED  # nobody reads the verdicts
    except KeyboardInterrupt:
        print("interrupted; every rank has been ended", file=sys.stderr)
        code = 128 + signal.SIGINT
    except processes.Terminated:
        print("terminated; every rank has been ended", file=sys.stderr)
        code = 128 + signal.SIGTERM
    atexit._run_exitfuncs()  # torch 2.0 makes temporary files when it is imported
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # taking down an interpreter with torch in it takes longer than all the variants


def _run(path: Path, arguments: argparse.Namespace) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        script = load(path)
        return torchrun.run(script, wanted_variants(script, arguments.variant), arguments.accelerator, arguments.patience)
    refuse_threads()
    processes.raise_on_sigterm()
    return _supervised(load(path), arguments)


def refuse_threads() -> None:
    """Raise Absent where a torch operation has started threads here: a fork has none of them, and waits for them for ever."""
    if hardware.FORKS and _threads() > THREADS_AT_IMPORT:
        raise hardware.Absent("a torch operation ran before main(), and forked ranks would block for ever: move it into a variant")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run this pitfall or fix on several ranks and judge the outcome.")
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks (default 2; torchrun brings its own)")
    add("--accelerator", choices=["auto", *hardware.TIERS], default="auto", help="hardware tier (default: the best one here)")
    add("--variant", action="append", default=[], metavar="NAME", help="run only this variant; may be given several times")
    add(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long to wait for a rank that should not hang",
    )
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: a pitfall between ranks needs two or more")
    return arguments


def wanted_variants(script: Script, names: Sequence[str]) -> list[Variant]:
    """The variants to run: those named, or all. Raises Absent for a name that the script does not have."""
    for name in names:
        if name not in script.variants:
            raise hardware.Absent(f"{script.path.name} has no variant {name!r}: it has {', '.join(script.variants)}")
    return [v for v in script.variants.values() if not names or v.name in names]


def verdict_on(
    script: Script, wanted: Variant, tier: hardware.Tier, ranks: int, method: str, patience: float = PATIENCE, watched: bool = False
) -> Verdict:
    """Run one variant under the supervisor, and under ``checks.Watch`` if it is to be watched, and judge it."""
    if reason := hardware.missing(wanted.needs, tier):
        return Verdict(NOT_MEASURED, reason)
    if "spawn" in wanted.needs:
        method = "spawn"
    job = Job(script.path, wanted.name, ranks, tier, watched)
    return judge(script.side, wanted.kind, supervise(job, wanted.kind, method, patience))


def _supervised(script: Script, arguments: argparse.Namespace) -> int:
    wanted = wanted_variants(script, arguments.variant)
    tier = hardware.choose(arguments.accelerator, arguments.ranks, hardware.count_gpus())
    print(heading(script, tier, arguments.ranks), flush=True)
    verdicts = {}
    for one in wanted:
        verdicts[one.name] = verdict_on(script, one, tier, arguments.ranks, hardware.METHOD, arguments.patience)
        print(report(one, verdicts[one.name]), flush=True)
    print(conclusion(script, list(verdicts.values())))
    return exit_code(list(verdicts.values()))
