"""Every pair: both scripts are as documented and as recorded, and their difference is the explanation."""

from __future__ import annotations

import ast
import difflib
import re
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ddp_pitfalls import new, results
from ddp_pitfalls.catalogue import ROOT, Unknown, find, front
from ddp_pitfalls.evidence import source
from ddp_pitfalls.measure import AS_DOCUMENTED, FIX, NOT_MEASURED, REPRO, Kind, Measurement, judge, same
from ddp_pitfalls.record import pairs, scripts_of
from ddp_pitfalls.runner import JOBS, Asked, Outcome, ScriptRun, run
from ddp_pitfalls.script import load

CATALOGUE = find()
MARKS = {REPRO: "BUG", FIX: "FIX"}
SIDES = (REPRO, FIX)


def script_of(id: str, side: str) -> Path:
    return CATALOGUE[id].repro if side == REPRO else CATALOGUE[id].fix


def declared(id: str, side: str) -> dict[str, source.Declared]:
    """The variants of a script, read from its text, so that the tests can be collected whatever is wrong with it."""
    with suppress(OSError, Unknown):
        path = script_of(id, side)
        return {variant.name: variant for variant in source.variants(path.read_text(encoding="utf-8"), path)}
    return {}


EVERY_ID = pytest.mark.parametrize("id", CATALOGUE)
EVERY_SCRIPT = pytest.mark.parametrize(("id", "side"), [(id, side) for id in CATALOGUE for side in SIDES])
EVERY_VARIANT = pytest.mark.parametrize(("id", "name"), [(id, name) for id in CATALOGUE for name in declared(id, REPRO)])
EVERY_VARIANT_OF_A_SCRIPT = pytest.mark.parametrize(
    ("id", "side", "name"), [(id, side, name) for id in CATALOGUE for side in SIDES for name in declared(id, side)]
)


# What the scripts measure


@dataclass(frozen=True)
class Ran:
    """Both scripts of a pitfall, run on this machine."""

    scripts: dict[str, ScriptRun]

    def outcome(self, side: str, name: str) -> Outcome:
        script = self.scripts[side]
        found = next((o for o in script.outcomes if o.variant == name), None)
        assert found is not None, script.problem or f"{script.path} did not run {name}"
        return found

    def kind(self, name: str) -> Kind:
        return load(self.scripts[REPRO].path).variants[name].kind


@pytest.fixture(scope="session")
def ran(request: pytest.FixtureRequest, workplace: None) -> dict[str, Ran]:
    """The pitfalls of the tests that were chosen, all of them run once."""
    ids = {item.callspec.params.get("id") for item in request.session.items if hasattr(item, "callspec")}
    chosen = [one for id, one in CATALOGUE.items() if id in ids and one.repro.is_file() and one.fix.is_file()]
    scripts = list(run(scripts_of(chosen), Asked(), jobs=JOBS))
    return {one.id: Ran({script.side: script for script in scripts if script.pitfall == one.id}) for one in chosen}


def test_there_are_pairs() -> None:
    assert CATALOGUE, f"{ROOT} has no repros/, fixes/ and docs/pitfalls/: the tests run in a clone of the repository"


@EVERY_VARIANT_OF_A_SCRIPT
def test_as_documented(id: str, side: str, name: str, ran: dict[str, Ran]) -> None:
    outcome = ran[id].outcome(side, name)
    if outcome.verdict.word == NOT_MEASURED:
        pytest.skip(outcome.verdict.why)
    assert outcome.verdict.as_documented, f"{outcome.news}\n{outcome.report}"


@EVERY_SCRIPT
def test_something_was_measured(id: str, side: str, ran: dict[str, Ran]) -> None:
    """A machine on which everything is skipped proves nothing."""
    script = ran[id].scripts[side]
    assert any(o.verdict.word != NOT_MEASURED for o in script.outcomes), script.problem or "no variant could be measured here"


@EVERY_ID
def test_the_record_is_still_true(id: str, ran: dict[str, Ran]) -> None:
    scripts = ran[id].scripts
    here = scripts[REPRO].environment
    assert here is not None, scripts[REPRO].problem
    path = ROOT / "results" / f"{here.name}.json"
    recorded = results.read(path).pitfalls.get(id) if path.exists() else None
    assert recorded is not None, f"{path.relative_to(ROOT)} has no record of {id}: run nox -s record -- {id}"
    now = pairs(list(scripts.values()))[id]
    wrong = list(differences(recorded, now))
    assert not wrong, f"{path.relative_to(ROOT)} is out of date, run nox -s record -- {id}:\n" + "\n".join(wrong)


