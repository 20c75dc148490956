"""``python -m ddp_pitfalls run | record | evidence``. Each command imports what it needs; none imports torch into this process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ddp_pitfalls.catalogue import ROOT, Unknown
from ddp_pitfalls.results import BadResults


def main() -> int:
    """Run a command; a problem that the reader can mend is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m ddp_pitfalls", description="Run, record and show the catalogue.")
    commands = parser.add_subparsers(required=True, metavar="command")
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("ids", nargs="*", metavar="pitfall", help="default: all")
    runs.add_argument("--ranks", type=int, default=2)
    runs.add_argument("--accelerator", default="auto", choices=["auto", "cuda", "cuda-shared", "cpu"])
    runs.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="scripts at a time (default: one a core)")
    runs.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    run = commands.add_parser("run", parents=[runs], help="run pairs and say what is as documented")
    run.add_argument("--json", action="store_true", help="for programs")
    run.set_defaults(command=_run)
    record = commands.add_parser("record", parents=[runs], help="run pairs and write results/<environment>.json")
    record.add_argument("--replace", action="store_true", help="record a pitfall that was as documented and is not any more")
    record.set_defaults(command=_record)
    evidence = commands.add_parser("evidence", help="write the generated parts of the pages to build/evidence/")
    evidence.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    evidence.set_defaults(command=_evidence)
    arguments = parser.parse_args()
    if getattr(arguments, "ranks", 2) < 2:
        parser.error(f"--ranks {arguments.ranks}: a pitfall between ranks needs two or more")
    command: Callable[[argparse.Namespace], int] = arguments.command
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return command(arguments)
    except (Unknown, BadResults) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; every rank has been ended", file=sys.stderr)
        return 128 + signal.SIGINT


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _run(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.runner import Asked
    from ddp_pitfalls.verify import verify

    return verify(arguments.root, arguments.ids, Asked(arguments.ranks, arguments.accelerator), arguments.jobs, arguments.json)


def _record(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.record import record
    from ddp_pitfalls.runner import Asked

    asked = Asked(arguments.ranks, arguments.accelerator)
    return record(arguments.root, arguments.ids, asked, arguments.jobs, arguments.replace)


def _evidence(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.evidence import write

    print(write(arguments.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
