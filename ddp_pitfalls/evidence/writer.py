"""Writes the fragments to build/evidence/, where the pages include them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddp_pitfalls.evidence.entries import FOLDER, Entry, entries
from ddp_pitfalls.evidence.index import SYMPTOMS, symptoms
from ddp_pitfalls.evidence.sections import fragments


def render(found: list[Entry]) -> dict[str, str]:
    """Every fragment by its path below build/evidence/."""
    pages = {f"{entry.id}/{name}": text for entry in found for name, text in fragments(entry).items()}
    return {**pages, SYMPTOMS: symptoms(found)}


def write(root: Path) -> str:
    """Write what changed, remove what is no longer made, and say so in a line.

    Raises Unknown or BadResults, whose message names the file that is not as it must be.
    """
    found, pageless = entries(root)
    written, removed = replace_files(root / FOLDER, render(found))
    waiting = f"; without a page: {', '.join(pageless)}" if pageless else ""
    return f"evidence of {len(found)} pitfall{'' if len(found) == 1 else 's'}: {written} files written, {removed} removed{waiting}"


def replace_files(folder: Path, texts: Mapping[str, str]) -> tuple[int, int]:
    """Make the folder hold exactly these files. A file that has its text already is left alone: a change of its time means a rebuild."""
    written = 0
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            written += 1
    stale = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).as_posix() not in texts]
    for path in stale:
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return written, len(stale)