def differences(recorded: results.PairResult, now: results.PairResult) -> Iterator[str]:
    for side, then_, now_ in ((REPRO, recorded.repro, now.repro), (FIX, recorded.fix, now.fix)):
        for name in dict.fromkeys([*then_, *now_]):
            if name not in then_ or name not in now_ or not results.alike(then_[name], now_[name]):
                texts = [msgspec.json.encode(r[name]).decode() if name in r else "nothing" for r in (then_, now_)]
                yield f"{side}, {name}:\n  recorded {texts[0]}\n  now      {texts[1]}"


@EVERY_VARIANT
def test_each_is_red_in_the_place_of_the_other(id: str, name: str, ran: dict[str, Ran]) -> None:
    if ran[id].outcome(REPRO, name).verdict.word == NOT_MEASURED:
        pytest.skip(ran[id].outcome(REPRO, name).verdict.why)
    kind = ran[id].kind(name)
    broken, fixed = (ran[id].outcome(side, name).verdict.ranks for side in SIDES)
    assert judge(FIX, kind, broken).word not in AS_DOCUMENTED
    assert judge(REPRO, kind, fixed).word not in AS_DOCUMENTED


# What the two scripts have in common


@EVERY_ID
def test_the_same_variants_on_both_sides(id: str) -> None:
    """In the same order; a variant whose user some layer protects stands in the fix alone."""
    repro, fix = declared(id, REPRO), declared(id, FIX)
    assert repro, f"{CATALOGUE[id].repro}: no function is marked @variant"
    assert [name for name, variant in repro.items() if variant.protects] == []
    assert list(repro) == [name for name, variant in fix.items() if not variant.protects]
    assert {v.name: (v.needs, v.varies) for v in repro.values()} == {v.name: (v.needs, v.varies) for v in fix.values() if not v.protects}


@EVERY_ID
def test_the_kind_stands_in_the_repro_only(id: str) -> None:
    assert {v.kind for v in declared(id, FIX).values()} == {"silent"}


@EVERY_VARIANT
def test_the_same_expectations_on_both_sides(id: str, name: str, ran: dict[str, Ran]) -> None:
    """The same quantity, healthy and broken on every rank that measured on both sides."""
    if ran[id].outcome(REPRO, name).verdict.word == NOT_MEASURED:
        pytest.skip(ran[id].outcome(REPRO, name).verdict.why)
    sides = [{end.rank: end.measurement for end in ran[id].outcome(side, name).verdict.ranks} for side in SIDES]
    for rank, repro in sides[0].items():
        fix = sides[1].get(rank)
        if repro is not None and fix is not None:
            assert repro.quantity == fix.quantity
            assert expectations_agree(repro, fix), f"rank {rank}: {repro} in the repro, {fix} in the fix"


def expectations_agree(a: Measurement, b: Measurement) -> bool:
    return same(a.healthy, b.healthy) and (a.broken == b.broken or same(a.broken, b.broken))


# The three files


@EVERY_ID
def test_the_three_files_are_there(id: str) -> None:
    missing = [str(path.relative_to(ROOT)) for path in CATALOGUE[id].missing()]
    assert not missing, f"{id} lacks {', '.join(missing)}: a pitfall is two scripts and a page of one name"


@EVERY_ID
def test_nothing_is_left_to_fill_in(id: str) -> None:
    one = CATALOGUE[id]
    ours = [str(path.relative_to(ROOT)) for path in (one.repro, one.fix, one.page)]
    unfilled = [line for line in new.unfilled(ROOT) if line.partition(":")[0] in ours]
    assert not unfilled, "fill in:\n" + "\n".join(unfilled)


@EVERY_ID
def test_the_front_matter_is_complete(id: str) -> None:
    assert front(CATALOGUE[id].page).title


# The difference between them


