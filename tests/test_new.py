"""Laying out a new pitfall."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_pitfalls.catalogue import find, front
from ddp_pitfalls.new import MARK, lay_out, main, unfilled
from ddp_pitfalls.script import load


def test_three_files_are_laid_out(tmp_path: Path) -> None:
    """They are found as a pitfall, have the shape that the rest expects, and say on which lines something is to be written."""
    made = lay_out(tmp_path, "some-id")
    assert find(tmp_path) == {"some-id": made}
    assert not made.missing()
    assert load(made.repro).variants.keys() == load(made.fix).variants.keys()
    assert front(made.page).title.startswith(MARK)
    headings = re.findall(r"^## (.*)$", made.page.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["What you see", "Why it happens", "Check your own run", "When it is fine"]
    assert re.findall(r'"build/evidence/some-id/(\w+)\.md"', made.page.read_text(encoding="utf-8")) == ["top", "evidence", "end"]
    marked = {line.partition(":")[0] for line in unfilled(tmp_path)}
    assert marked == {"repros/some_id.py", "fixes/some_id.py", "docs/pitfalls/some-id.md"}


def test_next_steps_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The three files, and the commands that follow."""
    assert main(["some-id"], tmp_path) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[:3] == ["repros/some_id.py", "fixes/some_id.py", "docs/pitfalls/some-id.md"]
    assert "nox -s record -- some-id" in said


@pytest.mark.parametrize("id", ["Some-Id", "some_id", "some-", "-some", "some--id", "2-ranks", "some id", "../some", ""])
def test_bad_id_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], id: str) -> None:
    """One line says what an id looks like; nothing is written."""
    assert main([id], tmp_path) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"{id!r} is not an id: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["repros/some_id.py", "fixes/some_id.py", "docs/pitfalls/some-id.md"])
def test_existing_id_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    """Also where only one of its files is there, which stays as it is."""
    (tmp_path / there).parent.mkdir(parents=True)
    (tmp_path / there).write_text("mine")
    assert main(["some-id"], tmp_path) == 2
    assert capsys.readouterr().err == f"some-id is there already ({there}): choose another id\n"
    assert (tmp_path / there).read_text() == "mine"
    assert list(find(tmp_path)["some-id"].missing())


@pytest.mark.parametrize("arguments", [[], ["some-id", "another-id"]])
def test_one_id_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """None, or two, is a mistake that is told in one line."""
    assert main(arguments, tmp_path) == 2
    assert capsys.readouterr().err == "one id is needed, as in: nox -s new -- some-id\n"
