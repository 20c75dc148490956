"""``python -m ddp_pitfalls run | record | watch | evidence``. Each command imports what it needs; none imports torch into this process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddp_pitfalls import processes
from ddp_pitfalls.catalogue import ROOT, Unknown
from ddp_pitfalls.measure import NO_SUCH_THING
from ddp_pitfalls.results import BadResults
from ddp_pitfalls.runner import JOBS, Asked, NotHere


def main() -> int:
    """Run a command; a problem that the reader can mend is one line."""
    parser = argparse.ArgumentParser(prog="python -m ddp_pitfalls", description="Run, record and show the catalogue.")
    commands = parser.add_subparsers(required=True, metavar="command")
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("ids", nargs="*", metavar="pitfall", help="default: all")
    runs.add_argument("--ranks", type=int, default=2)
    runs.add_argument("--accelerator", default="auto", choices=["auto", "cuda", "cuda-shared", "cpu"])
    runs.add_argument("--jobs", type=int, default=JOBS, help="scripts at a time (default: four more than cores)")
    runs.add_argument(
        "--patience", type=float, default=Asked.patience, metavar="SECONDS", help="how long to wait for a rank that should not hang"
    )
    runs.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    run = commands.add_parser("run", parents=[runs], help="run pairs and say what is as documented")
    run.add_argument("--json", action="store_true", help="for programs")
    run.set_defaults(command=_run)
    record = commands.add_parser("record", parents=[runs], help="run pairs and write results/<environment>.json")
    record.add_argument("--spawn", action="store_true", help="run all again in spawned ranks, which takes minutes; the verdicts must agree")
    record.add_argument("--replace", action="store_true", help="record a pitfall that was as documented and is not any more")
    record.set_defaults(command=_record)
    watch = commands.add_parser("watch", parents=[runs], help="run pairs under checks.Watch and write results/checks/<environment>.json")
    watch.set_defaults(command=_watch)
    evidence = commands.add_parser("evidence", help="write the generated parts of the pages to build/evidence/")
    evidence.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    evidence.set_defaults(command=_evidence)
    arguments = parser.parse_args()
    if getattr(arguments, "ranks", 2) < 2:
        parser.error(f"--ranks {arguments.ranks}: a pitfall between ranks needs two or more")
    command: Callable[[argparse.Namespace], int] = arguments.command
    processes.raise_on_sigterm()
    try:
        return command(arguments)
    except (Unknown, BadResults, NotHere, processes.NoRoom) as error:
        print(error, file=sys.stderr)
        return NO_SUCH_THING
    except KeyboardInterrupt:
        print("interrupted; every rank has been ended", file=sys.stderr)
        return 128 + signal.SIGINT
    except processes.Terminated:
        print("terminated; every rank has been ended", file=sys.stderr)
        return 128 + signal.SIGTERM


def _run(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.verify import verify

    with processes.temporary_files():
        return verify(arguments.root, arguments.ids, _asked(arguments), arguments.jobs, arguments.json)


def _record(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.record import record

    with processes.temporary_files():
        options = {"replace": arguments.replace, "spawn": arguments.spawn}
        return record(arguments.root, arguments.ids, _asked(arguments), arguments.jobs, **options)


def _watch(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.findings import watch

    with processes.temporary_files():
        return watch(arguments.root, arguments.ids, _asked(arguments), arguments.jobs)


def _asked(arguments: argparse.Namespace) -> Asked:
    return Asked(ranks=arguments.ranks, accelerator=arguments.accelerator, patience=arguments.patience)


def _evidence(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.evidence import write

    print(write(arguments.root))
    return 0


if __name__ == "__main__":
    code = main()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # what multiprocessing would still do is to remove its files, which are gone already