@dataclass(frozen=True)
class Line:
    """A line of code without its comment.

    ``block`` is the pattern that it belongs to, ``declares`` whether it is part of an import or of how a variant fails.
    """

    number: int
    code: str
    mark: str
    block: str
    declares: bool


COMMENT = re.compile(r"# (BUG|FIX): (?P<reason>.*)")
START_OR_END = re.compile(r"# --8<-- \[(start|end):(.+)\]")


def code_lines(path: Path) -> list[Line]:
    """The code of a script: no comments, no docstrings, and no variants that stand in the fix alone."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    protected = [name for name, variant in {v.name: v for v in source.variants(text, path)}.items() if variant.protects]
    skipped = {number for node in ast.walk(tree) for number in _docstring(node)}
    skipped |= {n for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in protected for n in _whole(node)}
    comments = {number: (column, comment) for number, column, comment in comments_of(path)}
    declaring = {number for node in _declarations(tree) for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines, block = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        column, comment = comments.get(number, (len(line), ""))
        if border := START_OR_END.match(comment):
            block = border[2] if border[1] == "start" else ""
        mark = COMMENT.match(comment)
        code = line[:column].rstrip()
        if code and number not in skipped:
            lines.append(Line(number, code, mark[1] if mark else "", block, number in declaring))
    return lines


def comments_of(path: Path) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of every comment."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1], token.string


def _declarations(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    """The imports of a script, the decorators of its variants, and the constants that stand in these."""
    decorators = [d for node in tree.body if isinstance(node, ast.FunctionDef) for d in node.decorator_list]
    names = {node.id for decorator in decorators for node in ast.walk(decorator) if isinstance(node, ast.Name)}
    yield from decorators
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if isinstance(node, ast.Assign) and {t.id for t in node.targets if isinstance(t, ast.Name)} & names:
            yield node


def _docstring(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and body and ast.get_docstring(node, clean=False) is not None:
        return _whole(body[0])
    return range(0)


def _whole(node: ast.stmt) -> range:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or node.lineno) + 1)


def unexplained(repro: Path, fix: Path) -> list[str]:
    """The hunks without a line that has the mistake or its mending, but for imports and what declares how the repro fails.

    A pattern is one hunk: its mistake is explained once.
    """
    before, after = code_lines(repro), code_lines(fix)
    marked_patterns = {line.block for line in [*before, *after] if line.mark}
    found = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, [x.code for x in before], [x.code for x in after], autojunk=False).get_opcodes():
        hunk = [*before[a:b], *after[c:d]]
        explained = any(line.mark or (line.block and line.block in marked_patterns) for line in hunk)
        if tag != "equal" and not explained and not all(line.declares for line in hunk):
            found += [f"- {x.number}: {x.code}" for x in before[a:b]] + [f"+ {x.number}: {x.code}" for x in after[c:d]]
    return found


@EVERY_ID
def test_the_difference_is_the_explanation(id: str) -> None:
    found = unexplained(CATALOGUE[id].repro, CATALOGUE[id].fix)
    assert not found, f"no BUG or FIX says why {id} differs here:\n" + "\n".join(found)


@EVERY_ID
def test_the_scripts_differ(id: str) -> None:
    """The patterns have the same names, and the titles are the same: the reader compares like with like."""
    repro, fix = code_lines(CATALOGUE[id].repro), code_lines(CATALOGUE[id].fix)
    assert [x.code for x in repro] != [x.code for x in fix]
    assert {x.block for x in repro} == {x.block for x in fix}
    titles = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in (CATALOGUE[id].repro, CATALOGUE[id].fix)]
    assert titles[0] == titles[1]


# The marked lines


def marks(path: Path) -> dict[int, tuple[str, str]]:
    """Line: mark and reason."""
    found = ((number, COMMENT.match(comment)) for number, _, comment in comments_of(path))
    return {number: (match[1], match["reason"]) for number, match in found if match}


def definitions(path: Path) -> dict[str, ast.stmt]:
    """What the top level of a script defines, by name: functions, classes and constants."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def reached(defined: dict[str, ast.stmt], name: str) -> set[str]:
    """The definitions of the script to which a function comes, itself included."""
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        seen.add(current)
        names = {node.id for node in ast.walk(defined[current]) if isinstance(node, ast.Name)}
        waiting += [other for other in names if other in defined and other not in seen]
    return seen


