"""Writes the fragments to build/evidence/, where the pages include them, and the files for programs to docs/."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ddp_pitfalls.evidence.entries import FOLDER, Entry, entries
from ddp_pitfalls.evidence.findings import found_by_watch
from ddp_pitfalls.evidence.functions import CHECKS, copies, functions
from ddp_pitfalls.evidence.index import recorded, symptoms
from ddp_pitfalls.evidence.overview import hangs, pitfalls, versions
from ddp_pitfalls.evidence.programs import published
from ddp_pitfalls.evidence.sections import fragments
from ddp_pitfalls.findings import Watched, read_all

DOCS = Path("docs")


def render(found: list[Entry], checks: str = "", watched: Sequence[Watched] = ()) -> dict[Path, str]:
    """Every generated file by its path in the project. ``checks`` is the text of checks.py, ``watched`` what its Watch found."""
    pages = {FOLDER / entry.id / name: text for entry in found for name, text in fragments(entry, watched).items()}
    over_all = {
        "symptoms": symptoms(found),
        "recorded": recorded(found),
        "pitfalls": pitfalls(found),
        "versions": versions(found),
        "hangs": hangs(found),
        "checks": functions(checks, found),
        "findings": found_by_watch(checks, found, watched),
    }
    code = {FOLDER / "checks" / f"{name}.py": text for name, text in copies(checks).items()}
    programs = {DOCS / name: text for name, text in {**published(found), CHECKS.name: checks}.items()}
    return {**pages, **{FOLDER / f"{name}.md": text for name, text in over_all.items()}, **code, **programs}


def write(root: Path) -> str:
    """Write what changed, remove what is no longer made, and say so in a line.

    Raises Unknown or BadResults, whose message names the file that is not as it must be.
    """
    found, pageless = entries(root)
    checks = root / CHECKS
    texts = render(found, checks.read_text(encoding="utf-8") if checks.is_file() else "", read_all(root))
    written = write_files(root, texts)
    removed = remove_others(root / FOLDER, {root / path for path in texts})
    waiting = f"; without a page: {', '.join(pageless)}" if pageless else ""
    return f"evidence of {len(found)} pitfall{'' if len(found) == 1 else 's'}: {written} files written, {removed} removed{waiting}"


def write_files(root: Path, texts: Mapping[Path, str]) -> int:
    """Write these files, and say how many. One that has its text already is left alone: a change of its time means a rebuild."""
    written = 0
    for name, text in texts.items():
        path = root / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            written += 1
    return written


def remove_others(folder: Path, kept: Collection[Path]) -> int:
    """Remove every other file of a folder, and folders that are empty then; say how many files."""
    stale = [path for path in folder.rglob("*") if path.is_file() and path not in kept]
    for path in stale:
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return len(stale)
