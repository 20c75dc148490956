"""``python -m ddp_pitfalls run | record | evidence``. Each command imports what it needs: evidence starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ddp_pitfalls.catalogue import ROOT, Unknown
from ddp_pitfalls.results import BadResults


def main() -> int:
    """Run a command; a problem that the reader can mend is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m ddp_pitfalls", description=__doc__)
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="run pairs and write results/<environment>.json")
    record.add_argument("ids", nargs="*", metavar="pitfall", help="default: all")
    record.add_argument("--ranks", type=int, default=2)
    record.add_argument("--accelerator", default="auto")
    record.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    record.set_defaults(command=_record)
    evidence = commands.add_parser("evidence", help="write the generated parts of the pages to build/evidence/")
    evidence.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    evidence.set_defaults(command=_evidence)
    arguments = parser.parse_args()
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except (Unknown, BadResults) as error:
        print(error, file=sys.stderr)
        return 2


def _record(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.record import record

    return record(arguments.root, arguments.ids, arguments.ranks, arguments.accelerator)


def _evidence(arguments: argparse.Namespace) -> int:
    from ddp_pitfalls.evidence import write

    print(write(arguments.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