def without_mark(path: Path) -> list[str]:
    """The variants that come to no marked line, but for those that stand for code which needs no mending."""
    text = path.read_text(encoding="utf-8")
    found, defined = set(marks(path)), definitions(path)
    parts = {variant.name: reached(defined, variant.name) for variant in source.variants(text, path) if not variant.protects}
    return [name for name, reach in parts.items() if not found & {number for part in reach for number in _whole(defined[part])}]


def stray_marks(path: Path) -> list[str]:
    """The marks that are of the other side, have no reason, stand on no code, or to which no variant comes."""
    text, defined = path.read_text(encoding="utf-8"), definitions(path)
    parts = {part for variant in source.variants(text, path) for part in reached(defined, variant.name)}
    lines = {number for part in parts for number in _whole(defined[part])}
    source_lines, wanted = text.splitlines(), MARKS[path.parent.name]
    return [
        f"{path}:{number}: {source_lines[number - 1].strip()}"
        for number, (mark, reason) in marks(path).items()
        if mark != wanted or not reason.strip() or source_lines[number - 1].strip().startswith("#") or number not in lines
    ]


@EVERY_SCRIPT
def test_every_variant_comes_to_its_line(id: str, side: str) -> None:
    path = script_of(id, side)
    assert not without_mark(path), f"{path}: no line with # {MARKS[side]}: in {', '.join(without_mark(path))}"


@EVERY_SCRIPT
def test_every_mark_is_of_use(id: str, side: str) -> None:
    assert not stray_marks(script_of(id, side))


# These tests themselves

SCRIPT = '''"""Title."""

from ddp_pitfalls.launch import main, variant


def helper(model):
    """What it does."""
    return model.cpu()  # BUG: moves the model


@variant
def one(fabric):
    # a comment
    return helper(fabric)


@variant
def two(fabric):
    return fabric.cpu()  # BUG: as above


if __name__ == "__main__":
    main()
'''
FIXED = SCRIPT.replace("model.cpu()  # BUG: moves", "model  # FIX: does not move").replace("fabric.cpu()  # BUG:", "fabric  # FIX:")


def laid_out(folder: Path, repro: str, fix: str) -> tuple[Path, Path]:
    paths = folder / REPRO / "some.py", folder / FIX / "some.py"
    for path, text in zip(paths, (repro, fix)):
        path.parent.mkdir()
        path.write_text(text)
    return paths


def test_a_good_pair_is_good(tmp_path: Path) -> None:
    repro, fix = laid_out(tmp_path, SCRIPT.replace("@variant\ndef two", '@variant(Raises(KeyError, "x"))\ndef two'), FIXED)
    assert unexplained(repro, fix) == []
    assert [found for path in (repro, fix) for found in (*without_mark(path), *stray_marks(path))] == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("return helper(fabric)", "return helper(fabric, 1)", ["- 14:     return helper(fabric)", "+ 14:     return helper(fabric, 1)"]),
        ("    main()", "    main()\n    print()", ["+ 24:     print()"]),
        ("  # FIX: does not move the model", "", []),  # the line of the repro has its mark
        ("# a comment", "# another", []),
        ("What it does", "What else it does", []),
        ("import main, variant", "import main, other, variant", []),
    ],
)
def test_an_unexplained_difference_is_found(old: str, new: str, found: list[str], tmp_path: Path) -> None:
    assert old in FIXED
    repro, fix = laid_out(tmp_path, SCRIPT, FIXED.replace(old, new))
    assert unexplained(repro, fix) == found


@pytest.mark.parametrize(
    ("old", "new", "bare", "stray"),
    [
        ("  # FIX: as above", "", ["two"], 0),
        ("# FIX: as above", "# BUG: as above", [], 1),
        ("# FIX: as above", "# FIX: ", [], 1),
        ("return helper(fabric)", "return fabric", ["one"], 1),
        ("    # a comment", "    # FIX: a line of its own", [], 1),
    ],
)
def test_a_mark_out_of_place_is_found(old: str, new: str, bare: list[str], stray: int, tmp_path: Path) -> None:
    assert old in FIXED
    _, fix = laid_out(tmp_path, SCRIPT, FIXED.replace(old, new))
    assert without_mark(fix) == bare
    assert len(stray_marks(fix)) == stray
