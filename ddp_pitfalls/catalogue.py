"""Which pitfalls there are: every pair of scripts with its page. Reads files; imports no script and no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ddp_pitfalls.measure import FIX, REPRO

PAGES = Path("docs") / "pitfalls"
ROOT = Path(__file__).resolve().parent.parent

Group = Literal[
    "trains but does not learn", "ranks disagree", "hangs", "crashes", "numbers are wrong", "slow", "memory on GPU 0"
]  # what one sees: the symptom index is ordered by these


Words = Annotated[str, msgspec.Meta(pattern=r"\S")]  # not empty


class Unknown(Exception):
    """A pitfall, page or front matter that is not as it must be; the message says what to do."""


class Symptom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader sees, in a reader's words."""

    group: Group
    text: Words


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public thread, page or pull request, and what it says that this page relies on."""

    title: Words
    url: Annotated[str, msgspec.Meta(pattern=r"^https?://\S+$")]
    says: Words


class Releases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the records of some variants say in the releases ``where``, and in no others: words of a verdict, reason, error or warning.

    ``where`` is a library and its releases, such as ``torch >= 2.2, < 2.4 or torch >= 2.8``.
    """

    variants: Annotated[list[Words], msgspec.Meta(min_length=1)]
    where: Words
    says: Words

    def __post_init__(self) -> None:
        self.ranges()

    def ranges(self) -> list[tuple[str, SpecifierSet]]:
        """Libraries and their releases. Raises ValueError."""
        parts = [part.strip().partition(" ") for part in self.where.split(" or ")]
        try:
            found = [(library, SpecifierSet(releases)) for library, _, releases in parts]
        except InvalidSpecifier:
            found = []
        if not found or any(library not in ("torch", "lightning") or not releases for library, releases in found):
            raise ValueError(f"{self.where!r} names no releases: write for example torch >= 2.2, < 2.4 or lightning < 2.1")
        return found

    def applies(self, torch: str, lightning: str) -> bool:
        """Whether these are such releases."""
        here = {"torch": torch, "lightning": lightning}
        return any(releases.contains(here[library], prereleases=True) for library, releases in self.ranges())


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The front matter of a page. ``tags`` are the APIs where people meet the pitfall, ``releases`` what differs between releases."""

    title: Words
    tags: Annotated[list[Words], msgspec.Meta(min_length=1)]
    symptoms: Annotated[list[Symptom], msgspec.Meta(min_length=1)]
    sources: list[Source]
    description: str = ""
    releases: list[Releases] = []


@dataclass(frozen=True)
class Pitfall:
    """Where the three files of a pitfall stand."""

    id: str
    repro: Path
    fix: Path
    page: Path

    def missing(self) -> list[Path]:
        return [path for path in (self.repro, self.fix, self.page) if not path.is_file()]


def pitfall(root: Path, id: str) -> Pitfall:
    """The files of the pitfall ``id``, whether they exist or not."""
    stem = id.replace("-", "_")
    return Pitfall(id, root / REPRO / f"{stem}.py", root / FIX / f"{stem}.py", root / PAGES / f"{id}.md")


def find(root: Path = ROOT) -> dict[str, Pitfall]:
    """Every pitfall of which at least one file is there, by id, in alphabetical order."""
    scripts = (path.stem.replace("_", "-") for side in (REPRO, FIX) for path in (root / side).glob("*.py"))
    pages = (path.stem for path in (root / PAGES).glob("*.md"))
    return {id: pitfall(root, id) for id in sorted({*scripts, *pages})}


def chosen(known: dict[str, Pitfall], ids: Iterable[str]) -> list[Pitfall]:
    """The pitfalls called ``ids``, or all. Raises Unknown with the nearest names."""
    for id in ids:
        if id not in known:
            near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise Unknown(f"no pitfall is called {id!r}: {hint}")
    return [known[id] for id in ids] or list(known.values())


def front(page: Path) -> Front:
    """The front matter of a page. Raises Unknown where it is absent, incomplete or has fields that nobody reads."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unknown(f"{page}: cannot be read: {error}") from error
    head, mark, _ = text.removeprefix("---\n").partition("\n---\n")
    if not text.startswith("---\n") or not mark:
        raise Unknown(f"{page}: no front matter between two lines of ---: title, tags, symptoms, sources")
    try:
        return msgspec.convert(yaml.safe_load(head), Front)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise Unknown(f"{page}: front matter: {' '.join(str(error).split())}") from error
