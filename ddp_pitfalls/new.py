"""``python -m ddp_pitfalls.new some-id``: lay out the three files of a new pitfall. What must be written is marked in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from ddp_pitfalls.catalogue import ROOT, Group, Pitfall, Unknown, find, pitfall

MARK = "TODO(new)"  # the tests fail while a file holds it, and show its line
KEBAB_CASE = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"

SCRIPT = f'''\
"""{MARK}: the mistake and what comes of it, in one sentence; the same in both scripts."""

from ddp_pitfalls.launch import main, variant
from ddp_pitfalls.toys import toy, two_steps


@variant
def with_fabric(fabric):
    model, optimizer = fabric.setup(*toy())
    # %s
    return two_steps(fabric, model, optimizer)


if __name__ == "__main__":
    main()
'''
BUG = f"BUG: {MARK}: the mistake stands on one line of code, and its reason here, at the end of that line"
FIX = f"FIX: {MARK}: the same line done right, and its reason here"

TITLE = f"{MARK}: the mistake and what comes of it, in a few words, here and in the heading"
PAGE = f"""\
---
title: "{TITLE}"
tags: [DistributedDataParallel]  # {MARK}: the APIs where people meet it, such as Fabric, Trainer, torch.distributed
symptoms:
  - group: "numbers are wrong"  # {MARK}: one of: {", ".join(get_args(Group))}
    text: "{MARK}: what people see, in their words; the text of an error verbatim in `backticks`"
sources:
  - title: "{MARK}: owner/repository#number, or the name of a page"
    url: "https://example.com"  # {MARK}: open it before you cite it
    says: "{MARK}: what it says that this page relies on, in one sentence"
---
# {TITLE}

--8<-- "build/evidence/%(id)s/top.md"

## What you see

{MARK}: what people see, for somebody who knows nothing of the cause yet.

## Why it happens

{MARK}: the mechanism, with the functions involved. Only what a recorded run or an opened source says.

--8<-- "build/evidence/%(id)s/evidence.md"

## Check your own run

{MARK}: a line or a function that finds it in a real job, or makes it loud.

## When it is fine

{MARK}: where the same code does no harm.

--8<-- "build/evidence/%(id)s/end.md"
"""


def lay_out(root: Path, id: str) -> Pitfall:
    """Write the scripts and the page of the pitfall ``id``. Raises Unknown where the name is bad, or taken."""
    if not re.fullmatch(KEBAB_CASE, id):
        raise Unknown(f"{id!r} is not an id: use lower-case words joined by hyphens that name the mistake, such as ddp-cpu-move")
    if id in find(root):
        raise Unknown(f"{id} is there already ({', '.join(_shown(root, find(root)[id]))}): choose another id")
    made = pitfall(root, id)
    for path, text in {made.repro: SCRIPT % BUG, made.fix: SCRIPT % FIX, made.page: PAGE % {"id": id}}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return made


def _shown(root: Path, one: Pitfall) -> list[str]:
    return [str(path.relative_to(root)) for path in (one.repro, one.fix, one.page) if path.is_file()]


def unfilled(root: Path) -> list[str]:
    """Every line of a script or page that is still to be written, as ``path:line: text``."""
    found = []
    for one in find(root).values():
        for path in (one.repro, one.fix, one.page):
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            found += [f"{path.relative_to(root)}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MARK in line]
    return found


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Lay out the pitfall that the arguments name, and say what to do next. Returns the exit code."""
    try:
        if len(arguments) != 1:
            raise Unknown("one id is needed, as in: nox -s new -- some-id")
        made = lay_out(root, arguments[0])
    except Unknown as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(_shown(root, made)))
    print(f"Fill in what is marked {MARK}, then: nox -t {made.id}, nox -s record -- {made.id}, nox -s tests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
